"""A run before its first step: config, folder, devices and data, opened and checked in this order."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from cubit_jax import data, partitioning
from cubit_jax.data.tokenizer import Tokenizer
from cubit_jax.inference.evaluation import heldout_loss
from cubit_jax.model import LanguageModel, ModelConfig
from cubit_jax.runtime import distributed
from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.lock import lock
from cubit_jax.training import config_check, workdir
from cubit_jax.training import step as train_step
from cubit_jax.training.checkpoint import Checkpoints, load_params
from cubit_jax.training.trained import open_own_tokenizer


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run is made of. Its arrays live on `mesh`, which is to be set (`jax.set_mesh`) where they are used."""

    config: ConfigDict
    folder: str
    model_config: ModelConfig
    mesh: jax.sharding.Mesh
    corpus: data.Corpus
    tokenizer: Tokenizer

    @functools.cached_property
    def model(self) -> LanguageModel:
        return LanguageModel(self.model_config)

    @property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Of a batch's arrays [B, L]."""
        return partitioning.batch_sharding(self.mesh)

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows of a batch -> the global batch on the devices."""
        return partitioning.put_batch(self.mesh, batch)

    def initial_state(self, checkpoints: Checkpoints) -> tuple[dict, dict, bytes | None]:
        """(state, its shardings, position in the data or None): from the last checkpoint, or new.

        A new state begins with the parameters of the run `config.init_from`, where one is named.
        """
        shapes, shardings = train_step.state_shapes(self.model, self.config, self.mesh)
        if checkpoints.latest_step is not None:
            state, position = checkpoints.restore(shapes)
            return state, shardings, position
        params = {}
        if self.config.init_from:
            params = {"params": load_params(self.config.init_from, self.model, shardings["params"])[0]}
        return train_step.make_state(self.model, self.config, shardings) | params, shardings, None

    def train_batches(self) -> Any:
        """This process's rows of the training batches: see `data.train_batches`."""
        process_index, process_count = partitioning.process_share(self.mesh)
        return data.train_batches(
            self.corpus.train,
            self.tokenizer,
            seq_len=self.config.seq_len,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            num_workers=self.config.data.num_workers,
            process_index=process_index,
            process_count=process_count,
        )

    @functools.cached_property
    def _heldout_batches(self):
        process_index, process_count = partitioning.process_share(self.mesh)
        return data.heldout_batches(
            self.corpus.heldout,
            self.tokenizer,
            seq_len=self.config.seq_len,
            batch_size=self.config.batch_size // self.config.accumulation_steps,  # what a training step fits in memory
            process_index=process_index,
            process_count=process_count,
        )

    def evaluate(self, params: Any) -> dict[str, float]:
        """{"eval/loss" in nats per token, "eval/bits_per_byte" if the tokenizer loses no text} of the held-out part."""
        result = heldout_loss(self.model, params, map(self.put, self._heldout_batches), self.corpus.scored_bytes)
        bits = {} if result.bits_per_byte is None else {"eval/bits_per_byte": result.bits_per_byte}
        return {"eval/loss": result.loss} | bits


@contextlib.contextmanager
def open_run(config: ConfigDict, folder: str) -> Iterator[Run]:
    """Opens the run of `config` in `folder`, which no other trainer can use until the block ends.

    Raises:
      UserError: the config, the devices, the folder or the data do not fit. Nothing of an earlier run is touched then.
    """
    config = workdir.with_absolute_paths(config)
    try:
        model_config = config_check.check_values(config)  # first: NaN is not equal to itself
        workdir.check_processes(config)
        mesh = config_check.make_mesh(config, model_config)
        partitioning.process_share(mesh)
    except ValueError as error:
        raise UserError(error) from error
    workdir.check_config(folder, config)
    with lock(folder):
        workdir.check_config(folder, config)  # a trainer that has just left may have begun another run
        corpus, tokenizer = distributed.in_turn(lambda: _open_data(config, folder), "data")
        distributed.agree(corpus.fingerprint, "documents")
        distributed.agree(tokenizer.digest, "tokenizer")
        model_config = dataclasses.replace(model_config, num_ids=tokenizer.vocab_size)
        yield Run(config, folder, model_config, mesh, corpus, tokenizer)


def _open_data(config, folder):
    corpus = data.open_corpus(config.data, folder)
    workdir.check_corpus(folder, {"documents": corpus.fingerprint})
    begun = workdir.has_begun(folder)
    inherited = open_own_tokenizer(config.init_from) if config.init_from and not begun else None
    tokenizer = data.open_tokenizer(
        config.data, corpus, folder, config.model.vocab_size, reuse=begun, inherited=inherited
    )
    workdir.check_corpus(folder, {"tokenizer": tokenizer.digest})
    return data.check_restored(corpus, tokenizer), tokenizer
