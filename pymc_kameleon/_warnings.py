"""Warnings that point at the line of the user's code that they are about."""

import sys
import warnings

INSIDE = ("pymc_kameleon", "pymc", "importlib")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with file and line of the first caller outside of this package and PyMC.

    Parameters
    ----------
    message : str
    category : type of Warning
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame):
        frame = frame.f_back
    # Not by a level of the stack: Python's own count leaves out the frames of imports.
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_inside(frame) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE
