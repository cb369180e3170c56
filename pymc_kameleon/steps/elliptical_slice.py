"""Elliptical slice sampling of a latent Gaussian process, with a choice of centre."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pymc.stats.convergence import WarningType
from pymc.step_methods.state import dataclass_state
from pytensor.graph.basic import Variable

from pymc_kameleon.latent_gp.gaussian.sites import Sites, with_sites
from pymc_kameleon.latent_gp.gaussian_approximations import (
    expectation_propagation_approximation,
    laplace_approximation,
)
from pymc_kameleon.latent_gp.tempered_target import TemperedTarget, elliptical_slice
from pymc_kameleon.steps.chain.life_cycle import draw_statistics
from pymc_kameleon.steps.latent_function import LatentFunctionState, LatentFunctionStep
from pymc_kameleon.steps.shared_parameters import with_shared_parameters
from pymc_kameleon.validation import checked_choice, checked_integer, renamed

APPROXIMATIONS = ("prior", "laplace", "ep")

SHARE_OF_PRECISION = 0.85
"""Share of the sites' precision that the centre keeps. On eleven probit posteriors it gave -1 to
+35 % effective draws a transition in easy cases and hard ones; 0.7 costs easy ones a fifth."""


@dataclass_state
class EllipticalSliceState(LatentFunctionState):
    """All that the next transition of a chain needs."""

    site_precision: np.ndarray | None
    site_shift: np.ndarray | None
    next_fit: int | None
    n_fits: float


@with_shared_parameters
class EllipticalSliceStep(LatentFunctionStep):
    """Elliptical slice sampling for the latent function of a Gaussian-process model.

    Nothing to tune and no rejection: a point on an ellipse through the current function and a draw
    of a Gaussian, whose bracket shrinks until the likelihood is high enough. Centred on the
    Gaussian of expectation propagation, it makes nearly independent draws of posteriors that are
    nearly Gaussian, as those of most Gaussian-process models are. Centred on the prior, it needs no
    gradient, and suits likelihoods that are hardly informative.

    ::

        x: the function; base: prior x sites, of mean m; log_ratio: log of likelihood / sites
        draw nu ~ N(0, base covariance), u ~ U(0, 1), an angle a ~ U(0, 2 pi)
        until log_ratio(m + (x - m) cos a + nu sin a) > log_ratio(x) + log u:
            shrink the angle's bracket

    Parameters
    ----------
    %(latent_vars)s
    approximation : {"ep", "laplace", "prior"}
        Gaussian that the ellipses are of: expectation propagation's or Laplace's approximation of
        the posterior, or the prior. "ep" and "laplace" need the likelihood's derivatives.
    steps_per_draw : int
        Transitions for each draw that is kept. Two cost hardly more than the draw itself.
    %(pymc)s

    Raises
    ------
    ValueError
        If no Gaussian prior or no factorising likelihood is found, saying which and why.
    NotImplementedError
        If `approximation` needs a gradient that the likelihood does not have.

    Notes
    -----
    Sampler statistics, all float64:

    ============= =====================================================================
    `n_evals`     likelihood evaluations in the draw
    `n_refits`    times that the Gaussian's sites were fitted so far in the chain
    `log_ratio`   log of likelihood over sites at the draw, without a constant
    ============= =====================================================================

    The target is invariant for any Gaussian that does not depend on the function's values. Where
    other steps move hyperparameters, the prior in it follows them exactly; its sites are fitted
    again at draws 1, 2, 4, 8, ... of tuning and at the first one after it, and are then fixed. At
    each fit while tuning, the function moves to a draw of the Gaussian if that is more probable.

    References
    ----------
    Murray, Adams & MacKay (2010), Elliptical slice sampling, AISTATS, arXiv:1001.0175.
    Nishihara, Murray & Adams (2014), Parallel MCMC with generalized elliptical slice sampling,
    JMLR 15, 2087-2112.

    Examples
    --------
    >>> with model:  # doctest: +SKIP
    ...     f = pm.gp.Latent(cov_func=covariance).prior("f", X=inputs)
    ...     pm.Bernoulli("y", p=pm.math.invprobit(f), observed=labels)
    ...     idata = pm.sample(step=EllipticalSliceStep([f]))
    """

    name = "elliptical_slice"
    stats_dtypes_shapes: dict = draw_statistics("n_evals", "n_refits", "log_ratio")
    default_tune_steps = 200
    _state_class = EllipticalSliceState

    @renamed(center="approximation")
    def __init__(
        self,
        vars: Sequence[Variable] | None = None,
        *,
        approximation: Literal["ep", "laplace", "prior"] = "ep",
        steps_per_draw: int = 2,
        **options: Any,
    ) -> None:
        self.approximation = checked_choice("approximation", approximation, APPROXIMATIONS)
        self.steps_per_draw = checked_integer("steps_per_draw", steps_per_draw, 1)
        super().__init__(
            vars,
            configuration={
                "approximation": approximation,
                "steps_per_draw": self.steps_per_draw,
            },
            **options,
        )
        if approximation != "prior":
            self.function.likelihood.require_gradient()

    def _begin_learning(self):
        self.site_precision = self.site_shift = None
        self.next_fit = 0
        self.n_fits = 0.0

    def _fresh_state(self):
        values = np.zeros(self.function.size)
        return super()._fresh_state() | {"site_precision": values, "site_shift": values}

    def _model_changed(self, prior_changed):
        if prior_changed:
            self._target = None

    def _end_tuning(self):
        if self._follows_others:
            self.next_fit = self.draw

    def _transitions(self):
        target = self._centred()
        x, value, n_evaluations = elliptical_slice(
            target,
            self.position,
            target.log_ratio(self.position),
            self.rng,
            n_transitions=self.steps_per_draw,
        )
        return x, {
            "n_evals": 1.0 + n_evaluations,
            "n_refits": self.n_fits,
            "log_ratio": value,
        }

    @property
    def _follows_others(self):
        return bool(self.function.shared)

    def _centred(self):
        """Return the target as a Gaussian and the rest of the likelihood."""
        prior, likelihood = self.function.prior.gaussian, self.function.likelihood
        is_due = self.next_fit is not None and self.draw >= self.next_fit
        is_due &= self.approximation != "prior"
        if is_due:
            self._fit(prior, likelihood)
            self._target = None
        if self._target is None and self.approximation == "prior":
            self._target = TemperedTarget(prior, likelihood)
        elif self._target is None:
            sites = Sites(self.site_precision, self.site_shift)
            base, _ = with_sites(prior, sites)
            self._target = TemperedTarget(base, likelihood, 1.0, sites)
        if is_due and self.tune:
            self._leave_tails()
        return self._target

    def _leave_tails(self):
        """Move to a draw of the centre where that is more probable: slices are slow in tails.

        Where the posterior's tail is heavier than the centre's, as for counts far above the start,
        hardly any point of an ellipse is on the slice.
        """
        target, here = self._target, self.position
        drawn = target.base.draw(self.rng)
        gain = target.base.log_density(drawn) - target.base.log_density(here)
        if gain + target.log_ratio(drawn) > target.log_ratio(here):
            self.position = drawn

    def _fit(self, prior, likelihood):
        """Fit the sites, from prior and likelihood and not from the function's values."""
        sites, reason = _sites(self.approximation, prior, likelihood)
        if reason is not None:
            self._warn_once(
                "center",
                WarningType.BAD_PARAMS,
                f"The Gaussian that centres the ellipses of {self.function.name} is a poor one, "
                f"which costs speed but no correctness: {reason}",
            )
        self.site_precision, self.site_shift = sites.precision, sites.shift
        self.n_fits += 1.0
        self.next_fit = max(1, 2 * self.draw) if self.tune and self._follows_others else None

    def _progress_columns(self):
        return {"n_evals": ("Evals", "0.1f"), "log_ratio": ("Log ratio", "0.1f")}


def _widened(found) -> Sites:
    """Sites of a little less precision, about the same mean.

    A centre with lighter tails than the posterior holds a chain far out for long.
    """
    sites, mean = found.sites, found.posterior.mean
    lost = (1.0 - SHARE_OF_PRECISION) * sites.precision
    return Sites(sites.precision - lost, sites.shift - lost * mean)


def _sites(approximation, prior, likelihood):
    """Sites of an approximation, and why it is a poor one (None if it is not)."""
    fit = expectation_propagation_approximation if approximation == "ep" else laplace_approximation
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            sites = _widened(fit(prior, likelihood))
        except (ArithmeticError, ValueError) as error:
            return Sites.flat(prior.size), error
    if not (np.all(np.isfinite(sites.precision)) and np.all(np.isfinite(sites.shift))):
        return Sites.flat(prior.size), "its sites are not finite."
    messages = [w.message for w in caught if issubclass(w.category, UserWarning)]
    return sites, messages[0] if messages else None
