import functools
import logging

import jax
import jax.numpy as jnp
import pytest

from cubit_jax import ops
from cubit_jax.ops import dispatch


def _cannot(x):
    raise NotImplementedError(f"no {x}")


CHOICES = {"reference": lambda x: "reference", "xla": lambda x: "xla", "pallas": lambda x: "pallas"}


@pytest.mark.parametrize(("platform", "expected"), [("cpu", "xla"), ("tpu", "pallas"), ("gpu", "pallas")])
def test_none_takes_device_code_only_on_its_device(platform, expected):
    with dispatch.backend(platform):
        assert dispatch.run("op", CHOICES, None, 1) == expected
    assert dispatch.run("op", CHOICES, None, 1) == "xla"


def test_none_falls_through_and_says_why_once(caplog):
    caplog.set_level(logging.INFO, logger="absl")
    with dispatch.backend("tpu"):
        for _ in range(3):
            assert dispatch.run("solve", CHOICES | {"pallas": _cannot}, None, 7) == "xla"
    assert [record.getMessage() for record in caplog.records] == ["solve: implementation xla on tpu; not pallas: no 7"]


def test_none_never_takes_the_reference():
    with pytest.raises(NotImplementedError, match="xla: no 7"):
        dispatch.run("op", CHOICES | {"xla": _cannot}, None, 7)


def test_a_name_never_falls_back():
    assert dispatch.run("op", CHOICES, "reference", 1) == "reference"
    with pytest.raises(NotImplementedError, match="no 7"):
        dispatch.run("op", CHOICES | {"pallas": _cannot}, "pallas", 7)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"implementation='cuda' of op must be .*'pallas', 'reference', 'xla'"):
        dispatch.run("op", CHOICES, "cuda", 1)


def test_pallas_on_a_cpu_is_refused_unless_interpreted():
    x, ridge = jnp.ones((1, 4, 1, 8)), jnp.ones(1)
    for call in (
        lambda: ops.attention(x, x, x, implementation="pallas"),
        lambda: ops.kernel_solve(x, x, x, ridge=ridge, implementation="pallas"),
    ):
        with pytest.raises(NotImplementedError, match="needs a TPU or a GPU, and the backend is cpu"):
            call()
    with dispatch.interpret():
        assert dispatch.kernel_platform() == ("tpu", True)
    with dispatch.interpret("gpu"):
        assert dispatch.kernel_platform() == ("gpu", True)


def test_backend_reaches_ahead_of_time_compilation_for_another_device():
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    ridge = jax.ShapeDtypeStruct((2,), jnp.float32)

    def mixer(q, k, v, ridge):
        return ops.attention(q, k, ops.kernel_solve(q, k, v, ridge=ridge))

    with dispatch.backend("tpu"):
        exported = jax.export.export(jax.jit(mixer), platforms=["tpu"])(x, x, x, ridge)
    assert exported.mlir_module().count("tpu_custom_call") == 2


def test_what_was_taken_is_recorded_where_asked():
    with dispatch.recorded() as taken:
        dispatch.run("op", CHOICES, None, 1)
        dispatch.run("other", CHOICES, "reference", 1)
        with dispatch.backend("tpu"):
            dispatch.run("op", CHOICES | {"pallas": _cannot}, None, 1)
            dispatch.run("op", CHOICES, None, 1)
        with pytest.raises(NotImplementedError):
            dispatch.run("third", CHOICES | {"xla": _cannot}, "xla", 1)
    dispatch.run("fourth", CHOICES, None, 1)
    assert taken == {"op": {"xla", "pallas"}, "other": {"reference"}}


def test_the_solve_takes_no_kernel_on_a_gpu_before_it_has_run_on_one(monkeypatch):
    choose = functools.partial(dispatch.run, "kernel_solve", CHOICES)
    with dispatch.backend("gpu"):
        assert choose(None, 1) == "xla"
        assert choose("pallas", 1) == "pallas"
        monkeypatch.setattr(dispatch, "UNPROVEN", {})
        assert choose(None, 1) == "pallas"
    with dispatch.backend("tpu"):
        assert choose(None, 1) == "pallas"
