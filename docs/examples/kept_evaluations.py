"""Keep every evaluation of an expensive likelihood, and go on where a run ended."""

import tempfile
from pathlib import Path

import numpy as np
import pymc as pm

from pymc_kameleon import EvaluationStore, SurrogateHMCStep, black_box

file = Path(tempfile.mkdtemp()) / "run.sqlite"  # a path of your own


@black_box
def log_likelihood(x):  # any function without a gradient
    return np.asarray(-0.5 * ((x[0] - 1) ** 2 / 0.1 + (x[1] - x[0] ** 2) ** 2 / 0.2))


def run(prior_sd, seed):
    with pm.Model():
        x = pm.Normal("x", 0, prior_sd, shape=2)
        pm.Potential("log_likelihood", log_likelihood(x))
        step = SurrogateHMCStep(store=EvaluationStore(file))
        return pm.sample(tune=100, draws=200, chains=2, cores=1, step=step, random_seed=seed)


first = run(prior_sd=2.0, seed=1)
second = run(prior_sd=1.0, seed=2)  # another prior, the same likelihood: it begins with all known

print(EvaluationStore(file).summary()["evaluations"], "evaluations by 4 chains")
