"""A short chain of every step, kept: nothing that only rearranges code may change one.

A change that is meant prints what it gives now, with `python tests/test_reference_chains.py`.
"""

import functools
import logging

import numpy as np
import pymc as pm
import pytest
from models import PLAIN, run

from pymc_kameleon import (
    AdaptiveMetropolisStep,
    EllipticalSliceStep,
    FastKameleonStep,
    KameleonStep,
    MALAStep,
    PCAKameleonStep,
    RiemannianHMCStep,
)
from pymc_kameleon.surrogate import GPSurrogate

OURS = functools.partial(dict, steps_per_draw=5, disperse=False)
SURROGATE = functools.partial(OURS, surrogate=GPSurrogate())


def curved():
    with pm.Model() as model:
        a, b = pm.Normal("a", 0, 1), pm.HalfNormal("b", 2)
        c = pm.Normal("c", 0, 1, shape=2)
        pm.Normal("y", a**2 + b + c.sum(), 0.5, observed=1.5)
    return model


def latent():
    with pm.Model() as model:
        x = np.linspace(-2, 2, 5)
        f = pm.MvNormal("f", np.zeros(5), np.exp(-0.5 * (x - x[:, None]) ** 2) + 0.01 * np.eye(5))
        pm.Poisson("y", pm.math.exp(f), observed=np.array([0, 1, 3, 2, 0]))
    return model


STEPS = {
    "kameleon": (curved, KameleonStep, OURS()),
    "kameleon, in Python": (curved, KameleonStep, OURS(compile_kwargs=PLAIN)),
    "kameleon, with a surrogate": (curved, KameleonStep, SURROGATE()),
    "paper": (curved, KameleonStep.paper, OURS(n_subsample=50)),
    "fast": (curved, FastKameleonStep, OURS(n_features=30)),
    "thesis": (curved, FastKameleonStep.thesis, OURS(n_features=30)),
    "pca": (curved, PCAKameleonStep, OURS(n_components=4)),
    "metropolis": (curved, AdaptiveMetropolisStep, OURS()),
    "metropolis, with a surrogate": (curved, AdaptiveMetropolisStep, SURROGATE()),
    "mala": (curved, MALAStep, OURS(steps_per_draw=1)),
    "mala, with a surrogate": (curved, MALAStep, SURROGATE(steps_per_draw=4)),
    "slice": (latent, EllipticalSliceStep, {}),
    "riemannian": (latent, RiemannianHMCStep, {}),
}

CHAINS = {
    "kameleon": [0.109509575, 0.399828417, 0.338559906],
    "kameleon, in Python": [0.109509575, 0.399828417, 0.338559906],
    "kameleon, with a surrogate": [0.226905597, 0.248588212, 0.347412746],
    "paper": [0.030391375, 0.214232263, 0.662210602],
    "fast": [-1.043034205, -0.421514293, 0.3471719],
    "thesis": [0.054830615, 0.277404667, 0.296631074],
    "pca": [0.920363269, 0.416206641, 0.430382674],
    "metropolis": [-0.08826048, -0.100535854, 0.316121878],
    "metropolis, with a surrogate": [-0.39110263, 0.543363008, 0.30186751],
    "mala": [0.071284535, -0.486172854, 0.3562113],
    "mala, with a surrogate": [-0.050782516, -0.064324641, 0.584093754],
    "slice": [-0.769811565, -0.286424645, 3.6625],
    "riemannian": [-0.62687965, -0.510141006, 0.830194977],
}
"""Mean of the last twenty draws of the first and the last coordinate, and the mean acceptance."""


def chain(name):
    make_model, make_step, options = STEPS[name]
    model = make_model()
    draws, statistics, _ = run(make_step(model=model, **options), model, 80, tune=60, seed=11)
    shown = "accept" if "accept" in statistics[0] else "n_evals"
    found = [*draws[-20:].mean(axis=0)[[0, -1]], np.mean([s[shown] for s in statistics])]
    return [round(float(x), 9) for x in found]


# A surrogate knows nothing of PyMC, and is what takes longest to compile.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.numerics if "surrogate" in name else [])
        for name in STEPS
    ],
)
def test_the_chain_is_the_one_that_was_kept(name):
    # The optimiser that fits a surrogate ends within its tolerance, not at the same digits on every
    # processor: one was seen 3e-4 away. Another decision of the chain moves the means by 1e-2.
    tolerance = 2e-3 if "surrogate" in name else 1e-6
    np.testing.assert_allclose(chain(name), CHAINS[name], rtol=1e-4, atol=tolerance)


if __name__ == "__main__":
    logging.disable()
    print("CHAINS = {")
    for name in STEPS:
        print(f'    "{name}": {chain(name)},')
    print("}")
