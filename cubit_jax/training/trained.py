"""A trained run, opened to be used: config, model, parameters of a checkpoint, tokenizer, mesh."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from ml_collections import ConfigDict

from cubit_jax import partitioning
from cubit_jax.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from cubit_jax.inference.generation import generate_text
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.model_config import partition_rules
from cubit_jax.runtime.errors import UserError
from cubit_jax.training import workdir
from cubit_jax.training.checkpoint import load_params


@dataclasses.dataclass(frozen=True)
class Trained:
    """The parameters of a checkpoint of a run and what they are used with.

    Attributes:
      config: the run's config. model: LanguageModel of it.
      params: the parameters, on `mesh`. step: of the checkpoint.
      tokenizer: of the run, with encode(str) -> ids and decode(ids) -> str.
      mesh: devices; computations with `params` stand under `jax.set_mesh(mesh)`.
    """

    config: ConfigDict
    model: LanguageModel
    params: Any
    step: int
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh

    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[str]:
        """Continuations of the prompts: `inference.generation.generate_text` with its keyword arguments."""
        with jax.set_mesh(self.mesh):
            return generate_text(self.model, self.params, self.tokenizer, prompts, **sampling)


def load_run(folder: str | pathlib.Path, step: int | str = "latest", **options: Any) -> Trained:
    """The run in `folder` as of a checkpoint, its parameters spread over this process's devices.

    Args:
      folder: the workdir of train.
      step: a step's number, "latest", or "best": the one with the lowest held-out loss.
      options: changes to the model's options that leave its parameters as they are (num_recursions).

    Raises:
      UserError: no run, no checkpoint, no tokenizer, or one that does not fit; options the model does not have.
    """
    config = workdir.read_config(folder)
    try:
        model_config = ModelConfig.from_config(config)
        model_config = dataclasses.replace(model_config, options={**model_config.options, **options})
        mesh = _mesh(config, model_config)
    except ValueError as error:
        raise UserError(error) from error
    tokenizer = open_own_tokenizer(folder)
    model = LanguageModel(dataclasses.replace(model_config, num_ids=tokenizer.vocab_size))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    shardings = partitioning.state_shardings(mesh, {"params": shapes}, partition_rules(model_config))["params"]
    params, step = load_params(folder, model, shardings, step)
    return Trained(config, model, params, step, tokenizer, mesh)


def open_own_tokenizer(folder: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of the run in `folder`: its own copy, or in runs of earlier versions the file that it was given.

    Raises:
      UserError: there is no run, no tokenizer, or another than the run was trained with.
    """
    config = workdir.read_config(folder)
    own, given = pathlib.Path(folder, "tokenizer.json"), config.data.tokenizer
    if config.data.source == "prepared":
        given = pathlib.Path(config.data.path, "tokenizer.json")
    path = own if own.exists() or not given else given
    tokenizer = load_tokenizer(path)
    if given and path == own and tokenizer.digest != (workdir.read_corpus(folder) or {}).get("tokenizer"):
        path, tokenizer = given, load_tokenizer(given)  # the other was left by a start that came to nothing
    check_vocabulary(tokenizer, config.model.vocab_size, origin=f"tokenizer {path}")
    workdir.check_corpus(folder, {"tokenizer": tokenizer.digest})
    return tokenizer


def _mesh(config: ConfigDict, model_config: ModelConfig) -> jax.sharding.Mesh:
    """The run's own mesh where it fits the devices here, else parameters split over all of them, else whole on each."""
    for sizes in (config.mesh, {"fsdp": -1}):
        try:
            mesh = partitioning.make_mesh(sizes)
            partitioning.check(mesh, batch_size=mesh.size, accumulation_steps=1, model=model_config)
            return mesh
        except ValueError as error:
            logging.info("mesh %s does not fit here: %s", dict(sizes), error)
    return partitioning.make_mesh({"data": -1})
