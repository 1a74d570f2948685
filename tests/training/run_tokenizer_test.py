"""The tokenizer of a run: its own copy, another run's with its parameters, and one that loses text."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from cubit_jax import evaluate
from cubit_jax.data.tokenizer import load_tokenizer
from cubit_jax.data.tokenizer_training import train_tokenizer
from cubit_jax.prepare import prepare
from cubit_jax.runtime.errors import UserError
from cubit_jax.train import train
from cubit_jax.training import workdir
from cubit_jax.training.run import open_run
from cubit_jax.training.trained import open_own_tokenizer


def _config(micro_config, corpus, **fields):
    data = {"data.source": "files", "data.path": str(corpus / "*.txt"), "data.heldout_fraction": 0.2}
    return micro_config("transformer", **data | {"num_steps": 1, "eval_every": 1} | fields)


def _write_run(folder, config, tokenizer):
    """What the start of a run leaves in its folder."""
    workdir.write_config(folder, config)
    workdir.write_corpus(folder, {"documents": "", "tokenizer": tokenizer.digest})


def test_a_run_that_begins_with_other_parameters_has_their_tokenizer(tmp_path, micro_config, corpus):
    theirs = train_tokenizer(["quite other words " * 9], 290)
    _write_run(tmp_path / "a", _config(micro_config, corpus), theirs)
    theirs.save(tmp_path / "a" / "tokenizer.json")
    config = _config(micro_config, corpus, init_from=str(tmp_path / "a"))
    with open_run(config, str(tmp_path / "b")) as run:
        assert run.tokenizer.digest == theirs.digest
    prepare(tmp_path / "other", path=str(corpus / "*.txt"), vocab_size=280)
    config.data.update(source="prepared", path=str(tmp_path / "other"))
    with pytest.raises(UserError, match="is not that of the parameters in init_from"), open_run(config, tmp_path / "c"):
        pass


def test_the_own_copy_is_that_of_the_run(tmp_path, micro_config, corpus):
    given, other = train_tokenizer(["given words"], 270), train_tokenizer(["a"], 257)
    given.save(tmp_path / "given.json")
    _write_run(tmp_path / "a", _config(micro_config, corpus, **{"data.tokenizer": str(tmp_path / "given.json")}), given)
    assert open_own_tokenizer(tmp_path / "a").digest == given.digest  # a run of an earlier version has no copy
    other.save(tmp_path / "a" / "tokenizer.json")
    assert open_own_tokenizer(tmp_path / "a").digest == given.digest  # left by a start that came to nothing
    given.save(tmp_path / "a" / "tokenizer.json")
    (tmp_path / "given.json").unlink()
    assert open_own_tokenizer(tmp_path / "a").digest == given.digest


def test_a_moved_run_whose_tokenizer_loses_text_evaluates_without_bits_per_byte(tmp_path, micro_config, corpus, capsys):
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "the": 2, "cat": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "given.json"))
    train(_config(micro_config, corpus, **{"data.tokenizer": str(tmp_path / "given.json")}), str(tmp_path / "run"))
    output = capsys.readouterr().out
    assert "no bits per byte: the tokenizer does not give the text back exactly" in output
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "eval/loss" in written[-1] and "eval/bits_per_byte" not in written[-1]
    digest = load_tokenizer(tmp_path / "given.json").digest
    (tmp_path / "given.json").unlink()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert load_tokenizer(moved / "tokenizer.json").digest == digest
    result, step = evaluate.evaluate(str(moved))
    assert (step, result.bits_per_byte) == (1, None)
    assert result.loss == pytest.approx(written[-1]["eval/loss"], rel=1e-5)
