"""Activations on the mesh: telling the compiler how one lies, and running an op on each device's share.

Arrays are described by the letters of their dimensions: B batch, L length, H heads, F MLP width, V vocabulary; every
other letter (D, K, R) stays whole.
"""

import collections
import math
from collections.abc import Callable

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cubit_jax.ops.context_parallel.layout import Layout, choose_head_shares, length_multiple
from cubit_jax.partitioning.mesh import AXES, BATCH_AXES

_LETTER_AXES = {"B": BATCH_AXES, "L": ("context",), "H": ("tensor",), "F": ("tensor",), "V": ("tensor",)}
_WHOLE = "DKN"  # of the model, of a head, any other


def constrain(x: jax.Array, dims: str) -> jax.Array:
    """Tells the compiler how an activation lies on the mesh; does nothing without a mesh.

    Args:
      x: array with one dimension per letter.
      dims: its dimension letters, as "BLD", "BLHK" or "BLV"; "N" is any other. A batch or a length that the mesh does
        not divide (one prompt, one row of diagnostics) stays whole.

    Raises:
      ValueError: a letter that is not known, another rank than letters, a size that the mesh does not divide.
    """
    mesh = _auto_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(dims, _sizes([dims], [x]), mesh))


def per_shard(fn: Callable, dims: str) -> Callable:
    """Runs an op on each device's share of batch and heads, which the compiler cannot do by itself for device code.

    A layer wraps its op once and calls it with positional arrays; closed-over Python values (window, scale,
    implementation) stay as they are, arrays must be arguments:

        solve = per_shard(
            lambda query, key, rhs, ridge, segment_ids, layout=None: ops.kernel_solve(
                query, key, rhs, ridge=ridge, segment_ids=segment_ids, window=self.window, layout=layout),
            "BLHK,BLHK,BLHK,H,BL->BLHK")
        u = solve(reference, normed_reference, rhs, ridge, segment_ids)

    Inside, `fn` sees B / (batch axes) rows and H / tensor heads and no mesh. Without a mesh, or with one device, this
    is `fn` itself. A letter of the inputs that the output lacks is summed, as in einsum: an op that adds up its heads
    and returns "BLD" gets the sum over the devices that share them.

    Where the mesh splits the sequence (axis context), arrays with an L are exchanged on the way in and back on the way
    out: the devices of the axis share the heads, and `fn` sees whole sequences. Where there are not enough heads, or
    an array without heads is read by all of them ("BLD"), they share rows as well: `fn` is then called with the
    keyword `layout`, an ops.Layout, and sees dealt rows. A length that cannot be dealt in equal pieces (a prompt) stays
    whole on each device. One call of several ops exchanges less than several calls.

    Args:
      fn: function of arrays (or None) that treats batch rows and heads independently.
      dims: comma-separated dimension letters of the arguments, "->", those of the result (several: a tuple). An
        argument that is None may have any letters.

    Raises:
      ValueError (from the call): the number of heads is no multiple of the mesh's tensor axis.
    """
    inputs, outputs = (side.split(",") for side in dims.split("->"))

    def sharded(*args):
        if len(args) != len(inputs):
            raise ValueError(f"{len(args)} arguments for the {len(inputs)} of {dims!r}")
        mesh = _auto_mesh()
        if mesh is None or all(size == 1 for size in mesh.shape.values()):
            return fn(*args)
        sizes = _sizes(inputs, args)
        layout = _layout(inputs, outputs, sizes, mesh)
        if layout is None:
            sizes.pop("L", None)
        split = {axis for letter, axes in _axes(sizes, mesh).items() for axis in axes if letter in "".join(inputs)}
        kept = {axis for letter, axes in _axes(sizes, mesh).items() for axis in axes if letter in "".join(outputs)}

        def local(*shards):
            result = fn(*shards) if layout is None else _run_dealt(fn, layout, inputs, outputs, shards)
            if summed := tuple(axis for axis in AXES if axis in split - kept):
                result = jax.lax.psum(result, summed)
            return result

        out_specs = tuple(_spec(letters, sizes, mesh) for letters in outputs)
        return jax.shard_map(
            local,
            in_specs=tuple(_spec(letters, sizes, mesh) for letters in inputs),
            out_specs=out_specs if len(outputs) > 1 else out_specs[0],
            check_vma=False,  # the check knows neither Pallas calls nor a scan's initial zeros
        )(*args)

    return sharded


def _layout(inputs, outputs, sizes, mesh):
    """The layout of an op's arrays where the mesh splits the sequence, else None."""
    devices = mesh.shape["context"]
    if devices == 1 or "L" not in sizes:
        return None
    of_heads = [letters for letters in inputs if letters != "BL"] + outputs
    share_heads = all("H" in letters for letters in of_heads if "L" in letters)
    heads = sizes["H"] // mesh.shape["tensor"] if share_heads else 1
    head_shares = choose_head_shares(devices, heads)
    if sizes["L"] % length_multiple(devices, head_shares):
        return None
    return Layout("context", devices, head_shares, sizes["L"])


def _run_dealt(fn, layout, inputs, outputs, shards):
    """fn of exchanged arrays; its results are exchanged back."""

    def one(letters, x):
        if x is None:
            return None
        if "L" in letters:
            return layout.deal(x, heads="H" in letters)
        return layout.own_heads(x, letters.index("H")) if "H" in letters else x

    shards = [one(letters, x) for letters, x in zip(inputs, shards)]
    result = fn(*shards, **({"layout": layout} if layout.row_shares > 1 else {}))
    results = [
        layout.undeal(x, heads="H" in letters) if "L" in letters else x
        for letters, x in zip(outputs, result if len(outputs) > 1 else [result])
    ]
    return tuple(results) if len(outputs) > 1 else results[0]


def _auto_mesh():
    """The mesh of `jax.set_mesh`, or None: there is none, or this already runs on one device's share."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    return mesh


def _sizes(letters, arrays):
    """Letter -> size; an array of another rank than its letters, or two sizes for one letter, is an error."""
    sizes = collections.OrderedDict()
    for dims, array in zip(letters, arrays):
        if array is None:
            continue
        if len(dims) != array.ndim:
            raise ValueError(f"an array of shape {array.shape} cannot have the dimensions {dims!r}")
        for letter, size in zip(dims, array.shape):
            if letter not in _LETTER_AXES and letter not in _WHOLE:
                raise ValueError(
                    f"dimension {letter!r} of {dims!r} is not known: the mesh splits "
                    f"{', '.join(_LETTER_AXES)}, and {', '.join(_WHOLE)} stay whole"
                )
            if letter in _LETTER_AXES and sizes.setdefault(letter, size) != size:
                raise ValueError(f"dimension {letter} is both {sizes[letter]} and {size}")
    return sizes


def _axes(sizes, mesh):
    """Letter -> the mesh axes that split it."""
    result = {}
    for letter, size in sizes.items():
        axes = tuple(axis for axis in _LETTER_AXES[letter] if mesh.shape[axis] > 1)
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways:
            if letter not in "BL":
                raise ValueError(f"dimension {letter} of size {size} is no multiple of mesh {'x'.join(axes)} = {ways}")
            axes = ()
        result[letter] = axes
    return result


def _spec(dims, sizes, mesh):
    axes = _axes(sizes, mesh)
    return P(*(axes.get(letter) or None for letter in dims))
