"""Options of layers by flags: any field of a layer, a family's own where its layer is replaced, advice that works."""

import json
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

from cubit_jax.model import ModelConfig

ROOT = pathlib.Path(__file__).parents[1]
MIXERS = "--config.model.mixers="
RECURSIONS = "--config.model.options.num_recursions=2"
HYBRID = f'{MIXERS}("cubit","attention")'


@pytest.fixture(scope="module")
def train_with():
    """train_with([flags, ...]) -> [(exit code, mixers, mlp and options, or the error)]: `train` up to its model.

    One process imports, and forks one for each command: flags are global.
    """

    def run(commands):
        program = textwrap.dedent("""
            import json, os, sys
            from cubit_jax import train
            from cubit_jax.model import ModelConfig
            from cubit_jax.runtime import cli
            from cubit_jax.runtime.errors import UserError

            def show(config, folder):
                try:
                    model = ModelConfig.from_config(config)
                except ValueError as error:
                    raise UserError(error)
                print(json.dumps([model.mixers, model.mlp, dict(model.options)]), flush=True)

            train.train = show
            train.define_flags()
            for command in json.loads(sys.argv[1]):
                if not (child := os.fork()):
                    os.dup2(1, 2)
                    sys.argv[1:] = [*command, "--workdir=none"]
                    cli.run(train.main, required=["config", "workdir"])
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """)
        line = [sys.executable, "-W", "ignore", "-c", program, json.dumps(commands)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
        lines = done.stdout.splitlines()
        assert done.returncode == 0 and len(lines) == 2 * len(commands), (done.stdout, done.stderr)
        return [(int(code), json.loads(said) if code == "0" else said) for said, code in zip(lines[::2], lines[1::2])]

    return run


@pytest.mark.full
def test_advice_on_an_option_that_no_layer_has_works_when_followed(train_with):
    commands = [
        ["--config=configs/cubit.py:tiny", RECURSIONS],
        ["--config=configs/transformer.py:tiny", "--config.model.options.reference=shared"],
        ["--config=configs/cubit.py:tiny", HYBRID, RECURSIONS],
    ]
    followed, expected = [], []
    for command, (code, said) in zip(commands, train_with(commands)):
        option, value = command[-1].removeprefix("--config.model.options.").split("=")
        assert code == 1 and f"{option}=" in said
        advice = re.findall(r"--config\.model\.(\w+)=(\w+)", said)
        assert advice
        followed.append([*command[:-1], "--config.seed=1"])  # leave it out
        expected.append((None, None))
        for field, name in advice:
            rest = [flag for flag in command if not flag.startswith(f"--config.model.{field}=")]
            followed.append([*rest, f"--config.model.{field}={name}"])
            expected.append((option, value))
    for command, (code, said), (option, value) in zip(followed, train_with(followed), expected, strict=True):
        assert code == 0, (command, said)
        assert option is None or str(said[2][option]) == value


def test_options_of_a_replaced_layer_go_with_it(train_with):
    replaced, hybrid, mlp, none, kept = train_with(
        [
            ["--config=configs/cubit.py:tiny", f"{MIXERS}cem", RECURSIONS],
            ["--config=configs/cubit.py:tiny", f'{MIXERS}("cubit","cem")', RECURSIONS],
            ["--config=configs/cem.py:tiny", f"{MIXERS}attention"],
            ["--config=configs/cem.py:tiny", f"{MIXERS}attention", "--config.model.mlp=gated"],
            ["--config=configs/cubit.py:tiny"],
        ]
    )
    assert replaced == (0, [["cem"], "gated", {"num_recursions": 2}])
    assert hybrid == (0, [["cubit", "cem"], "gated", {**kept[1][2], "num_recursions": 2}])
    assert mlp[0] == 0 and "interaction" not in mlp[1][2] and mlp[1][2]["activation"] == "silu"
    assert none == (0, [["attention"], "gated", {}])
    assert kept[0] == 0 and kept[1][2]["lrr"] is True


def test_every_field_of_a_layer_is_an_option_by_flag(train_with):
    given, negated, kind, misspelt = train_with(
        [
            [
                "--config=configs/transformer.py:tiny",
                f"{MIXERS}cubit",
                "--config.model.options.ridge_init=1e-3",
                "--config.model.options.lrr=false",
                "--config.model.options.reference=shared",
            ],
            ["--config=configs/cubit.py:tiny", "--noconfig.model.options.lrr"],
            ["--config=configs/transformer.py:tiny", f"{MIXERS}cubit", "--config.model.options.ridge_init=little"],
            ["--config=configs/cubit.py:tiny", "--config.model.options.refrence=shared"],
        ]
    )
    assert given == (0, [["cubit"], "gated", {"ridge_init": 1e-3, "lrr": False, "reference": "shared"}])
    assert negated[0] == 0 and negated[1][2]["lrr"] is False
    assert kind == (1, "error: model.options.ridge_init='little' must be of type float")
    assert misspelt[0] == 1 and "'refrence' is not one of" in misspelt[1] and "did you mean 'reference'?" in misspelt[1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_recursions": True}, "num_recursions=True must be of type int"),
        ({"num_recursions": 2.0}, "num_recursions=2.0 must be of type int"),
        ({"step_size": "big"}, r"step_size='big' must be of type float \| None"),
    ],
)
def test_options_have_the_kind_of_their_field(options, message):
    size = {"num_layers": 1, "model_dim": 8, "num_heads": 1, "head_dim": 8, "mlp_dim": 8, "seq_len": 8}
    assert ModelConfig(vocab_size=8, mixers=("cem",), options={"step_size": 1, "num_recursions": 0}, **size)
    with pytest.raises(ValueError, match=message):
        ModelConfig(vocab_size=8, mixers=("cem",), options=options, **size)
