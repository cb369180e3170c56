"""Gaussian-process classification of public data: what several benchmarks take apart."""

from pathlib import Path

import numpy as np
from scipy.io import loadmat

from pymc_kameleon.latent_gp.gaussian.sites import Gaussian, factorised

__all__ = ["read", "squared_exponential"]


def read(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (N, d) and labels (N,) of -1 and 1; inputs standardised, but for USPS."""
    if name == "usps":
        content = loadmat(folder / "usps3vs5.mat")
        return content["usps3vs5_data"], content["usps3vs5_labels"].ravel().astype(float)
    if name == "crabs":
        table = np.genfromtxt(folder / "crabs.csv", delimiter=",", skip_header=1, dtype=str)
        inputs, is_positive = table[:, 4:].astype(float), np.char.strip(table[:, 2], '"') == "M"
    else:
        table = np.loadtxt(folder / "glass.data", delimiter=",")
        inputs, is_positive = table[:, 1:-1], table[:, -1] <= 4
    inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
    return inputs, np.where(is_positive, 1.0, -1.0)


def squared_exponential(
    inputs: np.ndarray, log_lengthscale: float, log_amplitude: float, relative_jitter: float = 0.0
) -> Gaussian:
    """Prior N(0, amplitude^2 (exp(-|x - x'|^2 / (2 lengthscale^2)) + jitter I))."""
    squares = (inputs**2).sum(axis=1)
    distances = np.maximum(squares[:, None] + squares - 2 * inputs @ inputs.T, 0.0)
    covariance = np.exp(-0.5 * distances / np.exp(2 * log_lengthscale))
    covariance[np.diag_indices_from(covariance)] += relative_jitter
    covariance *= np.exp(2 * log_amplitude)
    return factorised(np.zeros(len(inputs)), covariance)
