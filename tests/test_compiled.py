"""What is compiled once stays so: settings and life cycle never ask for a second version."""

import numpy as np
import pytest

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    FastKameleonStep,
    KameleonStep,
    PCAKameleonStep,
)
from pymc_kameleon.targets import Banana
from pymc_kameleon.transitions import adaptive_metropolis

MODEL = Banana(0.03, dim=3).model()
POINTS = np.random.default_rng(0).normal(size=(200, 3))

SETTINGS = {
    "default": lambda: KameleonStep(model=MODEL, steps_per_draw=5),
    "pure kernel, integers": lambda: KameleonStep(model=MODEL, global_share=0, gamma=1, scaling=2),
    "warm": lambda: KameleonStep(model=MODEL, warm_start=POINTS),
    "paper": lambda: KameleonStep.paper(model=MODEL, bandwidth=10),
    "linear": lambda: KameleonStep(model=MODEL, kernel="linear"),
    "fast": lambda: FastKameleonStep(model=MODEL, steps_per_draw=5),
    "fast, warm": lambda: FastKameleonStep(model=MODEL, warm_start=POINTS, embedding="shifted"),
    "fast, thesis": lambda: FastKameleonStep.thesis(model=MODEL, n_features=20),
    "pca": lambda: PCAKameleonStep(model=MODEL, steps_per_draw=5),
    "pca, warm": lambda: PCAKameleonStep(model=MODEL, warm_start=POINTS, n_components=3),
    "pca, raw": lambda: PCAKameleonStep(model=MODEL, standardize=False, bandwidth=10, gamma=1),
    "adaptive": lambda: AdaptiveMetropolisStep(model=MODEL),
    "adaptive, started": lambda: AdaptiveMetropolisStep(model=MODEL, initial_covariance=np.eye(3)),
    "adaptive, fixed": lambda: AdaptiveMetropolisStep(model=MODEL, covariance=np.eye(3, dtype=int)),
    "adaptive, warm": lambda: AdaptiveMetropolisStep(model=MODEL, warm_start=POINTS),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_signature_serves_all_settings(settings):
    step, point = SETTINGS[settings](), MODEL.initial_point()
    for _ in range(600):
        point, _ = step.step(point)
    step.sampling_state = step.sampling_state
    step.stop_tuning()
    step.step(point)
    compiled = getattr(step, "transitions", adaptive_metropolis)
    assert len(compiled.run_compiled.signatures) == 1
