"""The check of a whole config: every number by itself, before anything is compared or compiled."""

import re

import pytest

from cubit_jax.training import config_check

NUMBERS = [
    "optimizer.learning_rate",
    "optimizer.clip_norm",
    "optimizer.weight_decay",
    "optimizer.b1",
    "optimizer.eps",
    "optimizer.end_fraction",
    "model.rope_theta",
    "model.norm_eps",
    "model.dropout",
    "model.options.ridge_init",
    "data.heldout_fraction",
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_not_finite_is_named(micro_config, name, value):
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}={value} must be a finite number$"):
        config_check.check_values(micro_config(**{name: value}))


def test_numbers_in_lists_are_checked_too(micro_config):
    config = micro_config()
    config.model.options.unknown = (1.0, float("nan"))
    with pytest.raises(ValueError, match=r"model\.options\.unknown=nan must be a finite number"):
        config_check.check_values(config)
