"""What evaluate and generate do with the folder of a run, and what they say where something is missing in it."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base, cubit
from cubit_jax import data, evaluate
from cubit_jax.inference.evaluation import heldout_loss
from cubit_jax.inference.generation import generate_text
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import workdir
from cubit_jax.training.checkpoint import Checkpoints
from cubit_jax.training.step import init_state
from cubit_jax.training.trained import load_run

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {"vocab_size": 300, "num_layers": 1, "model_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16}


def write_run(folder, config, step=3):
    """A run's folder as train leaves it, with the parameters of step 0."""
    (folder / "text").mkdir(parents=True)
    for name in range(30):
        (folder / "text" / f"{name}.txt").write_text(f"document {name} says hello {name * 7} times\n" * (1 + name % 4))
    config.data.update({"source": "files", "path": str(folder / "text/*.txt"), "heldout_fraction": 0.3})
    config.model.update(SMALL)
    config.seq_len = 32
    workdir.write_config(folder, config)
    corpus = data.open_corpus(config.data, folder)
    tokenizer = data.open_tokenizer(config.data, corpus, folder, config.model.vocab_size)
    model = LanguageModel(ModelConfig.from_config(config))
    state = jax.jit(lambda: init_state(model, config))()
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, state, b"{}", {"eval/loss": 6.0})
    checkpoints.close()
    return config, corpus, tokenizer, model, state["params"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "cubit"
    return folder, *write_run(folder, cubit.get_config("tiny"))


def test_evaluate_counts_every_held_out_target(run):
    folder, config, corpus, tokenizer, model, params = run
    result, step = evaluate.evaluate(folder)
    assert step == 3
    assert result.tokens == sum(1 + len(tokenizer.encode(text)) for text in corpus.heldout)
    batches = data.heldout_batches(corpus.heldout, tokenizer, seq_len=config.seq_len, batch_size=5)
    alone = heldout_loss(model, params, batches, corpus.heldout_bytes)
    assert (result.loss, result.bits_per_byte) == pytest.approx((alone.loss, alone.bits_per_byte), rel=1e-5)


def test_parameters_are_those_of_the_checkpoint_on_the_mesh_of_the_run(run):
    folder, *_, params = run
    trained = load_run(folder)
    jax.tree.map(np.testing.assert_array_equal, trained.params, params)
    assert trained.mesh.shape["data"] == jax.device_count()


def test_a_mesh_for_other_devices_is_replaced(tmp_path):
    config = cubit.get_config("tiny")
    config.mesh.update({"data": 1, "fsdp": 64})
    write_run(tmp_path / "run", config)
    assert load_run(tmp_path / "run").mesh.shape["fsdp"] == jax.device_count()


def test_other_text_is_evaluated(run, tmp_path):
    (tmp_path / "a.txt").write_text("some text é\n")
    (tmp_path / "b.txt").write_text("and more\n" * 30)
    (tmp_path / "empty.jsonl").write_text("")
    result, _ = evaluate.evaluate(run[0], text=f"{tmp_path}/*.txt")
    tokenizer = load_run(run[0]).tokenizer
    texts = [(tmp_path / name).read_text() for name in ("a.txt", "b.txt")]
    assert result.tokens == sum(len(tokenizer.encode(text)) + 1 for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert result.bits_per_byte == pytest.approx(result.loss * result.tokens / np.log(2) / size)
    with pytest.raises(UserError, match=r"there is no text in .*empty\.jsonl"):
        evaluate.evaluate(run[0], text=f"{tmp_path}/empty.jsonl")


def test_other_number_of_recursions(run, tmp_path):
    with pytest.raises(UserError, match=r"num_recursions=2: no layer of this model \(cubit, gated\) has this option"):
        evaluate.evaluate(run[0], num_recursions=2)
    config = base.get_config("tiny")
    config.model.mixers = ("cem",)
    write_run(tmp_path / "cem", config)
    trained, step = evaluate.evaluate(tmp_path / "cem")
    identity, _ = evaluate.evaluate(tmp_path / "cem", num_recursions=0)
    assert step == 3
    assert trained.loss != identity.loss


def test_a_checkpoint_is_chosen_by_number_and_by_loss(run, tmp_path):
    folder, *_, params = run
    shutil.copytree(folder, tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run", keep=5)
    for step, loss in ((4, 1.5), (5, 2.5)):
        scaled = jax.tree.map(lambda leaf, step=step: leaf * step, params)
        checkpoints.save(step, {"params": scaled, "step": jnp.int32(step)}, b"{}", {"eval/loss": loss})
    checkpoints.close()
    for wanted, step in (("latest", 5), ("best", 4), ("4", 4), (3, 3)):
        loaded = load_run(tmp_path / "run", wanted)
        assert loaded.step == step
        scale = 1 if step == 3 else step
        np.testing.assert_array_equal(loaded.params["embed"]["embedding"], params["embed"]["embedding"] * scale)
    steps = r"the steps are 3 \(held-out loss 6\.0000\), 4 \(held-out loss 1\.5000\), 5 \(held-out loss 2\.5000\)$"
    with pytest.raises(UserError, match=f"no complete checkpoint of step 7; {steps}"):
        evaluate.evaluate(tmp_path / "run", step=7)


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_parameter(run, tmp_path):
    folder, *_, params = run
    shutil.copytree(folder, tmp_path / "run")
    bad = params | {"lm_head": {"kernel": params["lm_head"]["kernel"].at[5, 3].set(np.nan)}}
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(4, {"params": bad, "step": jnp.int32(4)}, b"{}")
    checkpoints.close()
    message = r"the loss at step 4 is nan: parameter lm_head/kernel is not finite; evaluate an earlier checkpoint"
    with pytest.raises(UserError, match=message):
        evaluate.evaluate(tmp_path / "run")


@pytest.mark.full
def test_the_page_on_loading_a_run_works_as_it_stands(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/cubit_tiny").symlink_to(run[0])
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/load_a_run.md").read_text(), flags=re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 3 and names["logits"].shape == (1, names["tokens"].shape[1], 300)
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("3 ")


def program(name, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"cubit_jax.{name}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_generate_prints_what_the_library_generates(run, tmp_path):
    folder, _, _, tokenizer, model, params = run
    """The line ends of a prompt's file as they are; what the terminal's encoding has not, replaced."""
    prompts = ["document é 語", "says hello 7\r\ntimes"]
    (tmp_path / "prompt.txt").write_bytes(prompts[1].encode())
    result = subprocess.run(
        [
            *(sys.executable, "-m", "cubit_jax.generate", f"--workdir={folder}", f"--prompt={prompts[0]}"),
            *(f"--prompt_file={tmp_path}/prompt.txt", "--max_new_tokens=5", "--temperature=0", "--step=best"),
        ],
        cwd=ROOT,
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert result.returncode == 0, result.stderr
    texts = generate_text(model, params, tokenizer, prompts, max_new_tokens=5)
    expected = "".join(f"--- prompt {i + 1}, sample 1\n{prompts[i]}{texts[i]}\n" for i in range(2))
    assert result.stdout == expected.encode("ascii", "replace")


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("generate", ["--workdir={run}"], "error: there is no prompt: give --prompt=TEXT or --prompt_file=FILE"),
        ("evaluate", ["--workdir={run}/nowhere"], "error: no run in .*nowhere: config.json is missing"),
    ],
)
def test_mistakes_are_one_line(run, name, arguments, message):
    result = program(name, *(argument.format(run=run[0]) for argument in arguments))
    assert result.returncode == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert re.match(message, result.stderr), result.stderr


def test_no_checkpoint(tmp_path, run):
    folder = tmp_path / "run"
    workdir.write_config(folder, run[1])
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*No such file"):
        load_run(folder)
    (folder / "tokenizer.json").write_text((run[0] / "tokenizer.json").read_text())
    with pytest.raises(UserError, match="no checkpoint in"):
        load_run(folder)


def test_config_of_another_model_lists_the_differences(tmp_path, run):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").symlink_to(run[0] / "checkpoints")
    (folder / "tokenizer.json").write_text((run[0] / "tokenizer.json").read_text())
    config = json.loads((run[0] / "config.json").read_text())
    config["model"]["mlp_dim"] = 24
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"is of another model: .*up_proj/kernel"):
        load_run(folder)
