"""What a proposal is: a NamedTuple of arrays, and functions that are registered for its class.

The loop of `mcmc.loop` calls these functions with the tuple first.
"""

from collections.abc import Callable

from pymc_kameleon.mcmc.bridge.jit import by_class
from pymc_kameleon.mcmc.chain import accept_or_reject
from pymc_kameleon.mcmc.scalings import Scaling

__all__ = [
    "ACCEPT",
    "CHOICE",
    "JUMP",
    "N_UNIFORMS",
    "PICK",
    "SECOND_PICK",
    "Scaling",
    "accept_own",
    "commit",
    "covariance_at",
    "invalidate",
    "learn",
    "propose",
    "register_proposal",
]

N_UNIFORMS = 7
CHOICE, PICK, SECOND_PICK, JUMP, ACCEPT = range(N_UNIFORMS - 2)
"""Uniform random numbers of a transition: kind of move, two picks, length, and from `ACCEPT` on
those of acceptance."""


@by_class
def propose(proposal, chain, normals, uniforms):
    """Write x* into `chain.proposal`; return log q(x | x*) - log q(x* | x), and which scaling."""


@by_class
def accept_own(proposal, log_density, stage, chain, log_ratio, normals, uniforms):
    """Evaluate x*, and move there or not; return acceptance probability, and whether it did.

    By default with probability min(1, p(x*) q(x | x*) / p(x) q(x* | x)), `mcmc.chain`.
    """


@by_class
def commit(proposal):
    """Keep what was computed for x*, which was accepted."""


@by_class
def invalidate(proposal):
    """Drop what was computed for the position that was left by another move."""


@by_class
def learn(proposal, chain, is_evaluated, acceptance, index):
    """Learn from a transition, its own or not (`index` is -1 then), of a chain that adapts."""


@by_class
def covariance_at(proposal, x):
    """Covariance (d, d) of the move from `x` (d,)."""


_propose, _accept_own, _commit, _invalidate = propose, accept_own, commit, invalidate
_learn, _covariance_at = learn, covariance_at


def _accept(proposal, log_density, stage, chain, log_ratio, normals, uniforms):
    return accept_or_reject(log_density, stage, chain, log_ratio, uniforms)


def _nothing(proposal):
    pass


def _learn_nothing(proposal, chain, is_evaluated, acceptance, index):
    pass


def register_proposal(
    cls: type,
    *,
    propose: Callable,
    accept: Callable | None = None,
    commit: Callable = _nothing,
    invalidate: Callable = _nothing,
    learn: Callable = _learn_nothing,
    covariance_at: Callable | None = None,
    allocates: bool = True,
    in_python: Callable | None = None,
) -> None:
    """Register the functions of a class of proposals.

    All but `covariance_at` are Python functions that Numba can compile.

    Parameters
    ----------
    cls : subclass of NamedTuple
        Its fields are arrays, numbers, or tuples of such.
    propose : callable
        `propose(proposal, chain, normals, uniforms) -> (log_ratio, index)` writes x* into
        `chain.proposal`. `log_ratio` is log q(x | x*) - log q(x* | x), -inf where there is no such
        move; `index` says which scaling the move was made with. `normals` (k,) and `uniforms` (7,)
        are fresh random numbers: `uniforms[PICK]` is the proposal's own.
    accept : callable, optional
        `accept(proposal, log_density, stage, chain, log_ratio, normals, uniforms)` returns the
        acceptance probability and whether the chain moved, for a ratio that is known only when x*
        was evaluated. By default `mcmc.chain.accept_or_reject`.
    commit : callable, optional
        `commit(proposal)` is called after x* was accepted.
    invalidate : callable, optional
        `invalidate(proposal)` is called after the position was changed by another move.
    learn : callable, optional
        `learn(proposal, chain, is_evaluated, acceptance, index)` is called after each transition,
        whatever its move, of a chain that adapts; it makes no arrays that live on.
    covariance_at : callable, optional
        `covariance_at(proposal, x)`, covariance (d, d) of the move from x (d,), for plots; plain
        Python.
    allocates : bool
        Whether `propose`, `commit`, `invalidate` or `accept` makes arrays. Those that do not take
        less time if this is False; see `mcmc.bridge.jit`.
    in_python : callable, optional
        `propose` where transitions run in plain Python: compiled, if it calls compiled functions
        several times.
    """
    _propose.register(cls, propose, allocates=allocates, in_python=in_python)
    _accept_own.register(cls, accept or _accept, allocates=allocates and accept is not None)
    _commit.register(cls, commit, allocates=allocates)
    _invalidate.register(cls, invalidate, allocates=allocates)
    _learn.register(cls, learn, allocates=False)
    if covariance_at is not None:
        _covariance_at.register(cls, covariance_at)
