"""What is saved can be restored, damage is found, and debris in the folder is passed over."""

import json
import os
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import ocdbt_utils

from cubit_jax.runtime.errors import UserError
from cubit_jax.training.checkpoint import Checkpoints, SaveError, load_params


def make_state(step):
    params = {"a": jnp.arange(3000.0) + step, "b": {"c": jnp.full((40, 50), step, jnp.bfloat16)}}
    return {"params": params, "moments": jax.tree.map(jnp.square, params), "step": jnp.int32(step)}


def save(folder, *steps, **options):
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(step, make_state(step), json.dumps({"row": step}).encode(), {"eval/loss": 1 / step})
    checkpoints.close()


def restore(folder):
    """The step restored, after a look that all of it is of that step."""
    checkpoints = Checkpoints(folder)
    state, data_state = checkpoints.restore(make_state(0))
    expected = make_state(checkpoints.latest_step)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert json.loads(data_state) == {"row": checkpoints.latest_step}
    return checkpoints.latest_step


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "name",
    [
        "[lr=1e-3] cubit",
        "a*b?{c}",
        "50%20#x",
        "tail ",
        "line\nbreak\t\x01",
        "back\\slash",
        "é 語",
        os.fsdecode(b"\xff"),
    ],
)
def test_any_folder_name_can_be_saved_to_and_restored_from(tmp_path, name):
    save(tmp_path / name, 1, 2)
    assert restore(tmp_path / name) == 2
    assert (tmp_path / name / "checkpoints/2/params/manifest.ocdbt").is_file()


def test_a_very_long_path_can_be_saved_to_and_restored_from(tmp_path):
    folder = tmp_path.joinpath(*["x" * 200] * 19)
    assert len(str(folder)) > 3800
    save(folder, 1)
    assert restore(folder) == 1


def test_a_link_with_a_plain_name_is_removed_again(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    save(tmp_path / "[x]", 1)
    assert not list((tmp_path / "temporary").iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "[x]"))
    with pytest.raises(UserError, match="set TMPDIR to a folder with a plain name"):
        Checkpoints(tmp_path / "[x]")


def test_a_save_that_orbax_left_incomplete_is_an_error_and_removes_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1)

    async def finds_no_parts(*args, **options):
        """What the merge does where the glob of the folder's name finds nothing: it only logs a warning."""

    monkeypatch.setattr(ocdbt_utils, "merge_ocdbt_per_process_files", finds_no_parts)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(2, make_state(2), b"{}")
    with pytest.raises(SaveError, match=r"cannot write a checkpoint to .*; the last good checkpoint is 1$"):
        checkpoints.wait()
    assert not (tmp_path / "checkpoints/2").exists()
    monkeypatch.undo()
    assert restore(tmp_path) == 1


def test_older_checkpoints_stay_until_the_new_one_is_verified(tmp_path, monkeypatch):
    save(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    seen = []
    verify = checkpoints._verify
    monkeypatch.setattr(
        checkpoints._checkpointer, "_post_finalization_callback", lambda: (seen.append(names(tmp_path)), verify())
    )
    checkpoints.save(2, make_state(2), b"{}")
    checkpoints.close()
    assert seen == [["1", "2.orbax-checkpoint-tmp"]]
    assert names(tmp_path) == ["2"]


@pytest.mark.parametrize("item", ["params", "training", "data"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_damage_is_one_line_that_offers_the_step_before(tmp_path, item, damage):
    save(tmp_path, 1, 2)
    path = largest_file(tmp_path / "checkpoints/2" / item)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"flipped": content, "truncated": content[: len(content) // 2], "empty": b""}[damage])
    with pytest.raises(UserError) as caught:
        restore(tmp_path)
    message = str(caught.value)
    assert f"{path.relative_to(tmp_path / 'checkpoints/2')} was changed after it was saved" in message
    assert "step 1 is complete: --step=1 evaluates" in message and "\n" not in message
    shutil.move(tmp_path / "checkpoints/2", tmp_path / "elsewhere")  # the advice
    assert restore(tmp_path) == 1


def test_no_message_advises_to_give_up_the_only_checkpoint(tmp_path):
    save(tmp_path, 1)
    largest_file(tmp_path / "checkpoints/1/params").write_bytes(b"")
    with pytest.raises(UserError, match=r"there is no other checkpoint: put a copy of that folder back, or train in"):
        restore(tmp_path)


def test_digests_are_those_of_sha256sum(tmp_path):
    save(tmp_path, 1)
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path / "checkpoints/1", check=True)


@pytest.mark.parametrize("name", ["params/_METADATA", "params/manifest.ocdbt", "largest", "emptied"])
def test_damage_of_a_checkpoint_without_digests_is_readable(tmp_path, name):
    """As older versions saved them: they load, and what Orbax and TensorStore say is cut to one line."""
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints/1"
    (folder / "SHA256SUMS").unlink()
    shutil.rmtree(folder / "metrics")
    assert restore(tmp_path) == 1
    path = folder / name if name.startswith("params") else largest_file(folder / "params")
    path.write_bytes(b"" if name == "emptied" else path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=r"cannot read checkpoint .*; there is no other checkpoint") as caught:
        restore(tmp_path)
    message = str(caught.value)
    assert (
        "bound method" not in message
        and "tensorstore_spec" not in message
        and "\n" not in message
        and len(message) < 600
    )


DEBRIS = {
    "an empty folder": lambda path: path.mkdir(),
    "a file": lambda path: path.write_text("x"),
    "half removed": lambda path: (shutil.copytree(path.parent / "2", path), largest_file(path / "params").unlink()),
    "half removed, no digests": lambda path: shutil.copytree(
        path.parent / "2", path, ignore=shutil.ignore_patterns("SHA256SUMS", "_METADATA")
    ),
}


@pytest.mark.parametrize("make", DEBRIS.values(), ids=DEBRIS)
def test_the_newest_complete_step_is_taken_whatever_lies_about(tmp_path, caplog, make):
    save(tmp_path, 1, 2)
    make(tmp_path / "checkpoints/35")
    shutil.copytree(tmp_path / "checkpoints/2", tmp_path / "checkpoints/50.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "checkpoints/2", tmp_path / "checkpoints/60.removing")
    (tmp_path / "checkpoints/notes").mkdir()
    (tmp_path / "checkpoints/-7").write_text("")
    with caplog.at_level("WARNING"):
        assert restore(tmp_path) == 2
    (line,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert "35 (" in line and line.endswith("taken: step 2")
    save(tmp_path, 35)  # the run comes by that step
    assert restore(tmp_path) == 35
    left = names(tmp_path)
    assert (
        left[0] == "-7" and left[1:3] == ["2", "35"] and left[3].startswith("35.incomplete.") and left[4:] == ["notes"]
    )


def test_removal_that_was_cut_off_leaves_no_step(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(3, make_state(3), b'{"row": 3}')

    def killed(path, ignore_errors=False):
        if ignore_errors:  # of an earlier try: there is none
            return
        largest_file(pathlib.Path(path)).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.wait()
    monkeypatch.undo()
    assert names(tmp_path) == ["1.removing", "2", "3"]
    assert restore(tmp_path) == 3
    assert names(tmp_path) == ["2", "3"]


def test_incomplete_checkpoints_alone_are_one_line(tmp_path):
    (tmp_path / "checkpoints/35").mkdir(parents=True)
    for read in (lambda: Checkpoints(tmp_path), lambda: load_params(tmp_path, model=None)):
        with pytest.raises(
            UserError, match=r"none in .* is complete: 35 \(params/_METADATA and 4 more files missing\)"
        ):
            read()
