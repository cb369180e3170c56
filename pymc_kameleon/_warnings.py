"""Warnings that point at the line of the user's code that they are about."""

import sys
import warnings

INSIDE = ("pymc_kameleon", "pymc")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with file and line of the first caller outside of this package and PyMC.

    Parameters
    ----------
    message : str
    category : type of Warning
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(frame) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE
