"""The nearest known name of a misspelt one."""

from cubit_jax.runtime.names import did_you_mean, nearest


def test_nearest_name_or_none():
    assert nearest("cubbit", ("attention", "cubit", "cem")) == "cubit"
    assert nearest("zzz", ("attention", "cubit")) is None
    assert nearest(3, ()) is None


def test_end_of_a_message():
    assert did_you_mean("ful", ("none", "full")) == "; did you mean 'full'?"
    assert did_you_mean("zzz", ("none", "full")) == ""
