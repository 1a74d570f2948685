"""The scalar energies of Causal Energy Minimization (arXiv 2605.07588, sections 2.1 and 2.2).

The state x, the only thing that is differentiated, is its own argument beside the context h. So
`jax.grad(lambda x: energy(x, h, ...).sum())` at x = h is minus the update that a layer makes, and any other energy of
this form is a layer too: see `descent_direction`.
"""

import jax
import jax.numpy as jnp

from cubit_jax.ops import masks
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.potential import POTENTIALS, lookup
from cubit_jax.ops.rotary import rotary

_ROWS = 256  # rows whose scores exist at a time: memory stays linear in L


def interaction_energy(
    state, context, w_q, w_k, diag=None, *, tau=None, positions=None, theta=10000.0, segment_ids=None, window=None
):
    """eps_i = -tau sum_heads log sum_{visible j} exp(s_ij / tau), attention's energy; 0 for a row that sees nothing.

    s_ij = x_i^T (W_q^T W_k + diag(d)) h_j; with positions x_i^T W_q^T R_i^T R_j W_k h_j + x_i^T diag(d) h_j: the
    diagonal term is not rotated (arXiv 2605.07588, section 2.1).

    Args:
      state: x [B, L, D], one optimisation variable a position.
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
        return -tau * jnp.sum(masked_logsumexp(scores, jnp.expand_dims(mask, -3)), axis=1)

    length = state.shape[1]
    count = max(-(-length // _ROWS), 1)
    blocks = [None if a is None else split_rows(a, count) for a in (queries, state, jnp.arange(length), segment_ids)]
    return join_rows(jax.lax.map(rows, blocks), length)


def elementwise_energy(state, context, w_up, w_gate, *, activation="silu"):
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


def descent_direction(energy):
    """The function (state, *args, **kwargs) -> minus the gradient in state of sum(energy(state, *args, **kwargs)).

    With `minimize` it turns any energy, written as a function of arrays, into a layer without a hand-derived step.
    """

    def direction(state, *args, **kwargs):
        return -jax.grad(lambda x: jnp.sum(energy(x, *args, **kwargs)))(state)

    return direction


def interaction_scores(queries, state, keys, context, diag):
    """s_ij [B, H, I, J], float32 at least: rows (queries [B, I, H, K], state [B, I, D]) by columns (keys, context).

    A diagonal shared by the heads costs one product and not one a head.
    """
    dtype, precision = tiles.compute_dtype(queries, keys), tiles.precision(keys)
    scores = tiles.dot("bihk,bjhk->bhij", queries.astype(dtype), keys.astype(dtype), precision)
    if diag is None:
        return scores
    context, state, diag = (a.astype(dtype) for a in (context, state, diag))
    if diag.ndim == 1:
        return scores + tiles.dot("bid,bjd->bij", state * diag, context, precision)[:, None]
    return scores + tiles.dot("bihd,bjd->bhij", state[:, :, None] * diag, context, precision)


def read_columns(weights, keys, context, diag):
    """o_i = sum_j p_ij k_j [B, I, H, K] and y_i = sum over heads of d * sum_j p_ij h_j [B, I, D]; p [B, H, I, J]."""
    precision = tiles.precision(keys)
    keys, context, diag = (a.astype(weights.dtype) for a in (keys, context, diag))
    o = tiles.dot("bhij,bjhk->bihk", weights, keys, precision)
    if diag.ndim == 1:
        return o, diag * tiles.dot("bij,bjd->bid", jnp.sum(weights, axis=1), context, precision)
    return o, jnp.sum(diag * tiles.dot("bhij,bjd->bihd", weights, context, precision), axis=2)


def masked_logsumexp(scores, mask):
    """log sum exp over the last axis where mask; 0, and safe to differentiate, where a row has no True."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, where=mask, initial=jnp.finfo(scores.dtype).min))
    shifted = jnp.where(mask, scores - top[..., None], 0)
    total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0), axis=-1)
    sees = jnp.any(mask, axis=-1)
    return jnp.where(sees, jnp.where(sees, top, 0) + jnp.log(jnp.where(sees, total, 1)), 0)


def project(x, kernel, precision=None):
    """[B, L, D] times [D, H, K] -> [B, L, H, K] in the dtype of x."""
    return jnp.einsum("bld,dhk->blhk", x, kernel.astype(x.dtype), precision=precision)


def split_rows(array, count):
    """[B, L, ...] (or [L]) -> [count, B, ceil(L / count), ...], zero-padded: blocks of rows for a loop."""
    axis = 0 if array.ndim == 1 else 1
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, -array.shape[axis] % count)
    array = jnp.pad(array, padding)
    shape = (*array.shape[:axis], count, array.shape[axis] // count, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def join_rows(blocks, length):
    """The inverse of `split_rows` for [count, B, C, ...] -> [B, L, ...]."""
    joined = jnp.moveaxis(blocks, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :length]


def check_interaction(state, context, w_q, w_k, diag, tau, positions, segment_ids, window):
    """Raises ValueError for malformed arguments; returns tau as a float."""
    _check_state(state, context)
    model_dim = state.shape[-1]
    if w_q.ndim != 3 or w_q.shape[0] != model_dim or w_k.shape != w_q.shape:
        raise ValueError(f"{w_q.shape=} and {w_k.shape=} must both be [D, H, K] with D={model_dim}")
    if diag is not None and diag.shape not in ((model_dim,), (w_q.shape[1], model_dim)):
        raise ValueError(f"{diag.shape=} must be [D] or [H, D] with H={w_q.shape[1]}, D={model_dim}")
    if positions is not None and positions.shape not in (state.shape[:2], state.shape[1:2]):
        raise ValueError(f"{positions.shape=} must be [B, L] or [L] of {state.shape=}")
    masks.check_masks(state.shape, segment_ids, window)
    tau = w_q.shape[-1] ** 0.5 if tau is None else float(tau)
    if not tau > 0:
        raise ValueError(f"{tau=} must be above 0")
    return tau


def check_elementwise(state, context, w_up, w_gate):
    """Raises ValueError for malformed arguments."""
    _check_state(state, context)
    if w_up.ndim != 2 or w_up.shape[0] != state.shape[-1] or w_gate.shape != w_up.shape:
        raise ValueError(f"{w_up.shape=} and {w_gate.shape=} must both be [D, F] with D={state.shape[-1]}")


def _check_state(state, context):
    if state.ndim != 3 or context.shape != state.shape:
        raise ValueError(f"{context.shape=} must equal {state.shape=}, both [B, L, D]")
    if 0 in state.shape:
        raise ValueError(f"{state.shape=} must have no dimension of size 0")
    for array in (state, context):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{array.dtype=} must be floating")
