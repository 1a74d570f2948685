"""Flags that take lists or name files to write, checked before the work: one-line errors that name what is known."""

import pathlib
from collections.abc import Collection, Sequence

from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.names import nearest


def known(flag: str, values: Sequence[str], names: Collection[str]) -> list[str]:
    """`values`, each once, if all are among `names`; else a UserError with the nearest."""
    if not values:
        raise UserError(f"--{flag} is empty: choose of {', '.join(names)}")
    for value in values:
        if value not in names:
            close = nearest(value, names)
            raise UserError(
                f"unknown --{flag}={value}: " + (f"did you mean {close}?" if close else f"choose of {', '.join(names)}")
            )
    return list(dict.fromkeys(values))


def integers(flag: str, values: Sequence[str], lowest: int = 1) -> list[int]:
    """`values`, decimal numbers of at least `lowest`, sorted and each once; else a UserError."""
    if not values or not all(value.isdecimal() and int(value) >= lowest for value in values):
        raise UserError(f"--{flag}={','.join(values)}: give integers from {lowest} with commas between")
    return sorted({int(value) for value in values})


def output_path(value: str, flag: str = "output") -> pathlib.Path:
    """The path of a file to write, whose folder is there; else a UserError."""
    path = pathlib.Path(value)
    if not path.parent.is_dir():
        raise UserError(f"--{flag}={value}: there is no folder {path.parent}")
    return path


def output_files(value: str) -> tuple[pathlib.Path, pathlib.Path]:
    """VALUE.json and VALUE.png to write; an ending .json or .png of the value is left out first."""
    path = output_path(value)
    stem = path.stem if path.suffix in (".json", ".png") else path.name
    return path.with_name(f"{stem}.json"), path.with_name(f"{stem}.png")
