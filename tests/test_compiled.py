"""What is compiled once stays so: settings and life cycle never ask for a second version."""

import numpy as np
import pytest

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    PCAKameleonStep,
)
from pymc_kameleon.mcmc.loop import run_compiled
from pymc_kameleon.targets import Banana

MODEL = Banana(0.03, dim=3).model()
POINTS = np.random.default_rng(0).normal(size=(200, 3))

SETTINGS = {
    "default": lambda: KameleonStep(model=MODEL, steps_per_draw=5),
    "pure kernel, integers": lambda: KameleonStep(model=MODEL, global_share=0, gamma=1, scaling=2),
    "paper": lambda: KameleonStep.paper(model=MODEL, bandwidth=10),
    "linear": lambda: KameleonStep(model=MODEL, kernel="linear"),
    "fast": lambda: FastKameleonStep(model=MODEL, steps_per_draw=5),
    "fast, thesis": lambda: FastKameleonStep.thesis(model=MODEL, n_features=20),
    "pca": lambda: PCAKameleonStep(model=MODEL, steps_per_draw=5),
    "adaptive": lambda: AdaptiveMetropolisStep(model=MODEL),
    "adaptive, fixed": lambda: AdaptiveMetropolisStep(model=MODEL, covariance=np.eye(3, dtype=int)),
}


@pytest.mark.numerics
@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_one_signature_serves_all_settings(settings):
    step, point = SETTINGS[settings](), MODEL.initial_point()
    for _ in range(600):
        point, _ = step.step(point)
    step.sampling_state = step.sampling_state
    step.stop_tuning()
    step.step(point)
    kind = type(step.learner.proposal(compiled=True)).__name__
    assert len([s for s in run_compiled.signatures if f"{kind}(" in str(s)]) == 1
