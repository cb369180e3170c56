"""One battery for every step: a new step is added to `STEPS`, and its tests are there."""

import functools

import pytest

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    PCAKameleonStep,
)

STEPS = {
    "kameleon": functools.partial(KameleonStep, n_subsample=100, steps_per_draw=1),
    "fast_kameleon": functools.partial(FastKameleonStep, n_features=60, steps_per_draw=1),
    "pca_kameleon": functools.partial(PCAKameleonStep, n_subsample=100, steps_per_draw=1),
    "adaptive_metropolis": functools.partial(AdaptiveMetropolisStep, steps_per_draw=1),
}
"""Name -> how to make one with the options that keep a test short, a transition a draw."""

DEFAULTS = {
    "kameleon": KameleonStep,
    "fast_kameleon": FastKameleonStep,
    "pca_kameleon": PCAKameleonStep,
    "adaptive_metropolis": AdaptiveMetropolisStep,
}


@pytest.fixture(params=list(STEPS))
def make_step(request):
    """Every step in turn, as a function of the arguments that all of them take."""
    return STEPS[request.param]


@pytest.fixture(params=list(DEFAULTS))
def step_class(request):
    """Every step's class in turn."""
    return DEFAULTS[request.param]
