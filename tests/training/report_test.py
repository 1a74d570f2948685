"""What a finished run prints: its advice is followed here, and parameters that are not finite are an error."""

import re
import shlex
import sys

import jax.numpy as jnp
import pytest
from absl import flags

from cubit_jax import train
from cubit_jax.runtime import cli
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import report as report_module
from cubit_jax.training.config_check import check_values

MICRO = [
    "--config.num_steps=1",
    "--config.batch_size=2",
    "--config.seq_len=16",
    "--config.model.num_layers=2",
    "--config.model.model_dim=16",
    "--config.model.num_heads=2",
    "--config.model.head_dim=8",
    "--config.model.mlp_dim=16",
    "--config.model.vocab_size=300",
]


@pytest.fixture
def parsed(monkeypatch):
    """parsed(arguments): the config that the train program makes of its command line."""

    def parse(arguments):
        monkeypatch.setattr(flags, "FLAGS", values := flags.FlagValues())
        for module in (cli.flags, train.flags):
            monkeypatch.setattr(module, "FLAGS", values, raising=False)
        monkeypatch.setattr(sys, "argv", ["train", *arguments])
        config_flags = cli.config_flags
        holder = config_flags.DEFINE_config_file("config", None, flag_values=values)
        del holder
        values["config"].parser = cli._AnyOption(values["config"].parser)
        values(sys.argv)
        config = values.config
        train.drop_replaced_options(config, cli.given_options())
        return config

    return parse


@pytest.mark.parametrize(
    "config, extra",
    [
        ("cubit", []),
        ("transformer", []),
        ("cubit", ["--config.model.mixers=deltaformer"]),
        ("cubit", ["--config.model.mixers=('cubit','attention')"]),
        ("cubit", ["--config.model.options.ridge_init=1e-3"]),
        ("transformer", ["--config.model.mixers=cem", "--config.model.options.num_recursions=2"]),
    ],
)
def test_the_comparison_that_is_advised_trains_another_mixer(parsed, config, extra):
    arguments = [f"--config=configs/{config}.py:tiny", *MICRO, *extra]
    before = check_values(parsed(arguments))
    other = "cubit" if set(before.mixers) == {"attention"} else "transformer"
    advice = report_module._other_family(other)
    way, _, without = advice.partition(", without ")
    for name in shlex.split(without):
        arguments = [argument for argument in arguments if not argument.startswith(f"{name}=")]
    if match := re.fullmatch(r"--config=(configs/\w+\.py) and its size", way):
        arguments[0] = f"--config={match[1]}:tiny"
    else:
        arguments = [argument for argument in arguments if not argument.startswith("--config.model.mixers=")]
        arguments.append(way)
    after = check_values(parsed(arguments))
    assert set(after.mixers) == {"cubit" if other == "cubit" else "attention"} != set(before.mixers)


def test_parameters_that_are_not_finite_never_end_well(micro_config):
    class Run:
        config = micro_config()

    state = {"step": 7, "params": {"layers": {"kernel": jnp.array([1.0, jnp.nan])}, "scale": jnp.ones(2)}}
    with pytest.raises(UserError, match=r"not finite after step 7, layers/kernel first: try a lower optimizer\.learn"):
        report_module.report(Run(), state, None, None)
