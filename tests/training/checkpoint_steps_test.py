"""Which steps are kept, and which one is chosen."""

import json
import math

import pytest

from cubit_jax.runtime.errors import UserError
from cubit_jax.training import checkpoint_steps as steps


def make_steps(workdir, losses):
    """Folders as a save leaves them, without arrays."""
    for step, loss in losses.items():
        folder = workdir / "checkpoints" / str(step)
        for name in steps._NEEDED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        if loss is not None:
            (folder / "metrics").mkdir()
            (folder / "metrics/metadata").write_text(json.dumps({"eval/loss": loss}))


@pytest.mark.parametrize(
    "losses, keep, keep_best, removed",
    [
        ({10: 3.0, 20: 2.0, 30: 2.5, 40: 2.6}, 2, 0, [10, 20]),
        ({10: 3.0, 20: 2.0, 30: 2.5, 40: 2.6}, 2, 1, [10]),
        ({10: 3.0, 20: 2.0, 30: 2.5, 40: 2.6}, 1, 2, [10]),
        ({10: 1.0, 20: 2.0, 30: 3.0}, 1, 1, [20]),  # the newest is the worst
        ({10: math.nan, 20: None, 30: 2.0}, 1, 5, [10, 20]),
        ({10: 2.0, 20: 2.0, 30: 3.0}, 1, 1, [10]),
        ({10: None}, 1, 0, []),
    ],
)
def test_the_last_and_the_best_are_kept(losses, keep, keep_best, removed):
    assert steps.superfluous(losses, keep, keep_best) == removed


def test_steps_are_chosen_by_number_by_loss_and_by_age(tmp_path):
    make_steps(tmp_path, {9: 1.5, 10: 1.25, 100: 1.75, 110: None})
    (tmp_path / "checkpoints/200").mkdir()  # passed over, as evaluate, generate and init_from find it
    assert steps.choose_step(tmp_path) == 110
    assert steps.choose_step(tmp_path, "best") == 10
    assert steps.choose_step(tmp_path, "9") == steps.choose_step(tmp_path, 9) == 9


@pytest.mark.parametrize("wanted", ["11", 11, "0", "-1", "newest", "1e2"])
def test_an_unknown_step_lists_those_there_are(tmp_path, wanted):
    make_steps(tmp_path, {9: 1.5, 10: None})
    (tmp_path / "checkpoints/11").mkdir()
    with pytest.raises(UserError, match=r"the steps are 9 \(held-out loss 1\.5000\), 10$"):
        steps.choose_step(tmp_path, wanted)


def test_no_step_is_the_best_without_an_evaluation(tmp_path):
    make_steps(tmp_path, {9: None, 10: math.nan})
    with pytest.raises(UserError, match=r"has a held-out loss, so none is the best; the steps are 9, 10"):
        steps.choose_step(tmp_path, "best")
