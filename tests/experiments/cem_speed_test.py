"""The speed comparison runs every layer and computes its ratios against the right ones."""

import jax
import pytest

from cubit_jax.layers import Attention, CEMAttention
from experiments import cem_speed


def test_every_layer_is_timed():
    layers = {"attention": Attention(2, 4), "lowrank T=1": CEMAttention(2, 4, interaction="lowrank")}
    results = cem_speed.measure(layers, jax.random.normal(jax.random.key(0), (1, 8, 8)), rounds=2)
    assert set(results) == set(layers)
    assert all(len(times) == 2 and min(times) > 0 and memory > 0 for times, memory in results.values())


def test_ratios():
    results = {
        "attention": ([2.0, 2.0, 2.0], 2**20),
        "lowrank T=1": ([1.0, 1.0, 1.0], 0),
        "lowrank T=2": ([3.0, 3.0, 3.0], 0),
        "diagonal T=2": ([8.0, 8.0, 8.0], 0),
    }
    rows = {row["layer"]: row for row in cem_speed.table(results)}
    assert [rows[name]["of_attention"] for name in results] == pytest.approx([1, 0.5, 1.5, 4])
    assert [rows[name]["of_first"] for name in results] == [None, 1, 3, 1]
    assert rows["attention"]["mebibytes"] == 1 and rows["attention"]["spread"] == 0
