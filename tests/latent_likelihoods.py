"""Factorising likelihoods in closed form, to test what takes them apart from any PyMC model."""

import numpy as np
from scipy.special import erfcx, expit, gammaln, log_ndtr

from pymc_kameleon.latent_gp.gaussian.sites import factorised


class ClosedForm:
    """Base: a subclass gives `terms`."""

    probit_labels = None

    def __init__(self, y):
        self.y = np.asarray(y, dtype=float)
        self.size = len(self.y)
        self.n_calls = 0

    def elementwise(self, f):
        return self.terms(f)[0]

    def value(self, f):
        return float(self.elementwise(f).sum())


class Probit(ClosedForm):
    """log Phi(y f), for moderate f."""

    def __init__(self, y):
        super().__init__(y)
        self.probit_labels = self.y

    def terms(self, f):
        self.n_calls += 1
        z = self.y * f
        rho = np.sqrt(2 / np.pi) / erfcx(-z / np.sqrt(2))
        second = -rho * (z + rho)
        third = -rho * (1 - (z + rho) * (z + 2 * rho))
        return np.stack([log_ndtr(z), self.y * rho, second, self.y * third])


class Logit(ClosedForm):
    """log sigmoid(y f)."""

    def terms(self, f):
        self.n_calls += 1
        z = self.y * f
        s = expit(-z)
        return np.stack(
            [-np.logaddexp(0, -z), self.y * s, -s * (1 - s), self.y * s * (1 - s) * (1 - 2 * s)]
        )


class Poisson(ClosedForm):
    """Counts with rate exp(f)."""

    def terms(self, f):
        self.n_calls += 1
        rate = np.exp(f)
        return np.stack([self.y * f - rate - gammaln(self.y + 1), self.y - rate, -rate, -rate])


class Normal(ClosedForm):
    """N(y; f, sd^2): the posterior is a Gaussian."""

    def __init__(self, y, sd):
        super().__init__(y)
        self.sd = sd

    def terms(self, f):
        self.n_calls += 1
        z = (self.y - f) / self.sd
        zero = np.zeros(self.size)
        return np.stack(
            [
                -0.5 * z**2 - np.log(self.sd) - 0.5 * np.log(2 * np.pi),
                z / self.sd,
                zero - 1 / self.sd**2,
                zero,
            ]
        )


class StudentT(ClosedForm):
    """Student's t about f: not log-concave."""

    def __init__(self, y, df, sd):
        super().__init__(y)
        self.df, self.sd = df, sd

    def terms(self, f):
        self.n_calls += 1
        nu, s2 = self.df, self.sd**2
        r = f - self.y
        q = nu * s2 + r**2
        constant = (
            gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * np.log(nu * np.pi) - np.log(self.sd)
        )
        return np.stack(
            [
                constant - (nu + 1) / 2 * np.log1p(r**2 / (nu * s2)),
                -(nu + 1) * r / q,
                -(nu + 1) * (nu * s2 - r**2) / q**2,
                -(nu + 1) * 2 * r * (r**2 - 3 * nu * s2) / q**3,
            ]
        )


class Kinks(ClosedForm):
    """Asymmetric Laplace about f, of several observations (n, N): slopes `up` and -`down`."""

    def __init__(self, y, up, down):
        super().__init__(y)
        self.all, self.up, self.down = np.atleast_2d(y), up, down
        self.y, self.size = self.all[0], self.all.shape[1]

    def terms(self, f):
        self.n_calls += 1
        r, zero = self.all - f, np.zeros(self.size)
        constant = len(self.all) * np.log(self.up * self.down / (self.up + self.down))
        value = constant - np.where(r > 0, self.up * r, -self.down * r).sum(axis=0)
        return np.stack([value, np.where(r > 0, self.up, -self.down).sum(axis=0), zero, zero])


def squared_exponential(inputs, lengthscale, amplitude, jitter=1e-6):
    """Prior N(0, amplitude^2 exp(-|x - x'|^2 / (2 lengthscale^2)) + jitter amplitude^2 I)."""
    squares = (inputs**2).sum(axis=1)
    distances = np.maximum(squares[:, None] + squares - 2 * inputs @ inputs.T, 0)
    covariance = amplitude**2 * np.exp(-0.5 * distances / lengthscale**2)
    covariance[np.diag_indices_from(covariance)] += jitter * amplitude**2
    return factorised(np.zeros(len(inputs)), covariance)
