"""Values beyond a field's limits are one line before anything begins (found by the fuzz test)."""

import math

import pytest

from cubit_jax.training.config_check import check_values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.rope_theta", -1.0),
        ("model.rope_theta", 0.0),
        ("model.rope_theta", math.inf),
        ("model.norm_eps", -1.0),
        ("data.num_workers", -1),
        ("optimizer.b1", 1.0),
        ("optimizer.b2", 1.0),
        ("optimizer.b2", -0.5),
    ],
)
def test_a_value_beyond_the_limits_is_named(micro_config, name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be ") as error:
        check_values(micro_config("transformer", **{name: value}))
    assert "\n" not in str(error.value)
