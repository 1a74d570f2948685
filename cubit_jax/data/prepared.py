"""Reading of prepared data: the folder of token streams that `python -m cubit_jax.prepare` writes."""

import json
import pathlib
from typing import NamedTuple

import numpy as np

from cubit_jax.data.sources import digest
from cubit_jax.runtime.errors import UserError


class Prepared(NamedTuple):
    """Token streams [n] of unsigned integers, and what their metadata says about them."""

    train: np.ndarray
    heldout: np.ndarray
    fingerprint: str
    heldout_bytes: int
    tokenizer_path: pathlib.Path
    restored: bool


def open_prepared(folder: str) -> Prepared:
    """Maps the streams into memory. UserError if a file is missing, damaged, or does not belong to the others."""
    folder = pathlib.Path(folder).expanduser()
    tokenizer_path = folder / "tokenizer.json"
    try:
        metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        streams = {name: np.memmap(folder / f"{name}.bin", metadata["dtype"], "r") for name in ("train", "heldout")}
        for name, stream in streams.items():
            if len(stream) != metadata[name]["tokens"]:
                raise UserError(
                    f"{folder / name}.bin holds {len(stream)} tokens, its metadata says "
                    f"{metadata[name]['tokens']}: prepare the data again"
                )
        if digest(tokenizer_path.read_text(encoding="utf-8")) != metadata["tokenizer"]:
            raise UserError(f"{tokenizer_path} is not the tokenizer that the data was prepared with")
        fingerprint = digest([metadata["corpus"], metadata["tokenizer"]])
        return Prepared(
            **streams,
            fingerprint=fingerprint,
            heldout_bytes=metadata["heldout"]["bytes"],
            tokenizer_path=tokenizer_path,
            restored=metadata.get("restored", True),  # data prepared by earlier versions do not say
        )
    except FileNotFoundError as error:
        raise UserError(
            f"no prepared data at {folder}: {error.filename} is missing; python -m cubit_jax.prepare makes it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the prepared data at {folder}: {error!r}") from error
