"""The comparison of training speeds runs every config and computes its ratios."""

import pytest

from cubit_jax.model_config import ModelConfig, expected_parameters
from cubit_jax.runtime.errors import UserError
from experiments import train_speed


def test_every_config_is_timed(micro_config):
    config = micro_config("cem", **{"model.implementation": "reference"})
    ((parameters, tokens, times),) = train_speed.measure({"cem": config}, rounds=2).values()
    assert parameters == expected_parameters(ModelConfig.from_config(config))
    assert tokens == 8 * 32 and len(times) == 2 and min(times) > 0


def test_ratios():
    rows = list(train_speed.table({"a": (7, 100, [2.0, 2.0, 2.0]), "b": (8, 100, [1.0, 4.0, 9.0])}))
    assert [(row["tokens_per_second"], row["of_first"]) for row in rows] == [(50, 1), (25, 0.5)]
    assert [row["spread"] for row in rows] == [0, 2]


def test_configs_are_named():
    assert train_speed.load("cem.py:tiny,steps=2").model.options.num_recursions == 2
    for name, words in {"cemm.py:tiny": "No module named 'configs.cemm'", "cem.py:huge": "unknown size 'huge'"}.items():
        with pytest.raises(UserError, match=words):
            train_speed.load(name)
