"""Errors that are the user's to mend: one line, no traceback."""

import contextlib
import os
import re
import traceback
from collections.abc import Iterator


class UserError(Exception):
    """A mistake of the user's. The message is one line that names the value, what was expected and what to do."""


@contextlib.contextmanager
def named_errors(action: str, *kinds: type[Exception]) -> Iterator[None]:
    """An OSError, or one of other `kinds`, that ends the block becomes a UserError: the action, and the reason."""
    try:
        yield
    except (OSError, *kinds) as error:
        raise UserError(f"{action}: {getattr(error, 'strerror', None) or error}") from error


def missing_device(error: BaseException) -> str | None:
    """One line if an exception of JAX's says that the platform asked for is not there; None for any other.

    JAX 0.10 asserts where a plug-in is not installed, without a word.
    """
    text = str(error).strip()
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    of_jax = isinstance(error, AssertionError) and bool(frames) and frames[-1].endswith("xla_bridge.py")
    if not (of_jax or re.search("nable to initialize backend|nknown backend|known backends", text)):
        return None
    platforms = os.environ.get("JAX_PLATFORMS", "")
    extra = "gpu" if re.search("cuda|gpu|rocm", platforms) else "tpu"
    reason = f" ({text.splitlines()[0][:200]})" if text else ""
    return (
        f"JAX_PLATFORMS={platforms} asks for a device that JAX does not find here{reason}: unset JAX_PLATFORMS to take "
        f"what there is, or install its support on a machine that has one: pip install -e '.[{extra}]'"
    )
