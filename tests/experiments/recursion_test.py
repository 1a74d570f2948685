"""Loss and energies of one checkpoint at other numbers of recursions."""

from types import SimpleNamespace

import jax
import pytest

from configs import cem
from cubit_jax import data, evaluate
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import workdir
from cubit_jax.training.checkpoint import Checkpoints
from cubit_jax.training.step import init_state
from experiments import recursion


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder as train leaves it, with the parameters of step 0."""
    folder = tmp_path_factory.mktemp("run")
    for name in range(20):
        (folder / f"{name}.txt").write_text(f"document {name} says hello {name * 7} times\n" * 3)
    config = cem.get_config("tiny,steps=2")
    config.data.update({"source": "files", "path": str(folder / "*.txt"), "heldout_fraction": 0.3})
    config.model.update(
        {"vocab_size": 300, "num_layers": 1, "model_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16}
    )
    config.seq_len = 32
    workdir.write_config(folder, config)
    data.open_tokenizer(config.data, data.open_corpus(config.data, folder), folder, config.model.vocab_size)
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, jax.jit(lambda: init_state(LanguageModel(ModelConfig.from_config(config)), config))(), b"{}")
    checkpoints.close()
    return folder


@pytest.mark.full
def test_loss_and_energies_against_recursions(run, tmp_path):
    results, step, trained_with = recursion.measure(run, [0, 1, 2], energy_rows=2)
    assert (step, trained_with) == (3, 2)
    assert results[2]["loss"] == pytest.approx(evaluate.evaluate(run)[0].loss, rel=1e-6)
    assert len({r["loss"] for r in results.values()}) == 3
    assert results[0]["energy_after"] == results[0]["energy_before"]
    assert results[2]["energy_after"] < results[1]["energy_after"] < results[0]["energy_after"]
    recursion.plot(results, 2, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_run_without_recursion_is_refused_before_anything_is_printed(monkeypatch, capsys):
    config = SimpleNamespace(mixers=("cubit", "attention"), mlp="gated")
    trained = SimpleNamespace(model=SimpleNamespace(config=config))
    monkeypatch.setattr(recursion, "load_run", lambda folder: trained)
    with pytest.raises(UserError, match=r"mixers cubit, attention, mlp gated\) have no recursion; give a run of"):
        recursion.measure("runs/cubit", [1, 2], energy_rows=2)
    assert capsys.readouterr().out == ""
