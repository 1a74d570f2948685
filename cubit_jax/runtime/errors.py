"""Errors that are the user's to mend: one line, no traceback."""

import contextlib
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
