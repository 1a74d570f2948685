"""Families differ in the mixer and nothing else; sizes are the papers'; every field can be overridden by name."""

import importlib
import pathlib
import subprocess
import sys
import textwrap

import pytest

from configs import base
from cubit_jax.model import ModelConfig

ROOT = pathlib.Path(__file__).parents[1]
FAMILIES = ("transformer", "deltaformer", "cubit")


def get_config(family, size):
    return importlib.import_module(f"configs.{family}").get_config(size)


@pytest.mark.parametrize("size", base.SIZES)
def test_families_differ_in_mixer_and_options_only(size):
    configs = {family: get_config(family, size).to_dict() for family in FAMILIES}
    mixers = {family: config["model"].pop("mixers") for family, config in configs.items()}
    for config in configs.values():
        config["model"].pop("options")
    assert mixers == {"transformer": ("attention",), "deltaformer": ("deltaformer",), "cubit": ("cubit",)}
    assert configs["deltaformer"] == configs["cubit"] == configs["transformer"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size, shape", [("125m", (12, 768)), ("350m", (24, 1024)), ("1p3b", (24, 2048))])
def test_sizes_are_the_papers_and_every_length_fits(family, size, shape):
    config = get_config(family, size)
    assert (config.model.num_layers, config.model.model_dim) == shape
    for seq_len in (512, 8192):
        config.seq_len = seq_len
        assert ModelConfig.from_config(config).seq_len == seq_len


def run(*flags):
    """Runs a program that prints a few fields of --config, in a process of its own as flags are global."""
    program = textwrap.dedent("""
        from absl import flags
        from cubit_jax.runtime import cli
        config = cli.define_config()
        def main():
            value = config.value
            print(value.seq_len, value.model.mixers, value.model.options.get("lrr"), value.data.path)
        cli.run(main, required=["config"])
    """)
    return subprocess.run([sys.executable, "-c", program, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_fields_are_overridden_by_name():
    result = run(
        "--config=configs/cubit.py:tiny",
        "--config.seq_len=8192",
        "--config.data.path=a*.txt",
        '--config.model.mixers=("cubit","attention")',
        "--config.model.options.lrr=False",
    )
    assert (result.returncode, result.stdout.strip()) == (0, "8192 ('cubit', 'attention') False a*.txt")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--config=configs/cubit.py:tiny", "--config.num_stepz=3"], ["num_stepz", "num_steps"]),
        (["--config=configs/cubit.py:tiny", "--config.optimizer.learning_rat=3"], ["learning_rat", "learning_rate"]),
        (["--config=configs/cubit.py:tiny", "--config.qqqq=3"], ["qqqq", "configs/base.py"]),
        (["--config=configs/cubit.py:tiny", "--config.num_steps=many"], ["num_steps", "many"]),
        (["--config=configs/cubit.py:tiny", "--workdri=x"], ["workdri"]),
        (["--config=configs/cubit.py:tiny", "stray"], ["stray", "--"]),
        (["--config=configs/cubit.py:huge"], ["huge", "tiny, 125m, 350m, 1p3b"]),
        (["--config=configs/none.py:tiny"], ["configs/none.py", "no such file"]),
        ([], ["--config is missing"]),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(flags, words):
    result = run(*flags)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words)


def test_help_explains_the_flags_and_is_no_failure():
    result = run("--help")
    assert result.returncode == 0
    assert "--config.num_steps" in result.stdout
