"""Kernels: values, gradients and spectral densities, a file for each family."""

from pymc_kameleon.kernels.bandwidth import median_bandwidth
from pymc_kameleon.kernels.custom import CustomKernel
from pymc_kameleon.kernels.gaussian import Gaussian
from pymc_kameleon.kernels.inner_product import Linear, Polynomial
from pymc_kameleon.kernels.inverse_multiquadric import InverseMultiquadric
from pymc_kameleon.kernels.kernel import Kernel
from pymc_kameleon.kernels.laplacian import Laplacian
from pymc_kameleon.kernels.matern import Matern
from pymc_kameleon.kernels.registry import as_kernel
from pymc_kameleon.kernels.sinc import Sinc, SincSquared

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
