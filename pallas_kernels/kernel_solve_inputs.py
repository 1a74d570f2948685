"""What the public functions of the TPU and the GPU kernels do alike: checking and padding their arrays."""

import jax
import jax.numpy as jnp


def check(
    platform: str,
    query: jax.Array,
    key: jax.Array,
    rhs: jax.Array,
    ridge: jax.Array | None,
    beta: jax.Array | None,
    max_head_dim: int,
) -> None:
    """Raises ValueError for malformed inputs and NotImplementedError for what the platform's kernels do not have."""
    if (ridge is None) == (beta is None):
        raise ValueError("exactly one of ridge and beta must be given")
    if not query.shape == key.shape == rhs.shape or query.ndim != 4:
        raise ValueError(f"{query.shape=}, {key.shape=} and {rhs.shape=} must be one [B, L, H, K]")
    for name, x in (("query", query), ("key", key), ("rhs", rhs), ("ridge", ridge), ("beta", beta)):
        if x is not None and jnp.result_type(x) == jnp.float64:
            raise NotImplementedError(f"the {platform} kernel computes in float32, and {name}.dtype is float64")
    if 0 in query.shape:
        raise NotImplementedError(f"the {platform} kernel needs elements, not {query.shape=}")
    head_dim = query.shape[-1]
    if head_dim > max_head_dim:
        dtype = jnp.result_type(query, key).name
        raise NotImplementedError(
            f"the {platform} kernel needs head_dim <= {max_head_dim} for {dtype} inputs, not {head_dim=}"
        )


def zero_padding(segment_ids: jax.Array | None, *arrays: jax.Array) -> list[jax.Array]:
    """The arrays [B, L, ...] with zeros in rows of padding, id 0, whose cotangents are then zeros too.

    So whatever lies in padding is inert: a product would carry NaN from there to other rows, as 0 * NaN.
    """
    if segment_ids is None:
        return list(arrays)
    real = segment_ids != 0
    return [jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype)) for x in arrays]


def pad(x: jax.Array, rows: int, dim: int = 0) -> jax.Array:
    """[B, L, H, K] with zeros after L and after K: causality keeps added rows, products keep added features, inert."""
    return jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, dim))) if rows or dim else x


def pad_rows_of_heads(beta: jax.Array, rows: int) -> jax.Array:
    """beta [B, L, H] -> float32 [B, H, L + rows], zeros after L."""
    return jnp.pad(jnp.swapaxes(beta.astype(jnp.float32), 1, 2), ((0, 0), (0, 0), (0, rows)))
