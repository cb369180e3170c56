"""Scripts that start processes need a main guard; without one they would wait for ever."""

import ast
import linecache
import sys
from types import FrameType

from pymc.sampling.parallel import ParallelSamplingError

SENDER = ParallelSamplingError.__module__
"""Module that sends steps to new processes, known by the error that users catch."""


def require_main_guard() -> None:
    """Raise an error where PyMC is about to start processes from a script that they would run.

    Processes that are not forked import the script first. Where that starts processes again it
    fails, and the first process waits for ever to send them what they no longer read. The
    RuntimeError names the line of the script.
    """
    frame: FrameType | None = sys._getframe(1)
    is_sent, line = False, None
    main = sys.modules["__main__"]
    while frame is not None:
        is_sent = is_sent or frame.f_globals.get("__name__") == SENDER
        if frame.f_globals is main.__dict__ and frame.f_code.co_name == "<module>":
            line = frame.f_lineno
        frame = frame.f_back
    file = getattr(main, "__file__", None)
    if not is_sent or line is None or file is None:
        return
    lines = linecache.getlines(file)
    if lines and not _is_guarded(ast.parse("".join(lines)), line):
        raise RuntimeError(
            f"Each chain runs in a new process, which begins by running {file} once more. Put "
            f"line {line}, `{lines[line - 1].strip()}`, and what belongs to it below the line "
            '`if __name__ == "__main__":`, or run all chains in this process, '
            "pm.sample(cores=1)."
        )


def _is_guarded(tree, line):
    return any(
        node.lineno <= line <= node.end_lineno
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
    )
