"""The order in which the programs of a GPU kernel wait for each other.

The row blocks of a head depend on each other, and those of different heads do not: the blocks form a wavefront.
Programs start in no defined order. So each takes a ticket, which says which block it computes, and a counter per head
says how many blocks of it are finished. Tickets are given out in the order of the blocks: what is waited for belongs to
a program that already runs, so nothing can wait for ever.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.kernel_call import Ref

COUNTER_STRIDE = 32  # int32 words: one 128-byte line of memory per counter, so that heads do not contend for one


def take_ticket(counters: Ref, num_heads_total: int) -> tuple[jax.Array, jax.Array]:
    """(number of the block in the order of tickets, number of the head among all of the batch) of this program."""
    ticket = plt.atomic_add(counters, (pl.program_id(0) * 0,), jnp.int32(1))
    return ticket // num_heads_total, ticket % num_heads_total


def _counter(head):
    return ((head + 1) * COUNTER_STRIDE,)


def wait_for(counters: Ref, head: jax.Array, count: jax.Array, seen: jax.Array) -> jax.Array:
    """Spins until `count` blocks of the head are published; returns how many are (`seen` if that is enough already).

    atomic_max with 0 reads with acquire order: loads after it see what was stored before the counter was raised.
    """
    return lax.while_loop(lambda n: n < count, lambda n: plt.atomic_max(counters, _counter(head), n * 0), seen)


def publish(counters: Ref, head: jax.Array, count: jax.Array, interpret: bool) -> None:
    """Raises the head's counter to `count` after every thread of this program has stored its part."""
    barrier(interpret)
    plt.atomic_max(counters, _counter(head), count)


def barrier(interpret: bool) -> None:
    """What one thread of this program stored before it, the others see after it."""
    if not interpret:
        plt.debug_barrier()


def new_counters(num_heads_total: int) -> jax.Array:
    """The next ticket, then a counter per head."""
    return jnp.zeros(((num_heads_total + 1) * COUNTER_STRIDE,), jnp.int32)


def stream(
    counters: Ref,
    head: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    tile: Callable[[jax.Array, Any], Any],
    carry: Any,
    seen: jax.Array,
) -> tuple[Any, jax.Array]:
    """Runs carry = tile(t, carry) for t in [start, stop), waiting until each block t is published.

    Published blocks run in a plain loop, which the compiler pipelines. Only reaching the end of them polls.

    Returns:
      carry, and how many published blocks were seen.
    """

    def more(state):
        t, seen, carry = state
        seen = wait_for(counters, head, t + 1, seen)
        end = jnp.minimum(seen, stop)
        return end, seen, lax.fori_loop(t, end, tile, carry)

    _, seen, carry = lax.while_loop(lambda state: state[0] < stop, more, (start, seen, carry))
    return carry, seen
