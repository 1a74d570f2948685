"""Hand-derived descent steps of the CEM energies: minus their gradients, without differentiating the energy.

    interaction:   sum_heads [ W_q^T R_i^T sum_j p_ij R_j W_k h_j + d * sum_j p_ij h_j ],  p = softmax_visible(s / tau)
    element-wise:  W_up^T [ (W_gate h) * phi(W_up x) ]

(arXiv 2605.07588, sections 2.1 to 2.3.) The first is attention whose values are its keys, whose output projection is
the query projection transposed, and whose queries and outputs are rotated by opposite angles; the diagonal adds the
context itself, read with the same weights. Keys, and the gate of the second, do not depend on the state: they are made
once for all the steps of a layer.

Projections take the dtype of the context, scores and weights at least float32. A step has the dtype of the state: a
float32 state beside 16-bit context keeps the small differences that many steps add up.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from cubit_jax.ops import masks
from cubit_jax.ops.attention import attention
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.blockwise.diagonal_attention import aggregate_rows, diagonal_attention
from cubit_jax.ops.checks import check_elementwise, check_interaction, check_num_steps, check_step_size
from cubit_jax.ops.context_parallel.layout import Layout
from cubit_jax.ops.decode import attention_cached, read_caches
from cubit_jax.ops.interaction import project
from cubit_jax.ops.potential import ACTIVATIONS, lookup
from cubit_jax.ops.rotary import rotary


def interaction_step(
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
    implementation: str | None = None,
) -> jax.Array:
    """Minus the gradient of `interaction_energy` in the state, in memory linear in L; arguments as there.

    Args:
      implementation: None, "reference", "xla" or "pallas", which is attention's kernel: there is none for a diagonal.

    Returns:
      [B, L, D] in the dtype of state; 0 for a row that sees nothing.

    Raises:
      ValueError: malformed input. NotImplementedError: input that the named implementation cannot do.
    """
    check_interaction(state, context, w_q, w_k, diag, tau, positions, segment_ids, window)
    (context,) = masks.zero_padding(segment_ids, context)  # for the gradient of w_k
    keys = interaction_keys(context, w_k, positions=positions, theta=theta)
    return interaction_step_from_keys(
        state,
        context,
        keys,
        w_q,
        diag,
        tau=tau,
        positions=positions,
        theta=theta,
        segment_ids=segment_ids,
        window=window,
        implementation=implementation,
    )


def interaction_keys(
    context: jax.Array, w_k: jax.Array, *, positions: jax.Array | None = None, theta: float = 10000.0
) -> jax.Array:
    """R_j W_k h_j, [B, L, H, K] in the dtype of context: what the steps of a layer share and a decode cache keeps."""
    keys = project(context, w_k)
    return keys if positions is None else rotary(keys, positions, theta)


def interaction_step_from_keys(
    state: jax.Array,
    context: jax.Array,
    keys: jax.Array,
    w_q: jax.Array,
    diag: jax.Array | None = None,
    *,
    tau: float | None = None,
    positions: jax.Array | None = None,
    theta: float = 10000.0,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array:
    """`interaction_step` for keys from `interaction_keys`; the context is read only where there is a diagonal.

    layout: as for `attention`, where devices share the rows.
    """
    (state,) = masks.zero_padding(segment_ids, state)  # for the gradient of w_q

    def aggregate(queries):
        options = {
            "segment_ids": segment_ids,
            "window": window,
            "scale": _scale(w_q, tau),
            "implementation": implementation,
            "layout": layout,
        }
        if diag is None:
            return attention(queries, keys, keys, **options), None
        return diagonal_attention(queries, state, keys, context, diag, **options)

    return _step(aggregate, state, keys.dtype, w_q, positions, theta)


def interaction_step_cached(
    state: jax.Array,
    context_cache: jax.Array | None,
    key_cache: jax.Array,
    w_q: jax.Array,
    diag: jax.Array | None,
    start: jax.Array,
    *,
    tau: float | None = None,
    positions: jax.Array | None = None,
    theta: float = 10000.0,
    window: int | None = None,
) -> jax.Array:
    """`interaction_step` of n new tokens against a decode cache that already holds their keys.

    Args:
      state: [B, n, D].
      context_cache: [B, max_len, D], or None without a diagonal.
      key_cache: [B, max_len, H, K] from `interaction_keys`.
      start: int32 [B], the tokens of each row before these n.
      Others as in `interaction_step`; positions [B, n].
    """

    def aggregate(queries):
        scale = _scale(w_q, tau)
        if diag is None:
            return attention_cached(queries, key_cache, key_cache, start, window=window, scale=scale), None

        def read(arrays, caches):
            (queries, state, diag, start), (keys, context) = arrays, caches
            rows = start[:, None] + jnp.arange(state.shape[1])
            mask = masks.visible(rows, jnp.arange(keys.shape[1]), window=window)
            return aggregate_rows(queries, state, keys, context, diag, mask, scale)

        end = start + state.shape[1]
        return read_caches(read, (queries, state, diag, start), (key_cache, context_cache), (end, end))

    return _step(aggregate, state, key_cache.dtype, w_q, positions, theta)


def _scale(w_q, tau):
    return w_q.shape[-1] ** -0.5 if tau is None else 1 / float(tau)


def _step(aggregate, state, dtype, w_q, positions, theta):
    """Queries in, aggregated keys out: the part of a step that is the same for every way of aggregating."""
    queries = project(state.astype(dtype), w_q)
    queries = queries if positions is None else rotary(queries, positions, theta)
    out, diagonal = aggregate(queries)
    out = out if positions is None else rotary(out, -positions, theta)  # R_i^T is the rotation by minus the angle
    step = jnp.einsum("blhk,dhk->bld", out.astype(dtype), w_q.astype(dtype))
    return (step if diagonal is None else step + diagonal).astype(state.dtype)


def elementwise_step(
    state: jax.Array, context: jax.Array, w_up: jax.Array, w_gate: jax.Array, *, activation: str = "silu"
) -> jax.Array:
    """Minus the gradient of `elementwise_energy` in the state, [B, L, D] in the dtype of state; arguments as there."""
    check_elementwise(state, context, w_up, w_gate)
    return elementwise_step_from_gate(state, elementwise_gate(context, w_gate), w_up, activation=activation)


def elementwise_gate(context: jax.Array, w_gate: jax.Array) -> jax.Array:
    """W_gate h, [B, L, F] in the dtype of context: what the steps of a layer share."""
    return jnp.einsum("bld,df->blf", context, w_gate.astype(context.dtype))


def elementwise_step_from_gate(
    state: jax.Array, gate: jax.Array, w_up: jax.Array, *, activation: str = "silu"
) -> jax.Array:
    """`elementwise_step` for a gate from `elementwise_gate`."""
    w_up = w_up.astype(gate.dtype)
    hidden = gate * lookup(ACTIVATIONS, activation)(jnp.einsum("bld,df->blf", state.astype(gate.dtype), w_up))
    return jnp.einsum("blf,df->bld", hidden, w_up).astype(state.dtype)


def precondition(vector: jax.Array, d: jax.Array, u: jax.Array | None = None, v: jax.Array | None = None) -> jax.Array:
    """(diag(softplus(d)) + U V^T + V U^T) vector (arXiv 2605.07588, section 2.3), without forming the matrix.

    Args:
      vector: [..., D]; d: [D]; u, v: [D, R], or None for the diagonal alone.

    Returns:
      [..., D] in the dtype of vector. The matrix is symmetric but need not be positive definite: see
      `preconditioner_margin`.

    Raises:
      ValueError: one of u and v without the other.
    """
    if (u is None) != (v is None):
        raise ValueError(f"u and v must be given together or not at all, got {u=} and {v=}")
    dtype = tiles.compute_dtype(vector)
    out = jax.nn.softplus(d.astype(dtype)) * vector.astype(dtype)
    if u is not None:
        u, v = u.astype(dtype), v.astype(dtype)
        out = out + (vector.astype(dtype) @ v) @ u.T + (vector.astype(dtype) @ u) @ v.T
    return out.astype(vector.dtype)


def preconditioner_margin(d: jax.Array, u: jax.Array | None = None, v: jax.Array | None = None) -> jax.Array:
    """Smallest eigenvalue of S^-1/2 P S^-1/2, S = diag(softplus(d)): P is positive definite exactly when it is above 0.

    Costs O(D R^2): with W = S^-1/2 [U, V] = Q R the low-rank part is Q (R J R^T) Q^T, J exchanging the two halves. At
    most 1, the eigenvalue of the directions that the low-rank part leaves alone (when 2 R < D).
    """
    dtype = tiles.compute_dtype(d)
    if u is None:
        return jnp.ones((), dtype)
    root = jnp.sqrt(jax.nn.softplus(d.astype(dtype)))[:, None]
    u, v = u.astype(dtype) / root, v.astype(dtype) / root
    upper = jnp.linalg.qr(jnp.concatenate([u, v], axis=1), mode="r")
    swapped = jnp.roll(upper, u.shape[1], axis=1)
    return 1 + jnp.minimum(jnp.linalg.eigvalsh(swapped @ upper.T)[0], 0)


def minimize(
    step: Callable[[jax.Array], jax.Array],
    state: jax.Array,
    *,
    num_steps: int,
    step_size: float | jax.Array,
    precondition: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """num_steps times state <- state + step_size * precondition(step(state)), by lax.scan.

    Args:
      step: state -> a descent direction of the same shape, such as minus a gradient.
      state: [B, L, D].
      num_steps: int, at least 0; 0 returns the state.
      step_size: number or scalar array.
      precondition: direction -> direction, or None.

    Returns:
      The state after the last step, same shape and dtype.

    Raises:
      ValueError: num_steps is no integer or negative; step_size is not finite (where its value is known, that is not
        traced); a direction of another shape than the state.
    """
    check_num_steps(num_steps)
    check_step_size(step_size)

    def body(state, _):
        direction = step(state)
        if precondition is not None:
            direction = precondition(direction)
        if direction.shape != state.shape:
            raise ValueError(f"{direction.shape=} must equal {state.shape=}")
        return state + jnp.asarray(step_size, state.dtype) * direction, None

    return jax.lax.scan(body, state, None, length=num_steps)[0]
