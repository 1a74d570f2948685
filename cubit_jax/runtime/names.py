"""Misspelt names: the nearest known one, for error messages."""

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name most like `name`; None where none is near."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ "; did you mean 'NAME'?" with the nearest known name, "" where none is near: the end of an error message."""
    found = nearest(name, known)
    return f"; did you mean {found!r}?" if found else ""
