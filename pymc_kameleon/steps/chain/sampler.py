"""A chain with what it learns: its transitions, and the evaluations between them."""

import copy
import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from pymc_kameleon._threads import one_thread
from pymc_kameleon.adaptation.learner import Learner, WarmStart
from pymc_kameleon.mcmc.chain import (
    EVALUATIONS,
    N_TERMS,
    TRANSITION,
    Chain,
    evaluate,
    mark_impossible,
    new_chain,
    wrap_angle,
)
from pymc_kameleon.mcmc.loop import run_plain, runner
from pymc_kameleon.mcmc.proposals import N_UNIFORMS
from pymc_kameleon.model.batches import Batches
from pymc_kameleon.model.log_density import LogDensity
from pymc_kameleon.steps.chain import kept_estimate
from pymc_kameleon.steps.chain.evaluator import Evaluator
from pymc_kameleon.steps.chain.life_cycle import all_or_nothing
from pymc_kameleon.steps.chain.look_ahead import LookAhead
from pymc_kameleon.steps.chain.mixing import KeptDraws
from pymc_kameleon.steps.chain.report import Report, end_by
from pymc_kameleon.store.evaluation_store import EvaluationStore
from pymc_kameleon.store.stored_density import StoredDensity
from pymc_kameleon.surrogate.delayed_acceptance import FirstStage

N_READ = 6000
"""Evaluations of other chains and runs that are read at a time, at most: the last ones."""

CENTRED_IN = 100
"""Window, in transitions, of the running circular mean of an angle."""


def evaluator_of(
    target: LogDensity,
    store: EvaluationStore | None,
    gradients: bool,
    looks_ahead: bool,
    terms: bool = False,
) -> Evaluator:
    """Return what evaluates `target`, at several points at once if it `looks_ahead` and can."""
    stored = None if store is None else StoredDensity(target, store, gradients)
    ahead = None
    if looks_ahead and not target.estimated_terms:
        batches = Batches(target.function)
        ahead = LookAhead(batches, stored) if batches.size > 1 else None
    return Evaluator(target, gradients, stored, ahead, terms)


class ChainSampler:
    """Makes the transitions of one chain, and lets its learner learn from them.

    `evaluator` evaluates the log density, `screening` has the surrogate of delayed acceptance, and
    `template` is a `Learner` with the choices alone. A chain has its `chain` (position and log
    density), its `learner`, the first `stage` of delayed acceptance, which may be None,
    `transition` (how many were made), `tune`, and its `draws` after tuning.
    """

    chain: Chain
    learner: Learner
    stage: FirstStage | None

    def __init__(
        self,
        evaluator: Evaluator,
        screening,
        template: Learner,
        *,
        target_accept: float,
        steps_per_draw: int = 1,
        adapts_after_tune: bool = False,
    ):
        self.evaluator, self.screening, self.template = evaluator, screening, template
        self.target, self.stored = evaluator.target, evaluator.stored
        self.target_accept, self.steps_per_draw = target_accept, steps_per_draw
        self.adapts_after_tune = adapts_after_tune
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the chain, if there is one."""
        self.evaluator.begin_anew()
        self.draws, self.tune, self.transition = KeptDraws(), True, 0
        self.chain = self.learner = self.stage = None  # type: ignore[assignment]

    def copied(self) -> Self:
        """Return a sampler with an evaluator of its own, at the same chain."""
        copied = copy.copy(self)
        copied.evaluator = copy.copy(self.evaluator)
        return copied

    @property
    def report(self) -> Report:
        """What the chain counts, and the warnings that it has given."""
        return self.evaluator.report

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers of the chain."""
        return self.evaluator.rng

    @property
    def runs_compiled(self) -> bool:
        """Whether transitions run compiled, log density included."""
        return self.template.is_compilable and self.evaluator.is_compilable

    # where the chain is ---------------------------------------------------------------------------

    def put(self, x: np.ndarray) -> None:
        """Put a new chain, which has learnt nothing, at `x` (d,)."""
        self.chain = new_chain(np.array(x, dtype=np.float64), self.evaluator.n_values)
        self.stage = self.screening.new_stage()
        if self.stored is not None:
            self.stored.begin_chain()
        self.report.foreign_seed = kept_estimate.foreign_seed(self.target)

    def new_learner(self, position: np.ndarray, warm: WarmStart | None) -> Learner:
        """Return what a chain at `position` (d,) learns with."""
        return self.template.start(position, self.rng, self.target_accept, warm)

    def position_changed(self) -> None:
        """Drop what was computed for the position, which transitions did not change."""
        self.learner.invalidate()
        self.screening.invalidate(self.stage)

    def evaluate_current(self) -> None:
        """Evaluate the log density where the chain is."""
        chain = self.chain
        chain.counts[EVALUATIONS] += 1
        try:
            self.evaluator.into(chain.position, chain.value)
        except Exception as error:
            end_by(error, self, "the current point", chain.position)
            raise
        mark_impossible(chain)

    def evaluate(self, x: np.ndarray) -> float:
        """Log density at `x` (d,), -inf if it is not finite; the chain's proposal is then there."""
        chain = self.chain
        chain.proposal[:] = x
        density = (self.evaluator.into_or_none,)
        value = evaluate(density, x, chain.proposed_value, chain.counts)
        if self.learner is not None:
            self.learner.keep(x, chain.proposed_value)
        return value

    def evaluate_all(self, points: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """Log densities (n,) at points that are known beforehand, each (d,)."""
        self.announce(points)
        return np.array([self.evaluate(point) for point in points])

    def announce(self, points: Sequence[np.ndarray] | np.ndarray) -> None:
        """Evaluate black boxes at these points, each (d,), at once, where that can be done."""
        if self.evaluator.ahead is not None:
            self.evaluator.ahead.announce(points)

    def move_to_proposal(self) -> None:
        """Move the chain to where its log density was evaluated last."""
        chain = self.chain
        chain.position[:], chain.value[:] = chain.proposal, chain.proposed_value

    # transitions ----------------------------------------------------------------------------------

    @property
    def adapts(self) -> bool:
        """Whether the next transition adapts."""
        return self.tune or self.adapts_after_tune

    def advance(self, n: int) -> None:
        """Make `n` transitions, and the updates of the proposal that come between them."""
        if not self.adapts:
            self._run(n)
        learner, done = self.learner, 0
        while self.adapts and done < n:
            count = learner.transitions_before_update(self.transition + done, n - done, self.rng)
            self._learn_from(count)
            done += count
            if done < n:
                with one_thread(), all_or_nothing(learner):
                    points = learner.update(self.chain.position, self.tune, self.rng)
                if points is not None:
                    self._explore(points)
                self._learn_from(1)
                done += 1
        self.transition += n

    def _explore(self, points):
        """Evaluate the `points` (n, d) that the learner asks for."""

    def _learn_from(self, n):
        """Make `n` transitions, no more at a time than the learner has room for."""
        while n > 0:
            count = min(n, self.learner.room())
            self._run(count)
            self.learner.absorb()
            n -= count

    def _run(self, n):
        """Make `n` transitions, and learn from their evaluations."""
        self.learner.before_transitions(n, self.adapts, self.rng)
        self.keep_to_one_period()
        normals = self.rng.standard_normal((n, self.target.dim + self.learner.n_more_normals))
        uniforms = self.rng.random((n, N_UNIFORMS + self.learner.n_more_uniforms))
        ahead = self.evaluator.ahead
        if ahead is None:
            self.make_transitions(normals, uniforms)
        else:
            for i in range(n):
                ahead.look(self, normals[i:], uniforms[i:])
                self.make_transitions(normals[i : i + 1], uniforms[i : i + 1])
        self.learn_from_evaluations()

    def make_transitions(self, normals: np.ndarray, uniforms: np.ndarray) -> None:
        """Make a transition with each row of these, compiled if log density and proposal are.

        One at which compiled code raises an error is made again in Python while tuning, where that
        counts as no density.
        """
        table = self.evaluator.function.compiled() if self.runs_compiled else None
        while len(normals):
            try:
                return self._loop(table, normals, uniforms)
            except Exception as error:
                if table is None or not self.tune:
                    if table is not None and not self.target.function.has_black_box:
                        self.target(self.chain.proposal)  # PyTensor's own error names the operation
                    end_by(error, self, "a proposal", self.chain.proposal)
                    raise
            failed = int(self.chain.counts[TRANSITION])
            self.chain.counts[EVALUATIONS] -= 1
            self._loop(None, normals[failed : failed + 1], uniforms[failed : failed + 1])
            normals, uniforms = normals[failed + 1 :], uniforms[failed + 1 :]
        return None

    def _loop(self, table, normals, uniforms):
        """Make transitions compiled, with the `table` of the log density, or without in Python."""
        is_compiled = table is not None
        proposal, mixture, recursion = self.learner.moves(self.tune, is_compiled)
        run = runner(type(proposal)) if is_compiled else run_plain
        density = self.evaluator.into_or_none if self.tune else self.evaluator.into
        run(
            table if is_compiled else (density,),
            self.screening.stage_for_loop(self.stage, self.chain, is_compiled, self.adapts),
            self.chain,
            mixture,
            proposal,
            recursion,
            self.adapts,
            normals,
            uniforms,
        )

    def keep_to_one_period(self) -> None:
        """Move angles by whole turns into their bounds, which while tuning follow the chain.

        They are a turn apart, around a running circular mean, so that they come to be where the
        density is lowest. What is within is one period of the target, and proposals end there.
        """
        chain, is_angle = self.chain, self.target.is_circular
        if not is_angle.any():
            return
        x, low = chain.position[is_angle], chain.bounds[0, is_angle]
        is_first = not np.isfinite(low).all()
        if self.tune or is_first:
            centre = x if is_first else low + math.pi
            centre = centre + wrap_angle(x - centre, -math.pi) / min(
                self.transition + 1, CENTRED_IN
            )
            chain.bounds[:, is_angle] = centre - math.pi, centre + math.pi
        within = wrap_angle(x, chain.bounds[0, is_angle])
        if (within != x).any():
            chain.position[is_angle] = within
            self.position_changed()
        if self.tune:
            self.learner.keep_within(chain.bounds)

    # learning -------------------------------------------------------------------------------------

    def learn_from_evaluations(self) -> None:
        """Teach the first stage what was evaluated, here and, while tuning, elsewhere."""
        if self.stage is None:
            return
        if self.tune and self.stored is not None and self.stored.is_reading_due:
            self.read_store()
        if self.adapts:
            self.screening.refit(self.stage, self.chain)

    def read_store(self) -> None:
        """Learn from what other chains and runs have stored since the last time.

        The first stage does not yet where the chain is still so far below what they found that its
        own surroundings would be censored: a surrogate of somewhere else would keep it there.
        """
        if self.stored is None or self.stage is None:
            return
        found = self.stored.from_others(N_READ, self.screening.growth(self.stage))
        lowest = np.max(found.log_densities, initial=-np.inf) - self.stage.process.censoring[1]
        if self.chain.value[:N_TERMS].sum() < lowest:
            self.stored.put_back(found)
        elif len(found.points):
            self.screening.teach_found(self.stage, self.chain, found)

    def end_learning(self) -> np.ndarray | Sequence[np.ndarray] | None:
        """Freeze what was learnt; return the points (n, d) that the learner asks for."""
        with one_thread(), all_or_nothing(self.learner):
            return self.learner.end_tuning(self.chain.position, self.rng)
