"""What a proposal is: a NamedTuple of arrays, and functions that are registered for its class.

The loop of `mcmc.run` calls `propose`, `commit` and `invalidate` with the tuple first.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np

from pymc_kameleon.mcmc.layout import floats
from pymc_kameleon.mcmc.numba_bridge import by_class

__all__ = [
    "ACCEPT",
    "CHOICE",
    "JUMP",
    "N_UNIFORMS",
    "PICK",
    "SECOND_PICK",
    "Scaling",
    "commit",
    "covariance_at",
    "invalidate",
    "propose",
    "register_proposal",
]

N_UNIFORMS = 7
CHOICE, PICK, SECOND_PICK, JUMP, ACCEPT = range(N_UNIFORMS - 2)
"""Uniform random numbers of a transition: kind of move, two picks, length, and from `ACCEPT` on
those of acceptance."""


class Scaling(NamedTuple):
    """Logs of the scalings of a proposal, and how often each was updated; arrays of shape (m,)."""

    log: Annotated[np.ndarray, floats("scalings")]
    n_updates: Annotated[np.ndarray, floats("scalings")]


@by_class
def propose(proposal, chain, normals, uniforms):
    """Write x* into `chain.proposal`; return log q(x | x*) - log q(x* | x), and an index."""


@by_class
def commit(proposal):
    """Keep what was computed for x*, which was accepted."""


@by_class
def invalidate(proposal):
    """Drop what was computed for the position that was left by another move."""


@by_class
def covariance_at(proposal, x):
    """Covariance (d, d) of the move from `x` (d,)."""


_COMPILED = (propose, commit, invalidate)
_covariance_at = covariance_at


def _nothing(proposal):
    pass


def register_proposal(
    cls: type,
    *,
    propose: Callable,
    commit: Callable = _nothing,
    invalidate: Callable = _nothing,
    covariance_at: Callable | None = None,
    allocates: bool = True,
    in_python: Callable | None = None,
) -> None:
    """Register the functions of a class of proposals.

    The first three are Python functions that Numba can compile.

    Parameters
    ----------
    cls : subclass of NamedTuple
        Its fields are arrays, numbers, or tuples of such.
    propose : callable
        `propose(proposal, chain, normals, uniforms) -> (log_ratio, index)` writes x* into
        `chain.proposal`. `log_ratio` is log q(x | x*) - log q(x* | x), -inf where there is no such
        move; `index` says which scaling the move was made with. `normals` (k,) and `uniforms` (7,)
        are fresh random numbers: `uniforms[PICK]` is the proposal's own.
    commit : callable, optional
        `commit(proposal)` is called after x* was accepted.
    invalidate : callable, optional
        `invalidate(proposal)` is called after the position was changed by another move.
    covariance_at : callable, optional
        `covariance_at(proposal, x)`, covariance (d, d) of the move from x (d,), for plots; plain
        Python.
    allocates : bool
        Whether one of the first three makes arrays. Those that do not take less time if this is
        False; see `mcmc.numba_bridge.jit`.
    in_python : callable, optional
        `propose` where transitions run in plain Python: compiled, if it calls compiled functions
        several times.
    """
    options: tuple[dict, ...] = ({"in_python": in_python}, {}, {})
    functions = zip(_COMPILED, (propose, commit, invalidate), options, strict=True)
    for function, implementation, more in functions:
        function.register(cls, implementation, allocates=allocates, **more)
    if covariance_at is not None:
        _covariance_at.register(cls, covariance_at)
