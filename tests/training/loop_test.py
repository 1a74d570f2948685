"""The loop's ways to stop, with a step that takes no time and real checkpoints: what is saved, written and raised."""

import json
import shutil
import types

import jax
import jax.numpy as jnp
import pytest

from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.profiler import Trace
from cubit_jax.training import metrics
from cubit_jax.training.checkpoint import Checkpoints, SaveError
from cubit_jax.training.checkpoint_steps import choose_step
from cubit_jax.training.loop import Loop, flatten_diagnostics


class Batches:
    """Counts; its position is the number of the batch handed out last."""

    def __init__(self, count=1000):
        self.position, self._count = 0, count

    def __next__(self):
        if self.position == self._count:
            raise StopIteration
        self.position += 1
        return self.position


def make_loop(config, folder, *, batches=None, bad=(), **changes):
    """A loop whose parameter is the sum of the batches seen; the steps in `bad` count as skipped."""
    checkpoints = Checkpoints(folder, config.keep_checkpoints, config.keep_best)
    batches = batches or Batches()
    stop = types.SimpleNamespace(name=None, at=lambda step: stop.name)

    def step_fn(state, batch):
        step = int(state["step"]) + 1
        skip = step in bad
        state = {
            "params": {"sum": state["params"]["sum"] + batch * (not skip)},
            "step": jnp.int32(step),
            "skipped_in_a_row": jnp.int32((state["skipped_in_a_row"] + 1) * skip),
        }
        numbers = dict.fromkeys(("gradient_norm", "parameter_norm", "learning_rate", "skipped"), 0.0)
        return state, numbers | {"loss": float(step), "tokens": 10, "skipped_in_a_row": state["skipped_in_a_row"]}

    return Loop(
        **{
            "config": config,
            "model_config": types.SimpleNamespace(mixers=("cubit",)),
            "step_fn": step_fn,
            "diagnostics_fn": lambda params, batch: {"layers/block_0/mixer/ridge_min": jnp.ones(2)},
            "evaluate": lambda params: {"eval/loss": float(params["sum"])},
            "put": lambda batch: batch,
            "batches": batches,
            "data_state": lambda: json.dumps({"position": batches.position}).encode(),
            "checkpoints": checkpoints,
            "writers": metrics.open_writers(folder, 0),
            "stop": stop,
            "trace": Trace(folder / "profile", **config.profile),
            "flops_per_token": 1.0,
            **changes,
        }
    )


def initial():
    return {"params": {"sum": jnp.float32(0)}, "step": jnp.int32(0), "skipped_in_a_row": jnp.int32(0)}


def restored(folder):
    """(number, parameter, position in the data) of the last checkpoint, by a new manager."""
    checkpoints = Checkpoints(folder)
    state, data_state = checkpoints.restore(initial())
    return int(state["step"]), float(state["params"]["sum"]), json.loads(data_state)["position"]


def lines(folder):
    return {record["step"]: record for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


@pytest.fixture
def config(micro_config):
    return micro_config(
        **{
            "num_steps": 23,
            "checkpoint_every": 10,
            "eval_every": 8,
            "log_every": 5,
            "diagnostics_every": 6,
            "keep_checkpoints": 5,
        }
    )


@pytest.mark.parametrize("num_steps, saved", [(23, [10, 20, 23]), (20, [10, 20])])
def test_last_step_is_saved_on_and_off_the_interval(config, tmp_path, num_steps, saved):
    config.num_steps = num_steps
    loop = make_loop(config, tmp_path)
    state, evaluation, clock = loop.run(initial())
    total = num_steps * (num_steps + 1) / 2
    assert restored(tmp_path) == (num_steps, total, num_steps)
    assert loop.checkpoints.steps == saved
    assert evaluation == {"eval/loss": total} and float(state["params"]["sum"]) == total
    assert (clock.steps, clock.tokens) == (num_steps, 10 * num_steps)


def test_checkpoint_holds_exactly_its_steps(config, tmp_path):
    config.num_steps = 10
    make_loop(config, tmp_path).run(initial())
    assert restored(tmp_path) == (10, 55.0, 10)


def test_metrics_stand_at_their_steps(config, tmp_path):
    make_loop(config, tmp_path).run(initial())
    written = lines(tmp_path)
    assert sorted(written) == [5, 6, 8, 10, 12, 15, 16, 18, 20, 23]
    assert all(record["train/loss"] == step for step, record in written.items())
    assert {step for step, record in written.items() if "eval/loss" in record} == {8, 16, 23}
    assert {step for step, record in written.items() if "diagnostics/layer_1/mixer/ridge_min" in record} == {6, 12, 18}


def test_killed_while_it_evaluates_no_checkpoint_is_ahead_of_the_metrics(config, tmp_path):
    class Killed(BaseException):
        pass

    def evaluate(params):
        raise Killed

    config.checkpoint_every = config.eval_every = 4
    loop = make_loop(config, tmp_path, evaluate=evaluate)
    with pytest.raises(Killed):
        loop.run(initial())
    assert loop.checkpoints.latest_step is None  # else a run that goes on from step 4 would not write its line


def test_data_that_end_early_end_the_run_with_what_there_is(config, tmp_path):
    state, _, _ = make_loop(config, tmp_path, batches=Batches(count=13)).run(initial())
    assert int(state["step"]) == 13
    assert restored(tmp_path) == (13, 91.0, 13)


def test_signal_ends_the_step_at_hand_and_saves(config, tmp_path):
    loop = make_loop(config, tmp_path)
    step_fn = loop.step_fn

    def with_signal(state, batch):
        if batch == 7:
            loop.stop.name = "SIGTERM"
        return step_fn(state, batch)

    loop.step_fn = with_signal
    state, _, _ = loop.run(initial())
    assert int(state["step"]) == 7
    assert restored(tmp_path) == (7, 28.0, 7)


def test_too_many_skipped_updates_in_a_row_stop_and_keep_the_good_checkpoint(config, tmp_path):
    config.update(max_skipped_updates=4, checkpoint_every=2, keep_checkpoints=1)
    loop = make_loop(config, tmp_path, bad=(3, 5, 6, 7, *range(11, 20)))
    with pytest.raises(UserError, match=r"stopped at step 14: .* 4 updates in a row .* last good checkpoint is 10"):
        loop.run(initial())
    loop.checkpoints.close()
    assert restored(tmp_path) == (10, 1 + 2 + 4 + 8 + 9 + 10, 10)


def test_save_that_falls_on_a_skipped_update_is_made_up_for(config, tmp_path):
    config.update(num_steps=7, checkpoint_every=4)
    loop = make_loop(config, tmp_path, bad=(4,))
    loop.run(initial())
    assert loop.checkpoints.steps == [5, 7]


def test_an_evaluation_among_the_best_is_saved_and_kept(config, tmp_path):
    config.update(num_steps=8, checkpoint_every=7, eval_every=1, keep_checkpoints=1, keep_best=2)
    losses = iter([5.0, 4.0, 1.0, 6.0, 2.0, 3.0, 9.0, 8.0])
    loop = make_loop(config, tmp_path, evaluate=lambda params: {"eval/loss": next(losses)})
    loop.run(initial())
    assert loop.checkpoints.steps == [3, 5, 8]
    assert (choose_step(tmp_path, "best"), choose_step(tmp_path)) == (3, 8)


def test_folder_lost_while_training_ends_the_run_at_the_next_save(config, tmp_path):
    loop = make_loop(config, tmp_path)

    def lose(params):
        loop.checkpoints.wait()
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").write_text("in the way")
        return {"eval/loss": 0.0}

    loop.evaluate = lose
    with pytest.raises(SaveError, match="cannot write a checkpoint"):
        loop.run(initial())
    assert max(lines(tmp_path)) == 10  # the step whose save failed


@pytest.mark.parametrize("num_steps, traced", [(7, 2), pytest.param(2, 1, marks=pytest.mark.full)])
def test_profile_holds_the_steps_asked_for(config, tmp_path, capsys, num_steps, traced):
    """Whole, and cut off by the end of the run; nothing is traced otherwise."""
    config.update(num_steps=num_steps, profile={"first_step": 2, "num_steps": 2})
    loop = make_loop(config, tmp_path)
    step_fn = loop.step_fn

    def named(state, batch):
        with jax.profiler.TraceAnnotation(f"batch {batch}"):
            return step_fn(state, batch)

    loop.step_fn = named
    loop.run(initial())
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    assert [batch for batch in range(1, num_steps + 1) if b"batch %d" % batch in content] == [2, 3][:traced]
    assert ("profile     of steps 2 to 3 in " in capsys.readouterr().out) == (traced == 2)


def test_nothing_is_profiled_by_default(config, tmp_path):
    make_loop(config, tmp_path).run(initial())
    assert not (tmp_path / "profile").exists()


def test_diagnostics_of_a_pattern_of_mixers_are_named_by_layer():
    pattern = types.SimpleNamespace(mixers=("cubit", "attention"))
    values = {
        "layers/block_0/mixer/ridge_min": jnp.array([1.0, 2.0]),
        "layers/block_1/mlp/energy": jnp.array([[3.0, 4.0], [5.0, 6.0]]),
    }
    assert flatten_diagnostics(values, pattern) == {
        "diagnostics/layer_0/mixer/ridge_min": 1.0,
        "diagnostics/layer_2/mixer/ridge_min": 2.0,
        "diagnostics/layer_1/mlp/energy/0": 3.0,
        "diagnostics/layer_1/mlp/energy/1": 4.0,
        "diagnostics/layer_3/mlp/energy/0": 5.0,
        "diagnostics/layer_3/mlp/energy/1": 6.0,
    }
    assert flatten_diagnostics({"layer_5/mixer/ridge_min": jnp.float32(7)}, pattern) == {
        "diagnostics/layer_5/mixer/ridge_min": 7.0
    }
