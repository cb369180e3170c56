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
    "kameleon": functools.partial(KameleonStep, n_subsample=100),
    "fast_kameleon": functools.partial(FastKameleonStep, n_features=60),
    "pca_kameleon": functools.partial(PCAKameleonStep, n_subsample=100),
    "adaptive_metropolis": AdaptiveMetropolisStep,
}
"""Name -> how to make one with the options that keep a test short."""

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
