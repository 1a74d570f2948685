"""The device mesh, where every parameter lives on it, and how layers run an op on each device's share.

A mesh has five axes: replica (across slices: gradients only), data, fsdp (batch, and parameters sharded), tensor
(heads, MLP width, vocabulary) and context (sequence). Arrays are described by the letters of their dimensions: B batch,
L length, H heads, F MLP width, V vocabulary; every other letter (D, K, R) stays whole in activations.
"""

import collections
import math
import re

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cubit_jax.ops.context_parallel.layout import Layout, choose_head_shares, length_multiple

AXES = ("replica", "data", "fsdp", "tensor", "context")
BATCH_AXES = ("replica", "data", "fsdp")
_LETTER_AXES = {"B": BATCH_AXES, "L": ("context",), "H": ("tensor",), "F": ("tensor",), "V": ("tensor",)}
_WHOLE = "DKN"  # of the model, of a head, any other

# The first pattern found in a parameter's path decides. A spec names the axes of one layer's array; the leading layer
# axis of scanned layers is never split. There is no rule for "any other matrix": a new parameter needs its own line.
RULES = (
    (r"\bembed/embedding$", P("tensor", "fsdp")),  # [V, D]
    (r"\blm_head/kernel$", P("fsdp", "tensor")),  # [D, V]
    (r"\b[qkvrw]_proj/kernel$", P("fsdp", "tensor", None)),  # [D, H, K]
    (r"\bo_proj/kernel$", P("tensor", None, "fsdp")),  # [H, K, D]
    (r"\b(up|gate)_proj/kernel$", P("fsdp", "tensor")),  # [D, F]
    (r"\bdown_proj/kernel$", P("tensor", "fsdp")),  # [F, D]
    (r"\b(lrr|beta)_proj/kernel$", P("fsdp", None)),  # [D, H]
    (r"\bprecond_[uv]$", P("fsdp", None)),  # [D, R]
    (r"\b(diag|attention_diag)$", P(None, None)),  # [H, D], or [D] when the heads share it
    (r"\b(lrr_low|lrr_range|reference_scale|log_ridge|beta_proj/bias)$", P(None)),  # [H]
    (r"(_norm/scale|\bprecond_d)$", P(None)),  # [D]
    (r"\bstep_size$", P()),
)


def mesh_sizes(sizes, num_devices):
    """Sizes of the mesh axes for a number of devices.

    Args:
      sizes: mapping from every name in AXES to its size; at most one may be -1, "whatever is left".
      num_devices: how many devices the mesh must cover.

    Returns:
      dict of axis name -> size, in the order of AXES.

    Raises:
      ValueError: unknown axis, a size below 1, two sizes of -1, or sizes whose product is not the number of devices.
    """
    for name in sizes:
        if name not in AXES:
            raise ValueError(f"unknown mesh axis {name!r}: the axes are {', '.join(AXES)}")
    result = {name: int(sizes.get(name, 1)) for name in AXES}
    for name, size in result.items():
        if size < 1 and size != -1:
            raise ValueError(f"mesh.{name}={size} must be a positive number, or -1 for what is left")
    free = [name for name, size in result.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"mesh.{free[0]} and mesh.{free[1]} are both -1: only one can take what is left")
    fixed = math.prod(size for size in result.values() if size != -1)
    if free:
        if num_devices % fixed:
            raise ValueError(f"the fixed mesh sizes multiply to {fixed}, which does not divide {num_devices} devices")
        result[free[0]] = num_devices // fixed
    elif fixed != num_devices:
        raise ValueError(f"the mesh sizes multiply to {fixed}, but there are {num_devices} devices")
    return result


def make_mesh(sizes, devices=None):
    """The mesh of these sizes (see mesh_sizes) over all devices, or over those given. Use it with `jax.set_mesh`.

    Devices of several slices (groups with a slow network between them: TPU slices, GPU hosts): the slices are dealt to
    the outermost batch axes, replica first, so that tensor, context and, where the sizes allow it, fsdp stay inside
    one.

    Raises:
      ValueError: from mesh_sizes, or the slices cannot be dealt to the batch axes.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(sizes, len(devices))
    # Explicit axes, JAX's default, would make every Dense layer state the sharding of its result.
    axis_types = (AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=axis_types, devices=devices)
    inside, across = dict(sizes), dict.fromkeys(AXES, 1)
    for axis in BATCH_AXES:
        across[axis] = math.gcd(sizes[axis], slices // math.prod(across.values()))
        inside[axis] //= across[axis]
    if math.prod(across.values()) != slices:
        raise ValueError(
            f"{slices} slices cannot be dealt to mesh replica x data x fsdp = "
            f"{' x '.join(str(sizes[axis]) for axis in BATCH_AXES)}: set mesh.replica={slices}"
        )
    layout = mesh_utils.create_hybrid_device_mesh(
        tuple(inside.values()), tuple(across.values()), devices=devices, allow_split_physical_axes=True
    )
    return jax.sharding.Mesh(layout, AXES, axis_types=axis_types)


def check(mesh, *, batch_size, accumulation_steps, model):
    """Raises ValueError naming the two numbers where a size of the run is no multiple of the mesh axis that splits it.

    Args:
      mesh: the device mesh.
      batch_size: rows a step over all devices. accumulation_steps: how many micro-batches they are cut into.
      model: has num_heads, mlp_dim, vocab_size, model_dim, mixers, seq_len.
    """
    rows = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if batch_size % (accumulation_steps * rows):
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of {accumulation_steps * rows} = "
            f"accumulation_steps={accumulation_steps} x {rows} devices sharing the batch (mesh replica, data, fsdp)"
        )
    split = {"num_heads": "tensor", "mlp_dim": "tensor", "vocab_size": "tensor", "model_dim": "fsdp"}
    for field, axis in split.items():
        size = getattr(model, field)
        if size % mesh.shape[axis]:
            raise ValueError(f"model.{field}={size} must be a multiple of mesh.{axis}={mesh.shape[axis]}")
    # The diagonal of Causal Energy Minimization may be shared by the heads, so that devices share its rows alone.
    heads = 1 if "cem" in model.mixers else model.num_heads // mesh.shape["tensor"]
    Layout("context", mesh.shape["context"], choose_head_shares(mesh.shape["context"], heads), model.seq_len)


def parameter_spec(path, ndim):
    """The PartitionSpec of one parameter, by the first rule that its path matches.

    Args:
      path: "layers/mixer/q_proj/kernel"; whatever stands before the parameter's own name is ignored.
      ndim: its number of dimensions; one more than the rule's is the leading axis of scanned layers.

    Raises:
      ValueError: no rule matches, or the rule is for another number of dimensions.
    """
    for pattern, spec in RULES:
        if re.search(pattern, path):
            if path.endswith("diag") and ndim == 1:
                return P(None)
            if ndim not in (len(spec), len(spec) + 1):
                raise ValueError(f"parameter {path} has {ndim} dimensions, its sharding rule {spec} has {len(spec)}")
            return P(*(None,) * (ndim - len(spec)), *spec)
    raise ValueError(f"parameter {path} has no sharding rule: add one to RULES in cubit_jax/partitioning.py")


def state_shardings(mesh, state):
    """NamedSharding of every array in a training state: moments lie where their parameters do, scalars everywhere.

    Args:
      mesh: the device mesh.
      state: pytree of arrays or shapes whose paths end in parameter paths (params, Adam's mu and nu), plus scalars.
    """

    def one(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = parameter_spec(path, leaf.ndim) if leaf.ndim or "params" in path.split("/") else P()
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, state)


def batch_sharding(mesh, ndim=2):
    """Of arrays [B, L, ...]: rows over every batch axis, the sequence over context."""
    return NamedSharding(mesh, P(BATCH_AXES, "context", *(None,) * (ndim - 2)))


def process_share(mesh):
    """(index, count): this process reads part `index` of `count` equal parts of a batch's rows.

    Processes that hold parts of the same rows (a tensor or context axis across hosts) have the same index.

    Raises:
      ValueError: the parts of two processes overlap without being the same.
    """
    rows = mesh.devices.reshape(math.prod(mesh.shape[axis] for axis in BATCH_AXES), -1)
    held = {}
    for row, devices in enumerate(rows):
        for device in devices:
            held.setdefault(device.process_index, set()).add(row)
    parts = sorted({tuple(sorted(rows)) for rows in held.values()})
    if sum(map(len, parts)) != len(rows):
        raise ValueError(
            f"the rows of {len(held)} processes overlap: mesh.tensor x mesh.context must divide the "
            "devices of a process, or be a multiple of them"
        )
    return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def put_batch(mesh, batch):
    """The global batch on the devices, from this process's rows (see process_share) as a dict of arrays [b, L]."""
    sharding, (_, count) = batch_sharding(mesh), process_share(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, array, (count * len(array), *array.shape[1:]))
        for name, array in batch.items()
    }


def constrain(x, dims):
    """Tells the compiler how an activation lies on the mesh; does nothing without a mesh.

    Args:
      x: array with one dimension a letter.
      dims: its dimension letters, as "BLD", "BLHK" or "BLV"; "N" is any other. A batch or a length that the mesh does
        not divide (one prompt, one row of diagnostics) stays whole.

    Raises:
      ValueError: a letter that is not known, another rank than letters, a size that the mesh does not divide.
    """
    mesh = _auto_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(dims, _sizes([dims], [x]), mesh))


def per_shard(fn, dims):
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
