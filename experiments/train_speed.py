"""How fast does each kind of model train? Training steps of several configs, one after the other in random order.

    XLA_FLAGS= python -m experiments.train_speed
    XLA_FLAGS= python -m experiments.train_speed --configs="cem.py:tiny,steps=2 cem.py:tiny,steps=4"

Whole steps, optimizer included, on batches of random tokens of the config's shape. On a busy machine the speeds of runs
made one after the other do not compare; these do: "of first" is the ratio of a config's tokens/s to the first one's, of
medians; "spread" is the distance of the quartiles as a share of the median.
"""

import importlib
import json
import statistics

import jax
import jax.numpy as jnp
from absl import flags

from cubit_jax import partitioning
from cubit_jax.model import LanguageModel, ModelConfig, count_parameters
from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import step as train_step
from experiments.measure import spread, time_in_turns
from experiments.options import output_path

_CONFIGS = (
    "transformer.py:tiny deltaformer.py:tiny cubit.py:tiny cem.py:tiny cem.py:tiny,steps=2 "
    "cem.py:tiny,mlp=gated cem.py:tiny,mlp=gated,steps=2 "
    "cem.py:tiny,attention=attention cem.py:tiny,attention=attention,steps=2"
)


def define_flags():
    """In a function, so that several of these programs can be imported into one process."""
    flags.DEFINE_string("configs", _CONFIGS, "FILE:ARGUMENT of the folder configs, with spaces between.")
    flags.DEFINE_integer("rounds", 9, "Steps of each.", lower_bound=2)
    flags.DEFINE_string("output", None, "Path of a JSON file to write, if any.")


def load(name):
    """The config that FILE:ARGUMENT names."""
    file, _, argument = name.partition(":")
    try:
        return importlib.import_module(f"configs.{file.removesuffix('.py')}").get_config(argument)
    except (ImportError, ValueError) as error:
        raise UserError(f"--configs={name}: {error}") from error


class Run:
    """A compiled training step on one device, its state and a batch."""

    def __init__(self, config):
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

    def step(self):
        """The numbers of one more step."""
        self._state, metrics = self._step(self._state, self._batch)
        return metrics


def measure(configs, rounds, seed=0):
    """{name: (parameters, tokens a step, list of seconds)} of configs run in turns."""
    runs = {name: Run(config) for name, config in configs.items()}
    times = time_in_turns({name: run.step for name, run in runs.items()}, rounds, seed=seed)
    return {name: (run.parameters, run.tokens, times[name]) for name, run in runs.items()}


def table(results):
    """One record a config."""
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


def main():
    values = flags.FLAGS
    output = output_path(values.output) if values.output else None
    records = list(table(measure({name: load(name) for name in values.configs.split()}, values.rounds)))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'config':<32} {'parameters':>12} {'tokens/s':>9} {'spread':>7} {'of first':>9}")
    for r in records:
        print(
            f"{r['config']:<32} {r['parameters']:>12,} {r['tokens_per_second']:>9,.0f} {r['spread']:>7.1%} "
            f"{r['of_first']:>9.2f}"
        )
    if output:
        output.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
