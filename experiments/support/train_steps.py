"""Training steps of several configs, timed in turns: the benchmark's --what=train."""

import importlib
import statistics
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import ml_collections

from cubit_jax import partitioning
from cubit_jax.model import LanguageModel, ModelConfig, count_parameters
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import step as train_step
from experiments.support.timing import spread, time_in_turns

CONFIGS = (
    "transformer.py:tiny deltaformer.py:tiny cubit.py:tiny cem.py:tiny cem.py:tiny,steps=2 "
    "cem.py:tiny,mlp=gated cem.py:tiny,mlp=gated,steps=2 "
    "cem.py:tiny,attention=attention cem.py:tiny,attention=attention,steps=2"
)


def load(name: str) -> ml_collections.ConfigDict:
    """The config that FILE:ARGUMENT names, of the folder configs."""
    file, _, argument = name.partition(":")
    try:
        return importlib.import_module(f"configs.{file.removesuffix('.py')}").get_config(argument)
    except (ImportError, ValueError) as error:
        raise UserError(f"--configs={name}: {error}") from error


class Run:
    """A compiled training step on one device, its state, and a batch of random tokens."""

    def __init__(self, config: ml_collections.ConfigDict):
        model = LanguageModel(ModelConfig.from_config(config))
        mesh = partitioning.make_mesh({"data": 1}, jax.devices()[:1])
        shape = (config.batch_size, config.seq_len)
        self.tokens = shape[0] * shape[1]
        with jax.set_mesh(mesh):
            tokens = jax.random.randint(jax.random.key(0), shape, 0, config.model.vocab_size)
            self._batch = partitioning.put_batch(
                mesh,
                jax.device_get(
                    {
                        "tokens": tokens,
                        "targets": tokens,
                        "segment_ids": jnp.ones_like(tokens),
                        "positions": jnp.broadcast_to(jnp.arange(shape[1]), shape),
                        "weights": jnp.ones(shape),
                    }
                ),
            )
            _, shardings = train_step.state_shapes(model, config, mesh)
            self._state = train_step.make_state(model, config, shardings)
            self._step = train_step.compile_train_step(
                model, config, self._state, shardings, self._batch["tokens"].sharding
            )
        self.parameters = count_parameters(self._state["params"])

    def step(self) -> dict:
        """The numbers of one more step."""
        self._state, metrics = self._step(self._state, self._batch)
        return metrics


def measure(configs: Mapping[str, ml_collections.ConfigDict], rounds: int, seed: int = 0) -> list[dict]:
    """Records of whole training steps, optimizer included, of configs run in turns in random order."""
    runs = {name: Run(config) for name, config in configs.items()}
    times = time_in_turns({name: run.step for name, run in runs.items()}, rounds, seed=seed)
    return list(records({name: (run.parameters, run.tokens, times[name]) for name, run in runs.items()}))


def records(results: Mapping[str, tuple[int, int, list[float]]]) -> Iterator[dict]:
    """One record per config of {name: (parameters, tokens per step, seconds of the steps)}."""
    speeds = {name: tokens / statistics.median(times) for name, (_, tokens, times) in results.items()}
    first = next(iter(speeds.values()))
    for name, (parameters, _, times) in results.items():
        yield {
            "config": name,
            "parameters": parameters,
            "tokens_per_second": speeds[name],
            "spread": spread(times),
            "of_first": speeds[name] / first,
        }


def table(records: list[dict]) -> str:
    """The records as text, aligned."""
    lines = [f"{'config':<38} {'parameters':>12} {'tokens/s':>9} {'spread':>7} {'of first':>9}"]
    lines += [
        f"{r['config']:<38} {r['parameters']:>12,} {r['tokens_per_second']:>9,.0f} {r['spread']:>7.1%} "
        f"{r['of_first']:>9.2f}"
        for r in records
    ]
    return "\n".join(lines)
