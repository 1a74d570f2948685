"""A folder belongs to one run: another config is refused with the fields that differ, and nothing is changed."""

import pathlib

import pytest

from cubit_jax.runtime.errors import UserError
from cubit_jax.training import workdir


def begin(folder):
    """A run counts once it has a checkpoint."""
    (folder / "checkpoints" / "5").mkdir(parents=True)


def test_config_comes_back_and_fits_itself(micro_config, tmp_path):
    config = micro_config("cubit")
    workdir.check_config(tmp_path / "new", config)
    assert not (tmp_path / "new").exists()
    workdir.write_config(tmp_path / "new", config)
    workdir.check_config(tmp_path / "new", config)
    assert workdir.read_config(tmp_path / "new").to_json() == config.to_json()


def test_fields_of_cost_and_reporting_may_change(micro_config, tmp_path):
    config = micro_config("cubit")
    workdir.write_config(tmp_path, config)
    workdir.write_corpus(tmp_path, {})
    begin(tmp_path)
    for name in workdir.MAY_CHANGE:
        assert name in config.to_dict() or name.split(".")[1] in config[name.split(".")[0]], name
    config.update_from_flattened_dict(
        {
            "num_steps": 99,
            "accumulation_steps": 2,
            "log_every": 3,
            "keep_checkpoints": 7,
            "mesh.fsdp": 2,
            "model.remat": "dots",
            "data.num_workers": 1,
        }
    )
    workdir.check_config(tmp_path, config)


def test_another_config_is_refused_with_every_field_that_differs(micro_config, tmp_path):
    workdir.write_config(tmp_path, micro_config("cubit"))
    workdir.check_config(tmp_path, micro_config("transformer"))  # nothing is lost
    begin(tmp_path)
    workdir.write_corpus(tmp_path, {})
    before = (tmp_path / "config.json").read_text()
    other = micro_config("transformer", **{"model.num_layers": 4, "optimizer.learning_rate": 0.5, "num_steps": 7})
    with pytest.raises(UserError) as caught:
        workdir.check_config(tmp_path, other)
    message = str(caught.value)
    assert "model.num_layers (2 there, 4 here)" in message
    assert "model.mixers (['cubit'] there, ['attention'] here)" in message
    assert "optimizer.learning_rate" in message and "model.options.lrr" in message
    assert "num_steps" not in message and "model.model_dim" not in message
    assert (tmp_path / "config.json").read_text() == before


def test_folders_that_cannot_be_used_are_one_line(micro_config, tmp_path):
    with pytest.raises(UserError, match=r"no run in .*config\.json is missing"):
        workdir.read_config(tmp_path)
    begin(tmp_path)
    with pytest.raises(UserError, match=r"has checkpoints but no corpus\.json"):
        workdir.check_config(tmp_path, micro_config())
    workdir.write_corpus(tmp_path, {})
    with pytest.raises(UserError, match=r"has checkpoints but no config\.json"):
        workdir.check_config(tmp_path, micro_config())
    advice = "; put a copy back, or start the same train command in another --workdir"
    for damaged, words in (('{"seed": ', "cannot read"), ("[]", "cannot read"), ("{}", "is not the config of a run")):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(UserError, match=f"{words}.*{advice}"):
            workdir.check_config(tmp_path, micro_config())
    workdir.write_config(tmp_path / "another", micro_config())  # what the advice comes to
    (tmp_path / "config.json").write_bytes((tmp_path / "another/config.json").read_bytes())
    workdir.check_config(tmp_path, micro_config())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        workdir.write_config(tmp_path / "file", micro_config())


def test_a_run_may_go_on_from_another_folder(micro_config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = micro_config("cubit", **{"data.source": "files", "data.path": "texts/*.txt", "init_from": "~/run"})
    absolute = workdir.with_absolute_paths(config)
    assert absolute.data.path == f"{tmp_path}/texts/*.txt"
    assert absolute.init_from == f"{pathlib.Path.home()}/run"
    assert absolute.data.heldout_path is None
    assert config.data.path == "texts/*.txt"


def test_what_a_run_learns_from_stays_the_same(tmp_path):
    assert workdir.read_corpus(tmp_path) is None
    workdir.check_corpus(tmp_path, {"documents": "a"})
    begin(tmp_path)
    workdir.write_corpus(tmp_path, {"documents": "a", "tokenizer": "b"})
    workdir.check_corpus(tmp_path, {"documents": "a", "tokenizer": "b"})
    with pytest.raises(UserError, match="the documents changed since the run in"):
        workdir.check_corpus(tmp_path, {"documents": "c"})
    with pytest.raises(UserError, match="the tokenizer changed since the run in"):
        workdir.check_corpus(tmp_path, {"documents": "a", "tokenizer": "c"})
    for damaged in ("{", "", "5"):
        (tmp_path / "corpus.json").write_text(damaged)
        with pytest.raises(UserError, match="cannot read"):
            workdir.read_corpus(tmp_path)


def test_marker_of_a_stop_is_read_once(tmp_path):
    assert workdir.read_preempted(tmp_path) is None
    workdir.mark_preempted(tmp_path, 7, "SIGTERM")
    marker = workdir.read_preempted(tmp_path)
    assert (marker["step"], marker["signal"]) == (7, "SIGTERM") and marker["time"]
    workdir.clear_preempted(tmp_path)
    workdir.clear_preempted(tmp_path)
    assert workdir.read_preempted(tmp_path) is None


def test_processes_with_different_configs(micro_config, monkeypatch):
    first = micro_config(**{"num_steps": 7, "mesh.fsdp": 2}).to_json()
    monkeypatch.setattr(workdir.distributed, "from_first", lambda value, name: first)
    workdir.check_processes(micro_config(**{"num_steps": 7, "mesh.fsdp": 2}))
    with pytest.raises(UserError, match=r"0 there: mesh.fsdp \(2 there, 1 here\), num_steps \(7 there, 20 here\)$"):
        workdir.check_processes(micro_config())
