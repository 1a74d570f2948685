"""The code of the pages on one's own mixer and energy runs: files, lines and commands as the pages have them."""

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from cubit_jax import evaluate, train
from cubit_jax.inference import generation
from cubit_jax.layers import MIXERS, MLPS
from cubit_jax.model import LanguageModel, ModelConfig, init_cache
from cubit_jax.training.trained import load_run

ROOT = pathlib.Path(__file__).parents[2]
MIXER_PAGE, ENERGY_PAGE = ROOT / "docs/write_your_own_mixer.md", ROOT / "docs/write_your_own_energy.md"
MICRO = {
    "num_steps": 3,
    "seq_len": 32,
    "batch_size": 8,
    "model.vocab_size": 300,
    "model.num_layers": 2,
    "model.model_dim": 16,
    "model.num_heads": 2,
    "model.head_dim": 8,
    "model.mlp_dim": 32,
    "optimizer.warmup_steps": 1,
    "data.source": "files",
    "data.heldout_fraction": 0.2,
}


def blocks(page, label):
    """[(what stands after the label, code)] of the code blocks under <!-- label: ... -->, in order."""
    found = re.findall(rf"<!-- {label}:? ?(\S*) ?-->\n```\w+\n(.*?)```", page.read_text(), flags=re.S)
    assert found, f"{page.name} has no block of {label}"
    return found


def load(page, monkeypatch, tmp_path):
    """{file name without its ending: module} of the page's files, importable under their names."""
    modules = {}
    for path, code in blocks(page, "file"):
        file = tmp_path / pathlib.Path(path).name
        file.write_text(code)
        name = path.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, file)
        modules[file.stem] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, modules[file.stem])
        spec.loader.exec_module(modules[file.stem])
    return modules


def test_mixer_of_the_page_trains_and_evaluates_without_a_cache(
    monkeypatch, tmp_path, micro_config, corpus, capfd, last_state
):
    module = load(MIXER_PAGE, monkeypatch, tmp_path)["moving_average"]
    monkeypatch.setitem(MIXERS, "moving_average", module.MovingAverage)
    fields = MICRO | {
        "model.mixers": ("moving_average",),
        "data.path": f"{corpus}/*.txt",
        "mesh.data": 2,
        "mesh.tensor": 2,
        "mesh.fsdp": 2,
    }
    config = micro_config("transformer", **fields)
    config.model.options.half_life = 4.0
    train.train(config, tmp_path / "run")
    printed = capfd.readouterr().out
    assert "sample      none: a mixer of this model keeps no cache" in printed
    assert "cubit_jax.evaluate" in printed and "cubit_jax.generate" not in printed
    decay = last_state(config, tmp_path / "run")["params"]["layers"]["block_0"]["mixer"]["decay"]
    assert decay.shape == (2, 2) and jnp.allclose(jax.nn.sigmoid(decay), 2 ** (-1 / 4), atol=0.02)
    result, step = evaluate.evaluate(tmp_path / "run")
    assert step == 3 and 0 < result.loss < 10
    with pytest.raises(NotImplementedError, match="'moving_average' keeps no cache"):
        generation.generate_text(
            LanguageModel(ModelConfig.from_config(config)),
            {},
            load_run(tmp_path / "run").tokenizer,
            ["a"],
            max_new_tokens=1,
        )


def test_mixer_of_the_page_decodes_and_sees_no_other_document(monkeypatch, tmp_path, error):
    modules = load(MIXER_PAGE, monkeypatch, tmp_path)
    monkeypatch.setitem(MIXERS, "plain", modules["moving_average"].MovingAverage)
    monkeypatch.setitem(MIXERS, "cached", modules["cached_moving_average"].CachedMovingAverage)
    size = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16, "seq_len": 12}
    plain, cached = (ModelConfig(vocab_size=31, mixers=(name,), **size) for name in ("plain", "cached"))
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 31)
    params = jax.jit(LanguageModel(plain).init)(jax.random.key(0), tokens)
    assert not LanguageModel(plain).can_decode and LanguageModel(cached).can_decode
    prompt = (jnp.arange(8) < jnp.array([[5], [8]])).astype(jnp.int32)

    @jax.jit
    def run(params, cache):
        full = LanguageModel(plain).apply(params, tokens)
        model = LanguageModel(cached)
        first, cache = model.apply(params, tokens[:, :8], segment_ids=prompt, cache=cache, prefill=True)
        following = jnp.take_along_axis(tokens, prompt.sum(1)[:, None] + jnp.arange(4), axis=1)
        rest, _ = model.apply(params, following, cache=cache)
        other = LanguageModel(plain).apply(
            params, jnp.roll(tokens, 1, 0), positions=jnp.tile(jnp.arange(6), 2)[None].repeat(2, 0)
        )
        alone = LanguageModel(plain).apply(params, jnp.roll(tokens, 1, 0)[:, 6:])
        return full, first, rest, other, alone

    full, first, rest, other, alone = run(params, init_cache(cached, 2, 12))
    for row, length in enumerate((5, 8)):
        assert error(first[row, :length], full[row, :length]) < 1e-5
        assert error(rest[row], full[row, length : length + 4]) < 1e-5
    assert error(other[:, 6:], alone) < 1e-5


@pytest.mark.full
def test_energy_of_the_page_is_checked_and_trains(monkeypatch, tmp_path, micro_config, corpus):
    modules = load(ENERGY_PAGE, monkeypatch, tmp_path)
    monkeypatch.setitem(MLPS, "memory", modules["memory_mlp"].MemoryMLP)
    ours, layers = modules["memory_energy"].energy, modules["memory_mlp"].energy
    x, h, patterns = jax.random.normal(jax.random.key(0), (3, 1, 4, 4))
    assert jnp.array_equal(ours(x, h, patterns[0]), layers(x, h, patterns[0]))
    config = micro_config("transformer", **MICRO, **{"model.mlp": "memory", "data.path": f"{corpus}/*.txt"})
    config.model.options.num_recursions = 2
    train.train(config, tmp_path / "run")
    losses = [evaluate.evaluate(tmp_path / "run", number)[0].loss for number in (2, 4)]
    assert 0 < losses[0] < 10 and losses[0] != losses[1]


def checkout(tmp_path):
    """A copy of what the repository holds."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.split("\n") if listed.returncode == 0 else []
    for name in filter(lambda name: name and (ROOT / name).is_file(), files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    if not files:
        shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "runs", "build"))


def follow(page, folder, extra):
    """Does what the page says in a checkout: writes its files, changes lines, runs its commands."""
    for path, code in blocks(page, "file"):
        (folder / path).write_text(code)
    for path, diff in blocks(page, "diff"):
        before = (folder / path).read_text()
        imports, mark, entry = diff.removesuffix("\n").split("\n")
        assert (imports[0], mark[0], entry[0]) == ("+", " ", "+") and before.count(mark[1:] + "\n") == 1
        after = before.replace(mark[1:] + "\n", f"{mark[1:]}\n{entry[1:]}\n")
        (folder / path).write_text(after.replace("\n\nMIXERS", f"\n{imports[1:]}\n\nMIXERS"))
    for _, commands in blocks(page, "run"):
        for command in commands.splitlines():
            program, *arguments = command.removeprefix("python ").split(" ")
            more = extra if "cubit_jax.train" in command else []
            line = [sys.executable, program, *arguments, *more]
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            yield done.stdout


@pytest.mark.full
@pytest.mark.parametrize("page", [MIXER_PAGE, ENERGY_PAGE], ids=lambda page: page.stem)
def test_a_person_follows_the_page_in_a_fresh_checkout(page, tmp_path, corpus):
    checkout(tmp_path)
    micro = [f"--config.{name}={value}" for name, value in (MICRO | {"data.path": f"{corpus}/*.txt"}).items()]
    *_, trained, evaluated = follow(page, tmp_path, micro)
    assert "done        3 steps" in trained and "held-out" in evaluated
