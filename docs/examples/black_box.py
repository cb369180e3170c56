"""A simulator without a gradient, as a likelihood."""

import arviz as az
import numpy as np
import pymc as pm
from scipy.integrate import solve_ivp

from pymc_kameleon import KameleonStep, black_box

days = np.array([1.0, 2.0, 4.0, 6.0, 9.0, 12.0])


def concentration(absorption, elimination):
    """A drug that passes from the gut into the blood, and out of it."""

    def slope(_, amount):
        gut, blood = amount
        return -absorption * gut, absorption * gut - elimination * blood

    return solve_ivp(slope, (0, 12), (10.0, 0.0), t_eval=days).y[1]


measured = concentration(0.9, 0.25) + 0.3 * np.random.default_rng(1).normal(size=days.size)


@black_box
def log_likelihood(absorption, elimination, sigma):  # any function that returns a number
    errors = (measured - concentration(absorption, elimination)) / sigma
    return np.asarray(-0.5 * np.sum(errors**2) - days.size * np.log(sigma))


with pm.Model() as model:
    absorption = pm.LogNormal("absorption", 0, 1)
    elimination = pm.LogNormal("elimination", -1, 1)
    sigma = pm.HalfNormal("sigma", 1)
    pm.Potential("log_likelihood", log_likelihood(absorption, elimination, sigma))

    idata = pm.sample(tune=500, draws=1000, chains=4, step=KameleonStep(), random_seed=1)

print(az.summary(idata))
