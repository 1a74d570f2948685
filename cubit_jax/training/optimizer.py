"""AdamW with decay on matrices only, and the learning rate: linear warm-up, then cosine or warm-up-stable-decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

SCHEDULES = ("cosine", "wsd")


def check(config):
    """Raises ValueError with one line that names the field where `config.optimizer` cannot be used."""
    optimizer = config.optimizer
    if optimizer.schedule not in SCHEDULES:
        raise ValueError(f"optimizer.schedule={optimizer.schedule!r} must be one of {', '.join(SCHEDULES)}")
    for name in ("learning_rate", "eps", "clip_norm"):
        if not 0 < np.float32(optimizer[name]) < np.inf:  # Adam computes in float32, where 1e-50 is 0
            raise ValueError(f"optimizer.{name}={optimizer[name]} must be above 0 and finite")
    for name in ("warmup_steps", "weight_decay"):
        if not optimizer[name] >= 0:
            raise ValueError(f"optimizer.{name}={optimizer[name]} must be at least 0")
    for name in ("b1", "b2"):  # 1 divides by zero when the moments are corrected for their start
        if not 0 <= np.float32(optimizer[name]) < 1:
            raise ValueError(f"optimizer.{name}={optimizer[name]} must be at least 0 and below 1")
    for name in ("end_fraction", "decay_fraction"):
        if not 0 <= optimizer[name] <= 1:
            raise ValueError(f"optimizer.{name}={optimizer[name]} must be between 0 and 1")


def learning_rate(config, count):
    """The learning rate of one update.

    With s = count + 1, peak = learning_rate, W = warmup_steps, N = num_steps, end = peak * end_fraction:
      s <= W              peak * s / W
      cosine, s > W       end + (peak - end) * (1 + cos(pi * (s - W) / (N - W))) / 2
      wsd, W < s          peak until the last D = decay_fraction * N updates (never more than N - W), then linear to end
    so that update W has the peak and update N the end value. Beyond N it stays there.

    Args:
      config: the run's config.
      count: int or int array, the number of updates already made (skipped updates do not count).

    Returns:
      float32 of the shape of `count`.
    """
    # Not optax's schedules: they count from 0 and, written as p (1 - (1 - s / W)), lose the digits of a small rate.
    optimizer = config.optimizer
    peak, end = optimizer.learning_rate, optimizer.learning_rate * optimizer.end_fraction
    warmup, total = optimizer.warmup_steps, config.num_steps
    update = jnp.asarray(count, jnp.float32) + 1
    after_warmup = max(total - warmup, 1)
    if optimizer.schedule == "cosine":
        progress = jnp.clip((update - warmup) / after_warmup, 0.0, 1.0)
        share = (1 + jnp.cos(jnp.pi * progress)) / 2
    else:
        decay = min(max(round(optimizer.decay_fraction * total), 1), after_warmup)
        share = jnp.clip((total - update) / decay, 0.0, 1.0)
    decayed = end + (peak - end) * share
    return jnp.where(update <= warmup, peak * update / max(warmup, 1), decayed)


def decay_mask(params):
    """True for the matrices: projection kernels and the embedding table.

    It goes by name, because scanned layers give every norm and per-head scalar a second axis. A tied embedding is one
    leaf and so decays once.
    """

    def is_matrix(path, _):
        return path[-1].key in ("kernel", "embedding")

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(config):
    """The optax transformation: clip by global norm, Adam, decoupled weight decay, learning rate."""
    optimizer = config.optimizer
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps),
        optax.add_decayed_weights(optimizer.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(lambda count: learning_rate(config, count)),
    )


def update_count(opt_state):
    """int32 []: the number of updates made, which is what the learning rate counts."""
    return optax.tree.get_all_with_path(opt_state, "count")[0][1]
