"""A surrogate of your own: fitted beforehand to evaluations at a design of your choice.

The first stage of delayed acceptance then screens proposals from the start.
"""

import numpy as np
import pymc as pm
from scipy.stats import qmc

from pymc_kameleon import AdaptiveMetropolisStep, GPSurrogate, black_box


def log_likelihood(x):
    """Stand for a simulator of two parameters."""
    return -0.5 * ((x[0] - 0.5) ** 2 / 0.2 + (x[1] - x[0] ** 2) ** 2 / 0.1)


def design(n):
    """Return n points (n, 2) that fill the square from -3 to 3 evenly."""
    return qmc.scale(qmc.Sobol(2, seed=1).random(n), -3, 3)


def fitted_surrogate(n=64):
    """Fit a Gaussian process with a Matern covariance to the log-likelihood at the design.

    Points are raveled and unconstrained, as the steps see them; values are log-likelihoods, without
    the prior.
    """
    points = design(n)
    values = np.array([log_likelihood(point) for point in points])
    return GPSurrogate(kernel="matern").fit(points, values)


def model():
    """Return the model; its two parameters have no transform, so unconstrained is natural."""
    with pm.Model() as found:
        x = pm.Normal("x", 0, 2, shape=2)
        pm.Potential("log_likelihood", black_box(log_likelihood)(x))
    return found


if __name__ == "__main__":
    with model():
        step = AdaptiveMetropolisStep(surrogate=fitted_surrogate())
        idata = pm.sample(tune=200, draws=500, step=step, random_seed=1)
    statistics = idata.sample_stats
    print(float(statistics["surrogate_accept"].mean()), statistics["calls_saved"][:, -1].values)
