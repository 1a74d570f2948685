"""Flags that take lists, checked: one-line errors that name what is known."""

import difflib

from cubit_jax import cli


def known(flag, values, names):
    """`values` if all are among `names`; else a UserError with the nearest."""
    if not values:
        raise cli.UserError(f"--{flag} is empty: choose of {', '.join(names)}")
    for value in values:
        if value not in names:
            close = difflib.get_close_matches(value, names, n=1)
            raise cli.UserError(f"unknown --{flag}={value}: " + (
                f"did you mean {close[0]}?" if close else f"choose of {', '.join(names)}"))
    return list(dict.fromkeys(values))


def positive_integers(flag, values):
    if not values or not all(value.isdecimal() and int(value) > 0 for value in values):
        raise cli.UserError(f"--{flag}={','.join(values)}: give positive integers with commas between")
    return sorted({int(value) for value in values})
