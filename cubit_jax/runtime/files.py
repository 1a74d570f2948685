"""Files that are written whole or not at all."""

import os
import pathlib
import tempfile

from cubit_jax.runtime.errors import named_errors


def write_atomically(path: str | pathlib.Path, content: bytes) -> None:
    """Writes bytes to `path`, in a folder that is made, through a temporary file there; UserError if that fails."""
    path = pathlib.Path(path)
    with named_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)  # mkstemp's files are private
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
