"""Figures: matplotlib without a display, imported only where something is drawn."""

import pathlib
from typing import Any

from cubit_jax.runtime.errors import UserError


def pyplot() -> Any:
    """matplotlib.pyplot. Programs that draw at their end call it at their start.

    Raises:
      UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("the figure needs matplotlib: pip install -e '.[experiments]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str | pathlib.Path) -> None:
    """Writes a figure to `path` and frees it."""
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
