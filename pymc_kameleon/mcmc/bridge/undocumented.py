"""Whether names that Numba and PyTensor do not document are there in the present versions."""

import logging
import pkgutil
from operator import attrgetter

import numba
from pytensor.compile.ops import FromFunctionOp

_log = logging.getLogger("pymc.kameleon")


@numba.njit(cache=True)
def _nothing():
    pass


SAMPLES = {"dispatcher": _nothing, "wrapped": FromFunctionOp(_nothing, [], [], None)}


def has_names(names: str, otherwise: str) -> bool:
    """Whether these names are there in the present versions; if not, log what is done otherwise."""
    for name in names.split():
        first, _, rest = name.partition(".")
        try:
            attrgetter(rest)(SAMPLES[first]) if first in SAMPLES else pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            if not numba.config.DISABLE_JIT:
                _log.warning("This version of Numba or PyTensor has no %s: %s.", name, otherwise)
            return False
    return True
