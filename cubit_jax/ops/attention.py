"""Softmax attention: Nadaraya-Watson regression of the values on the keys."""

import jax
import jax.numpy as jnp
import numpy as np

from cubit_jax.ops import dispatch, masks
from cubit_jax.ops.blockwise import tiles
from cubit_jax.ops.blockwise.attention import attention_xla
from cubit_jax.ops.checks import check_rows, check_scale
from cubit_jax.ops.context_parallel import solve as context
from cubit_jax.ops.context_parallel.layout import Layout
from cubit_jax.ops.overflow import spare_other_rows


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    layout: Layout | None = None,
) -> jax.Array:
    """o_i = sum_j A_ij v_j with A = softmax over visible j of scale * q_i . k_j; causal.

    A row that sees nothing (padding) gives 0. What stands in padding, even NaN, reaches nothing else. A value that is
    not finite reaches the rows that see it and no other (not checked with a layout).

    Args:
      q, k: [B, L, H, K].
      v: [B, L, H, V]; may be float32 beside 16-bit q and k.
      segment_ids: [B, L] int or None; 0 is padding.
      window: int or None: i sees j only if i - j < window.
      scale: of the scores; None is 1 / sqrt(K).
      implementation: None, "reference", "xla" or "pallas".
      layout: None, or the ops.Layout by which devices share the rows: each then passes and gets its own rows.

    Returns:
      [B, L, H, V] in the dtype of q; computed in float32 (float64 for float64 inputs).

    Raises:
      ValueError: malformed input. NotImplementedError: input the named implementation cannot do.
    """
    window = check_rows(q, k, v, segment_ids, window, layout)
    scale = q.shape[-1] ** -0.5 if scale is None else check_scale(scale)
    q, k, v = masks.zero_padding(segment_ids, q, k, v)
    implementations = IMPLEMENTATIONS if layout is None else context.implementations(context.attention, layout)
    o = dispatch.run(
        "attention", implementations, implementation, q, k, v, segment_ids=segment_ids, window=window, scale=scale
    )
    if layout is not None:
        return o
    start = jnp.zeros(q.shape[:1], jnp.int32)
    return spare_other_rows(o, q, k, v, start, segment_ids, window=window, scale=scale)


def dense_weights(
    q: jax.Array,
    k: jax.Array,
    *,
    segment_ids: jax.Array | None,
    window: int | None,
    scale: float,
    strict: bool = False,
) -> jax.Array:
    """Row softmax of the visible scores, [B, H, L, L]; a row that sees nothing is 0 and safe to differentiate."""
    dtype = jnp.promote_types(jnp.promote_types(q.dtype, k.dtype), jnp.float32)
    scores = scale * jnp.einsum("bihk,bjhk->bhij", q.astype(dtype), k.astype(dtype), precision="highest")
    index = np.arange(q.shape[1])
    mask = jnp.asarray(masks.visible(index, index, segment_ids, segment_ids, window=window, strict=strict))
    return masks.masked_softmax(scores, mask[..., None, :, :])


def _reference(q, k, v, *, segment_ids, window, scale):
    weights = dense_weights(q, k, segment_ids=segment_ids, window=window, scale=scale)
    dtype = jnp.promote_types(weights.dtype, v.dtype)
    return jnp.einsum("bhij,bjhk->bihk", weights, v.astype(dtype), precision="highest").astype(q.dtype)


def _pallas(q, k, v, *, segment_ids, window, scale):
    platform, interpret = dispatch.kernel_platform()
    if v.shape != q.shape or k.dtype != q.dtype:
        raise NotImplementedError(f"the kernels need {v.shape=} to equal {q.shape=} and {k.dtype=} to equal {q.dtype=}")
    if tiles.compute_dtype(q, v) == jnp.float64:
        raise NotImplementedError("the kernels compute in float32, not float64")
    kernel = _splash if platform == "tpu" else _cudnn
    return kernel(q, k, v, segment_ids=segment_ids, window=window, scale=scale, interpret=interpret)


def _splash(q, k, v, *, segment_ids, window, scale, interpret):
    """The TPU kernel that ships with JAX. Values are rounded to the dtype of q, as it multiplies them in that."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, num_heads = q.shape[1:3]
    block = min(512, -(-length // 128) * 128)
    padded = -(-length // block) * block
    mask = splash.CausalMask((padded, padded))
    if window is not None:
        mask = splash.LocalMask((padded, padded), (window - 1, 0), 0)
    sizes = splash.BlockSizes(
        **dict.fromkeys(
            (
                "block_q",
                "block_kv",
                "block_kv_compute",
                "block_q_dkv",
                "block_kv_dkv",
                "block_kv_dkv_compute",
                "block_q_dq",
                "block_kv_dq",
            ),
            block,
        )
    )

    def heads_first(x):
        return jnp.pad(x.astype(q.dtype), ((0, 0), (0, padded - length), (0, 0), (0, 0))).swapaxes(1, 2)

    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * num_heads), block_sizes=sizes, interpret=interpret
    )
    q_scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    ids = None
    if segment_ids is not None:
        ids = jnp.pad(segment_ids, ((0, 0), (0, padded - length)))
        ids = splash.SegmentIds(ids, ids)
    # Products of float32 operands would be rounded to bfloat16 by default.
    with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
        o = jax.vmap(kernel)(heads_first(q_scaled), heads_first(k), heads_first(v), ids)
    return _without_padding(o.swapaxes(1, 2)[:, :length], segment_ids)


def _cudnn(q, k, v, *, segment_ids, window, scale, interpret):
    """cuDNN's kernel. Values are rounded to the dtype of q, as it multiplies them in that."""
    if interpret:
        raise NotImplementedError("cuDNN has no interpreter")
    if segment_ids is not None:
        raise NotImplementedError("cuDNN through JAX takes no segment ids")
    if q.dtype.itemsize > 2:
        raise NotImplementedError(f"cuDNN takes 16-bit inputs, not {q.dtype}")
    try:
        return jax.nn.dot_product_attention(
            q,
            k,
            v.astype(q.dtype),
            scale=scale,
            is_causal=True,
            implementation="cudnn",
            local_window_size=None if window is None else (window - 1, 0),
        )
    except RuntimeError as error:  # no cuDNN, or one that is too old
        raise NotImplementedError(str(error)) from error


def _without_padding(o, segment_ids):
    """Padding sees nothing, where the kernel lets it see itself; this also stops its gradient."""
    return o if segment_ids is None else jnp.where((segment_ids != 0)[..., None, None], o, 0)


IMPLEMENTATIONS = {"reference": _reference, "xla": attention_xla, "pallas": _pallas}
