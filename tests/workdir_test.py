"""A folder belongs to one run: another config is refused with the fields that differ, and nothing is changed."""

import pathlib

import pytest

from cubit_jax import workdir
from cubit_jax.cli import UserError


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
    for name in workdir.MAY_CHANGE:
        assert name in config.to_dict() or name.split(".")[1] in config[name.split(".")[0]], name
    config.update_from_flattened_dict({
        "num_steps": 99, "accumulation_steps": 2, "log_every": 3, "keep_checkpoints": 7, "mesh.fsdp": 2,
        "model.remat": "dots", "data.num_workers": 1})
    workdir.check_config(tmp_path, config)


def test_another_config_is_refused_with_every_field_that_differs(micro_config, tmp_path):
    workdir.write_config(tmp_path, micro_config("cubit"))
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
    (tmp_path / "config.json").write_text('{"seed": ')
    with pytest.raises(UserError, match="cannot read"):
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
    workdir.write_corpus(tmp_path, {"documents": "a", "tokenizer": "b"})
    workdir.check_corpus(tmp_path, {"documents": "a", "tokenizer": "b"})
    with pytest.raises(UserError, match="the documents changed since the run in"):
        workdir.check_corpus(tmp_path, {"documents": "c"})
    with pytest.raises(UserError, match="the tokenizer changed since the run in"):
        workdir.check_corpus(tmp_path, {"documents": "a", "tokenizer": "c"})
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(UserError, match="cannot read"):
        workdir.read_corpus(tmp_path)
