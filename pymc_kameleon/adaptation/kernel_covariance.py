"""Learner of Kernel Adaptive Metropolis-Hastings (Sejdinovic et al. 2014)."""

from collections.abc import Callable

from pymc_kameleon.adaptation.subsample import SubsampleAdaptation, SubsampleLearner
from pymc_kameleon.mcmc.proposals.kernel_gaussian import KernelGaussian

__all__ = ["KernelAdaptation", "KernelLearner"]


class KernelAdaptation(SubsampleAdaptation):
    """Choices of `KameleonStep`.

    Parameters
    ----------
    schedule : callable or None
        Probability of an update before each transition, as a function of their number.
    **choices
        As for `SubsampleAdaptation`.
    """

    def __init__(self, *, schedule: Callable[[int], float] | None, **choices):
        if not (schedule is None or callable(schedule)):
            raise TypeError(
                f"adaptation={schedule!r}: pass a function of the number of transitions that "
                "returns a probability, or None for the default schedule."
            )
        self.schedule = schedule
        super().__init__(**choices, adaptation=getattr(schedule, "__qualname__", schedule))

    def new_learner(self, dim, target_accept, rng):  # noqa: D102
        return KernelLearner(self, dim, target_accept, rng)


class KernelLearner(SubsampleLearner):
    """Draws a new subsample at every update."""

    def proposal(self, compiled):  # noqa: D102
        learnt = self.learnt
        return KernelGaussian(
            self.choices.kernel.form(compiled),
            learnt.points,
            learnt.parameters,
            self.here,
            learnt.coordinates,
            self.scaling,
            self.gamma,
        )

    @property
    def follows_schedule(self):  # noqa: D102
        return self.choices.schedule is None

    def transitions_before_update(self, transition, n, rng):  # noqa: D102
        if self.choices.schedule is None:
            return super().transitions_before_update(transition, n, rng)
        uniforms = rng.random(n)
        for i in range(n):
            if uniforms[i] < self.choices.schedule(transition + i):
                return i
        return n

    def _learn(self, history, rng, tune=True):
        self._learn_coordinates(history, rng)
        self._rescale(rng)
