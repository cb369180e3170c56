import numpy as np
import pymc as pm

from pymc_kameleon import black_box, log_evidence, surrogate_posterior

times, seen = np.array([1.0, 2.0, 4.0, 8.0]), np.array([0.72, 0.54, 0.27, 0.08])


@black_box
def simulator(size, rate):  # yours: an hour on a cluster
    return size * np.exp(-rate * times)


with pm.Model() as model:
    size, rate = pm.HalfNormal("size", 2.0), pm.HalfNormal("rate", 1.0)
    pm.Normal("seen", simulator(size, rate), 0.05, observed=seen)

idata = surrogate_posterior(model, n_evaluations=100, random_seed=1)
print(idata["posterior"].attrs["predicted_error"], log_evidence(idata))
