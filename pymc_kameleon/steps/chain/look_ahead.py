"""Evaluation ahead: where a chain will probably ask for its log density is evaluated at once.

A chain follows from its random numbers and from which proposals are accepted. A copy of it, with a
guess in place of the log density, is run for some transitions, and the points where it asks are
evaluated together (Brockwell 2006; Angelino et al. 2014). The chain itself then goes its way by the
true values, so its draws are the same; a wrong guess costs needless evaluations.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from pymc_kameleon.model.batches import Batches
from pymc_kameleon.steps.chain.evaluator import Evaluator
from pymc_kameleon.store.stored_density import StoredDensity


class LookAhead:
    """What a chain is expected to ask for next, evaluated at once by `batches`.

    What the store of a step knows is not evaluated.
    """

    def __init__(self, batches: Batches, stored: StoredDensity | None):
        self.batches, self.stored = batches, stored
        self._path: deque[tuple[np.ndarray, np.ndarray]] = deque()

    def announce(self, points: Sequence[np.ndarray] | np.ndarray) -> None:
        """Evaluate at `points`, each (d,), which the step will ask for."""
        self._path.clear()
        self.batches.announce([x for x in points if not self._is_known(x)])

    def _is_known(self, x):
        return self.stored is not None and self.stored.knows(x)

    def asked(self, x: np.ndarray) -> None:
        """Follow the path, or leave it: the log density is evaluated at `x` (d,)."""
        if self._path and np.array_equal(self._path[0][1], x):
            self._path.popleft()
        else:
            self._path.clear()

    def look(self, sampler, normals: np.ndarray, uniforms: np.ndarray) -> None:
        """Evaluate what the next transitions will probably ask for, unless that is known.

        The first of them are those of a `ChainSampler` with these random numbers.
        """
        if not _is_foreseeable(sampler):
            return
        if self._path and np.array_equal(self._path[0][0], sampler.chain.position):
            return
        path = self._foreseen(sampler, normals, uniforms)[: self.batches.size]
        self.announce([x for _, x in path])
        self._path.extend(path)

    def _foreseen(self, sampler, normals, uniforms):
        """Pairs of where the chain will be, and where it will ask for its log density."""
        path: list[tuple[np.ndarray, np.ndarray]] = []
        size, n_per_draw = self.batches.size, sampler.steps_per_draw

        def guess(x, value):
            path.append((copied.chain.position.copy(), x.copy()))
            _guess(copied, x, value)

        copied = _copied(sampler, Guesses(sampler.evaluator, guess))
        copied.make_transitions(normals.copy(), uniforms.copy())
        may_update = sampler.adapts and n_per_draw > 1
        if may_update or sampler.target.shared:  # what comes next is not known from here
            return path
        copied.learner.absorb()
        copied.transition += n_per_draw
        for _ in range(size):
            if len(path) >= size or not _is_foreseeable(copied):
                break
            copied.advance(n_per_draw)
        return path


class Guesses(Evaluator):
    """Has `guess(x, value)` in place of the log density, and copies of what that changes."""

    is_compilable = False

    def __init__(self, evaluator: Evaluator, guess: Callable[[np.ndarray, np.ndarray], None]):
        super().__init__(evaluator.target, evaluator.gradients)
        self.rng, self.report = copy.deepcopy((evaluator.rng, evaluator.report))
        self.guess = guess

    def into(self, x, value):  # noqa: D102
        self.guess(x, value)


def _is_foreseeable(sampler):
    """Whether the next transition depends on earlier log densities by acceptance alone."""
    return sampler.learner.is_foreseeable(sampler.tune, sampler.adapts)


def _guess(sampler, x, value):
    """Write to `value` what the log density at the proposal `x` (d,) is taken for."""
    expected = sampler.learner.expected_at(x)
    if expected is None:
        sampler.screening.guess(sampler.stage, sampler.chain, value)
    else:
        value[:] = 0.0
        value[0] = expected


def _copied(sampler, evaluator):
    """Return a sampler with this evaluator whose chain is a copy of that of `sampler`."""
    copied, known = copy.copy(sampler), {}
    copied.evaluator, copied.learner = evaluator, copy.copy(sampler.learner)
    for name, value in vars(sampler.learner).items():
        if isinstance(value, np.ndarray | tuple | list | set):
            setattr(copied.learner, name, copy.deepcopy(value, known))
    copied.chain, copied.stage = copy.deepcopy((sampler.chain, sampler.stage))
    return copied
