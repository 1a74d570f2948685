"""Products of the interaction energy with a diagonal term, which the energy and its steps share.

s_ij = q_i . k_j + x_i^T diag(d) h_j    (arXiv 2605.07588, section 2.1)
"""

import jax
import jax.numpy as jnp

from cubit_jax.ops.blockwise import tiles


def interaction_scores(
    queries: jax.Array, state: jax.Array, keys: jax.Array, context: jax.Array, diag: jax.Array | None
) -> jax.Array:
    """s_ij [B, H, I, J], float32 at least: rows (queries [B, I, H, K], state [B, I, D]) by columns (keys, context).

    A diagonal shared by the heads costs one product and not one per head.
    """
    dtype, precision = tiles.compute_dtype(queries, keys), tiles.precision(keys)
    scores = tiles.dot("bihk,bjhk->bhij", queries.astype(dtype), keys.astype(dtype), precision)
    if diag is None:
        return scores
    context, state, diag = (a.astype(dtype) for a in (context, state, diag))
    if diag.ndim == 1:
        return scores + tiles.dot("bid,bjd->bij", state * diag, context, precision)[:, None]
    return scores + tiles.dot("bihd,bjd->bhij", state[:, :, None] * diag, context, precision)


def read_columns(
    weights: jax.Array, keys: jax.Array, context: jax.Array, diag: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """o_i = sum_j p_ij k_j [B, I, H, K] and y_i = sum over heads of d * sum_j p_ij h_j [B, I, D]; p [B, H, I, J]."""
    precision = tiles.precision(keys)
    keys, context, diag = (a.astype(weights.dtype) for a in (keys, context, diag))
    o = tiles.dot("bhij,bjhk->bihk", weights, keys, precision)
    if diag.ndim == 1:
        return o, diag * tiles.dot("bij,bjd->bid", jnp.sum(weights, axis=1), context, precision)
    return o, jnp.sum(diag * tiles.dot("bhij,bjd->bihd", weights, context, precision), axis=2)


def project(x: jax.Array, kernel: jax.Array, precision: str | None = None) -> jax.Array:
    """[B, L, D] times [D, H, K] -> [B, L, H, K] in the dtype of x."""
    return jnp.einsum("bld,dhk->blhk", x, kernel.astype(x.dtype), precision=precision)
