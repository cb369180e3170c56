"""Kernels: values, gradients and spectral densities."""

from pymc_kameleon.kernels.families import (
    Gaussian,
    InverseMultiquadric,
    Laplacian,
    Linear,
    Matern,
    Polynomial,
    Sinc,
    SincSquared,
    as_kernel,
    median_bandwidth,
)
from pymc_kameleon.kernels.kernel import CustomKernel, Kernel

__all__ = [
    "CustomKernel",
    "Gaussian",
    "InverseMultiquadric",
    "Kernel",
    "Laplacian",
    "Linear",
    "Matern",
    "Polynomial",
    "Sinc",
    "SincSquared",
    "as_kernel",
    "median_bandwidth",
]
