"""Attention and the triangular system for new tokens beside a cache of the earlier ones.

The system is lower triangular, so u of a token depends only on the tokens up to it and never changes. For a new one
    u_t = (rhs_t - c_t * sum_{j<t} P_tj u_j) / (P_tt + ridge),
in the beta form (rhs_t - beta_t * sum_{j<t} P_tj u_j). A chunk of n new tokens is a system of n rows.

Rows of the batch may hold different numbers of tokens: row b has start[b] of them, and the new ones follow. What a
cache holds beyond them, even NaN, is not seen. Tokens beyond the capacity M are lost.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cubit_jax.ops import masks
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.blockwise.kernel_solve import system_block
from cubit_jax.ops.checks import check_scale, check_system
from cubit_jax.ops.overflow import spare_other_rows


def write_cache(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Writes new [B, n, ...] into cache [B, M, ...] at start[b] + (0..n-1) of each row b; what exceeds M is dropped."""
    rows = jnp.arange(new.shape[0])[:, None]
    columns = start[:, None] + jnp.arange(new.shape[1])
    new = new.astype(cache.dtype)
    return cache.at[rows, columns].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)


def attention_cached(
    q: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    start: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """`attention` of n new tokens on everything up to themselves.

    Args:
      q: [B, n, H, K].
      key_cache, value_cache: [B, M, H, K] and [B, M, H, V], the new keys and values already written.
      start: [B] int, tokens in each row before the new ones.
      window: int or None. scale: of the scores; None is 1 / sqrt(K).

    Returns:
      [B, n, H, V] in the dtype of q; computed in float32 (float64 for float64 inputs).
    """
    dtype = tiles.compute_dtype(q, key_cache, value_cache)
    scale = q.shape[-1] ** -0.5 if scale is None else check_scale(scale)

    def read(arrays, caches):
        (q, start), (key_cache, value_cache) = arrays, caches
        weights = _weights(q, key_cache, start, window=window, strict=False, scale=scale, dtype=dtype)
        return tiles.dot("bhij,bjhk->bihk", weights, value_cache.astype(dtype), tiles.precision(value_cache))

    end = start + q.shape[1]
    o = read_caches(read, (q, start), (key_cache, value_cache), (end, end))
    return _spare_other_rows(o.astype(q.dtype), q, key_cache, value_cache, start, window=window, scale=scale)


def kernel_solve_cached(
    query: jax.Array,
    key_cache: jax.Array,
    u_cache: jax.Array,
    rhs: jax.Array,
    start: jax.Array,
    *,
    ridge: jax.Array | None = None,
    beta: jax.Array | None = None,
    window: int | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """`kernel_solve` for n new tokens (arXiv 2605.06501, eq. 13, solved row by row).

    Args:
      query: [B, n, H, K].
      key_cache: [B, M, H, K], the new keys already written.
      u_cache: [B, M, H, V], the solution of the tokens before start.
      rhs: [B, n, H, V].
      start: [B] int, tokens in each row before the new ones.
      ridge: [H], or beta: [B, n, H]; exactly one.
      window, scale: as for kernel_solve.

    Returns:
      u of the new tokens, [B, n, H, V], float32 (float64 for float64 inputs).

    Raises:
      ValueError: malformed ridge or beta, as for kernel_solve.
    """
    ridge, beta = check_system(query.shape, ridge, beta)
    scale = check_scale(scale)
    dtype = tiles.compute_dtype(query, key_cache, u_cache, rhs)
    ridge, beta = jax.tree.map(lambda x: x.astype(dtype), (ridge, beta))

    def read(arrays, caches):
        (query, rhs, ridge, beta, start), (key_cache, u_cache) = arrays, caches
        weights = _weights(query, key_cache, start, window=window, strict=ridge is None, scale=scale, dtype=dtype)
        # Columns of the new tokens belong to the unknowns, and the cache holds nothing there yet.
        new = start[:, None] + jnp.arange(query.shape[1])
        known = jnp.where((jnp.arange(key_cache.shape[1]) < start[:, None])[:, None, None, :], weights, 0)
        unknown = jnp.take_along_axis(weights, new[:, None, None, :], axis=-1, mode="fill", fill_value=0)
        target, beta = (None if x is None else jnp.swapaxes(x, 1, 2).astype(dtype) for x in (rhs, beta))
        summed = tiles.dot("bhij,bjhk->bhik", known, u_cache.astype(dtype))
        target -= summed if beta is None else beta[..., None] * summed
        return jnp.swapaxes(tiles.solve_triangular(system_block(unknown, ridge, beta), target), 1, 2)

    tokens = start + query.shape[1], start
    u = read_caches(read, (query, rhs, ridge, beta, start), (key_cache, u_cache), tokens)
    return _spare_other_rows(
        u, query, key_cache, u_cache, start, rhs=rhs, ridge=ridge, beta=beta, window=window, scale=scale
    )


def read_caches(op: Callable[[Any, Any], Any], arrays: Any, caches: Any, tokens: Any) -> Any:
    """op(arrays, caches), whatever the caches hold where they have no token yet: 0 times NaN would be NaN.

    To write zeros there first would double the memory traffic of a token. That is done only where the result is not
    finite without it, or is differentiated.

    Args:
      op: a differentiable function without arrays of its own.
      arrays: tree of what else it reads.
      caches: tree of [B, M, ...].
      tokens: a tree like caches: int [B], how many tokens each row of the cache has.
    """

    def on_tokens_alone(arrays, caches, tokens):
        def zero_rest(cache, tokens):
            held = jnp.arange(cache.shape[1]) < tokens[:, None]
            return jnp.where(held.reshape(*held.shape, *[1] * (cache.ndim - 2)), cache, 0)

        return op(arrays, jax.tree.map(zero_rest, caches, tokens))

    @jax.custom_jvp
    def read(arrays, caches, tokens):
        out = op(arrays, caches)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(out)]))
        return jax.lax.cond(finite, lambda *_: out, on_tokens_alone, arrays, caches, tokens)

    read.defjvp(functools.partial(jax.jvp, on_tokens_alone))
    return read(arrays, caches, tokens)


def _spare_other_rows(out, *args, **kwargs):
    """A single new row stands after all that it could spoil."""
    return out if out.shape[1] == 1 else spare_other_rows(out, *args, **kwargs)


def _weights(q, key_cache, start, *, window, strict, scale, dtype):
    """Row softmax of the visible scores, [B, H, n, M]; 0 in a row that sees nothing."""
    precision = tiles.precision(q, key_cache)
    scores = scale * tiles.dot("bihk,bjhk->bhij", q.astype(dtype), key_cache.astype(dtype), precision)
    rows = start[:, None] + jnp.arange(q.shape[1])
    mask = masks.visible(rows, jnp.arange(key_cache.shape[1]), window=window, strict=strict)[:, None]
    return masks.masked_softmax(scores, mask)
