"""The scalar energies of Causal Energy Minimization (arXiv 2605.07588, sections 2.1 and 2.2).

The state x, the only thing that is differentiated, is its own argument beside the context h. So
`jax.grad(lambda x: energy(x, h, ...).sum())` at x = h is minus the update that a layer makes, and any other energy of
this form is a layer too: see `descent_direction`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from cubit_jax.ops import masks
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.checks import check_elementwise, check_interaction
from cubit_jax.ops.interaction import interaction_scores, project
from cubit_jax.ops.potential import POTENTIALS, lookup
from cubit_jax.ops.rotary import rotary

_ROWS = 256  # rows whose scores exist at a time: memory stays linear in L


def interaction_energy(
    state: jax.Array,
    context: jax.Array,
    w_q: jax.Array,
    w_k: jax.Array,
    diag: jax.Array | None = None,
    *,
    tau: float | None = None,
    positions: jax.Array | None = None,
    theta: float = 10000.0,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """eps_i = -tau sum_heads log sum_{visible j} exp(s_ij / tau), attention's energy; 0 for a row that sees nothing.

    s_ij = x_i^T (W_q^T W_k + diag(d)) h_j; with positions x_i^T W_q^T R_i^T R_j W_k h_j + x_i^T diag(d) h_j: the
    diagonal term is not rotated (arXiv 2605.07588, section 2.1).

    Args:
      state: x [B, L, D], one optimisation variable per position.
      context: h [B, L, D]; position i reads h_j for visible j, itself included.
      w_q, w_k: [D, H, K].
      diag: None, [D] (shared by the heads) or [H, D].
      tau: temperature; None is sqrt(K).
      positions: int [B, L] or [L] of the rotary embedding; None is no rotary embedding.
      theta: base of the rotary wavelengths.
      segment_ids: [B, L] int or None; 0 is padding.
      window: int or None: i sees j only if i - j < window.

    Returns:
      [B, L], float32 (float64 for float64 inputs).

    Raises:
      ValueError: malformed shapes.
    """
    tau = check_interaction(state, context, w_q, w_k, diag, tau, positions, segment_ids, window)
    state, context = masks.zero_padding(segment_ids, state, context)
    dtype = tiles.compute_dtype(state, context, w_q)
    state, context, w_q, w_k = (a.astype(dtype) for a in (state, context, w_q, w_k))
    diag = None if diag is None else diag.astype(dtype)
    queries, keys = project(state, w_q, "highest"), project(context, w_k, "highest")
    if positions is not None:
        queries, keys = rotary(queries, positions, theta), rotary(keys, positions, theta)

    @jax.checkpoint
    def rows(block):
        queries, state, index, row_segments = block
        scores = interaction_scores(queries, state, keys, context, diag) / tau
        mask = masks.visible(index, jnp.arange(keys.shape[1]), row_segments, segment_ids, window=window)
        return -tau * jnp.sum(masks.masked_logsumexp(scores, jnp.expand_dims(mask, -3)), axis=1)

    length = state.shape[1]
    count = max(-(-length // _ROWS), 1)
    blocks = [
        None if a is None else tiles.split_rows(a, count) for a in (queries, state, jnp.arange(length), segment_ids)
    ]
    return tiles.join_rows(jax.lax.map(rows, blocks), length)


def elementwise_energy(
    state: jax.Array, context: jax.Array, w_up: jax.Array, w_gate: jax.Array, *, activation: str = "silu"
) -> jax.Array:
    """eps_i = -sum_m (w_gate,m . h_i) Phi(w_up,m . x_i), Phi' = activation: a gated MLP's energy (section 2.2).

    Args:
      state: x [B, L, D]; context: h [B, L, D]; position i reads h_i only.
      w_up, w_gate: [D, F].
      activation: "silu" | "gelu" | "relu".

    Returns:
      [B, L], float32 (float64 for float64 inputs).

    Raises:
      ValueError: malformed shapes, unknown activation.
    """
    check_elementwise(state, context, w_up, w_gate)
    dtype = tiles.compute_dtype(state, context, w_up)
    gate = jnp.einsum("bld,df->blf", context.astype(dtype), w_gate.astype(dtype), precision="highest")
    z = jnp.einsum("bld,df->blf", state.astype(dtype), w_up.astype(dtype), precision="highest")
    return -jnp.sum(gate * lookup(POTENTIALS, activation)(z), axis=-1)


def descent_direction(energy: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function (state, *args, **kwargs) -> minus the gradient in state of sum(energy(state, *args, **kwargs)).

    With `minimize` it turns any energy, written as a function of arrays, into a layer without a hand-derived step.
    """

    def direction(state, *args, **kwargs):
        return -jax.grad(lambda x: jnp.sum(energy(x, *args, **kwargs)))(state)

    return direction
