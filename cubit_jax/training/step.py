"""One update of the parameters: the training state, gradients over micro-batches, the guard against bad numbers."""

import jax
import jax.numpy as jnp
import optax

from cubit_jax import partitioning
from cubit_jax.model_config import partition_rules
from cubit_jax.training import optimizer as optimizer_lib


def init_state(model, config):
    """The training state before the first step.

    Args:
      model: LanguageModel. config: the run's config.

    Returns:
      {"params"; "opt_state", Adam's moments in at least float32; "step" int32, batches consumed; "skipped" int32,
      updates left out so far because a number was not finite; "skipped_in_a_row" int32}.
    """
    tokens = jnp.zeros((1, min(config.seq_len, 8)), jnp.int32)
    params = model.init(jax.random.key(config.seed), tokens)["params"]
    # Separate arrays: a donated state may not hold one buffer twice.
    return {
        "params": params,
        "opt_state": optimizer_lib.make_optimizer(config).init(_at_least_float32(params)),
        "step": jnp.int32(0),
        "skipped": jnp.int32(0),
        "skipped_in_a_row": jnp.int32(0),
    }


def state_shapes(model, config, mesh):
    """(The state as ShapeDtypeStructs that tell where each array lives on the mesh, those NamedShardings alone).

    Raises ValueError for a parameter without a sharding rule.
    """
    shapes = jax.eval_shape(lambda: init_state(model, config))
    shardings = partitioning.state_shardings(mesh, shapes, partition_rules(model.config))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    ), shardings


def make_state(model, config, shardings):
    """The initial state, each array made where it lives: `shardings` as from state_shapes."""
    return jax.jit(lambda: init_state(model, config), out_shardings=shardings)()


def make_train_step(model, config, shardings=None):
    """The function (state, batch) -> (state, metrics) of one update, to be compiled with the state donated.

    The loss is the mean negative log-likelihood of the batch's real tokens. With accumulation_steps = k the batch is
    taken as k micro-batches (rows j, j + k, ...: each device keeps its own rows), whose gradients are weighted by
    their tokens: the update is that of the whole batch, in the memory of a micro-batch. Dropout depends on the seed,
    the step and the micro-batch only.

    Where the loss, the gradient or the update is not finite, params and moments stay as they are; the step counts,
    the update does not.

    Args:
      model: LanguageModel. config: the run's config.
      shardings: NamedShardings of the state, which gradients then follow; None on one device.

    Returns:
      The function. batch: arrays [B, L] as `LanguageModel.loss` takes them. metrics, scalars on the device: loss,
      gradient_norm (before clipping), parameter_norm, learning_rate, tokens, skipped, skipped_in_a_row.
    """
    transformation = optimizer_lib.make_optimizer(config)

    def like_params(tree):
        return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings["params"])

    def train_step(state, batch):
        params, opt_state = state["params"], state["opt_state"]
        total = jnp.sum(batch["weights"])
        # Made here, so that nothing is computed while a step is compiled for devices that are not there.
        dropout = jax.random.fold_in(jax.random.key(config.seed), state["step"])

        def gradients(index, rows):
            """The part of the mean loss that `rows` are responsible for, and its gradient."""

            def loss(params):
                nll, _ = model.apply(
                    {"params": params},
                    rows,
                    deterministic=config.model.dropout == 0,
                    method="loss",
                    rngs={"dropout": jax.random.fold_in(dropout, index)},
                )
                return nll / jnp.maximum(total, 1.0)

            loss, grads = jax.value_and_grad(loss)(params)
            return loss, like_params(_at_least_float32(grads))

        loss, grads = _accumulate(gradients, batch, config.accumulation_steps)
        gradient_norm = optax.tree.norm(grads)
        updates, new_opt_state = transformation.update(grads, opt_state, params)
        good = jnp.isfinite(loss) & jnp.isfinite(gradient_norm) & jnp.isfinite(optax.tree.norm(updates))
        new_params = optax.apply_updates(params, updates)

        def keep(new, old):
            return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)

        bad = jnp.int32(~good)
        new_state = {
            "params": keep(new_params, params),
            "opt_state": keep(new_opt_state, opt_state),
            "step": state["step"] + 1,
            "skipped": state["skipped"] + bad,
            "skipped_in_a_row": (state["skipped_in_a_row"] + 1) * bad,
        }
        metrics = {
            "loss": loss,
            "gradient_norm": gradient_norm,
            "parameter_norm": optax.tree.norm(new_state["params"]),
            "learning_rate": optimizer_lib.learning_rate(config, optimizer_lib.update_count(opt_state)),
            "tokens": total,
            "skipped": new_state["skipped"],
            "skipped_in_a_row": new_state["skipped_in_a_row"],
        }
        return new_state, metrics

    return train_step


def compile_train_step(model, config, state, shardings, batch_sharding):
    """Compiles the train step ahead of the first batch: (state, batch) -> (state, metrics), the state donated.

    Args:
      model, config, shardings: as for make_train_step.
      state: the state, or its shapes.
      batch_sharding: NamedSharding of the batch's arrays.

    Returns:
      jax.stages.Compiled, which also tells its memory and operations.
    """
    shape = (config.batch_size, config.seq_len)
    ints = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), jnp.int32)
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding)
        for name, dtype in {**ints, "weights": jnp.float32}.items()
    }
    step = jax.jit(make_train_step(model, config, shardings), donate_argnums=0, out_shardings=(shardings, None))
    return step.lower(state, batch).compile()


def make_diagnostics(model):
    """The function (params, batch) -> {name: array [layers, ...]} of what the layers record on one row of the batch."""

    def diagnostics(params, batch):
        row = {name: array[:1] for name, array in batch.items()}
        _, collections = model.apply({"params": params}, row, method="loss", mutable=["diagnostics"])
        leaves = jax.tree_util.tree_leaves_with_path(collections.get("diagnostics", {}))
        # Whole on every device, so that every process can read them.
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): partitioning.constrain(leaf, "N" * leaf.ndim)
            for path, leaf in leaves
        }

    return jax.jit(diagnostics)


def _accumulate(gradients, batch, count):
    """The sums of `gradients(index, rows)` over `count` micro-batches of the batch."""
    if count == 1:
        return gradients(0, batch)

    def split(array):
        array = array.reshape(array.shape[0] // count, count, *array.shape[1:])
        return partitioning.constrain(jnp.moveaxis(array, 1, 0), "NBL")

    def step(total, micro_batch):
        return jax.tree.map(jnp.add, total, gradients(*micro_batch)), None

    micro_batches = (jnp.arange(count), jax.tree.map(split, batch))
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(gradients, *jax.tree.map(lambda leaf: leaf[0], micro_batches)),
    )
    return jax.lax.scan(step, zeros, micro_batches)[0]


def _at_least_float32(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)
