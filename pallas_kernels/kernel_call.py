"""A Pallas call whose kernel reads its arrays by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

Ref = Any  # a reference to a block of an array in the device's memory; jax has no public type for it


class Operand(NamedTuple):
    """An input or output of a kernel.

    name: the field of the kernel's NamedTuple of references. value: the array, or the type of an output. spec: the
    block that one program sees; None for the whole array.
    """

    name: str
    value: Any
    spec: pl.BlockSpec | None = None


def call(
    kernel: Callable[[Any], None],
    fields: type,
    *,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    scratch: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, jax.Array]:
    """Runs `kernel(fields(...))`, one reference for each operand and scratch array, and returns the outputs by name.

    Args:
      kernel: the body. It gets one argument, an instance of `fields`.
      fields: a NamedTuple class. A field without an operand keeps its default.
      inputs, outputs: in the order in which the compiled kernel takes them.
      scratch: name -> type of the arrays that live as long as the kernel.
      aliases: name of an input -> name of the output that takes its memory.
      options: of pl.pallas_call.
    """
    scratch = scratch or {}
    names = [*(x.name for x in inputs), *(x.name for x in outputs), *scratch]

    def body(*refs):
        kernel(fields(**dict(zip(names, refs, strict=True))))

    positions = [{x.name: n for n, x in enumerate(operands)} for operands in (inputs, outputs)]
    results = pl.pallas_call(
        body,
        out_shape=[x.value for x in outputs],
        in_specs=[x.spec or pl.BlockSpec() for x in inputs],
        out_specs=[x.spec or pl.BlockSpec() for x in outputs],
        scratch_shapes=list(scratch.values()),
        input_output_aliases={positions[0][a]: positions[1][b] for a, b in (aliases or {}).items()},
        **options,
    )(*(x.value for x in inputs))
    return dict(zip(names[len(inputs) :], results))
