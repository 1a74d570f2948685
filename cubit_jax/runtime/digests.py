"""SHA-256 digests of the files in a folder, in the format of the program sha256sum: `sha256sum -c SHA256SUMS`."""

import concurrent.futures
import hashlib
import pathlib
from collections.abc import Iterable

FILE_NAME = "SHA256SUMS"
_THREADS = 4  # hashlib releases the interpreter lock


def write_digests(folder: pathlib.Path, parts: Iterable[str]) -> None:
    """Reads all files below the folders `parts` of `folder`, and writes folder/SHA256SUMS. Raises OSError."""
    files = [path for part in parts for path in sorted((folder / part).rglob("*")) if path.is_file()]
    lines = [f"{digest}  {path.relative_to(folder)}\n" for path, digest in zip(files, _digests(files))]
    (folder / FILE_NAME).write_bytes("".join(lines).encode())


def read_digests(folder: pathlib.Path) -> dict[str, str] | None:
    """{path in the folder: digest}; None where no digests were written. Raises OSError, or ValueError if malformed."""
    try:
        lines = (folder / FILE_NAME).read_bytes().decode().splitlines()
    except FileNotFoundError:
        return None
    pairs = [line.partition("  ") for line in lines]
    if not all(name and len(digest) == 64 for digest, _, name in pairs):
        raise ValueError(f"{FILE_NAME} is not a list of SHA-256 digests")
    return {name: digest for digest, _, name in pairs}


def changed_files(folder: pathlib.Path, expected: dict[str, str]) -> list[str]:
    """Names of the files whose content has another digest than `expected` says. Raises OSError."""
    names = list(expected)
    found = _digests([folder / name for name in names])
    return [name for name, digest in zip(names, found) if digest != expected[name]]


def _digests(paths: list[pathlib.Path]) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_digest, paths))


def _digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
