"""From the argument `kernel` of a step to a kernel that has what the step needs."""

from typing import Any

from pymc_kameleon.kernels.custom import CustomKernel
from pymc_kameleon.kernels.gaussian import Gaussian
from pymc_kameleon.kernels.inner_product import Linear, Polynomial
from pymc_kameleon.kernels.inverse_multiquadric import InverseMultiquadric
from pymc_kameleon.kernels.kernel import Kernel
from pymc_kameleon.kernels.laplacian import Laplacian
from pymc_kameleon.kernels.matern import Matern
from pymc_kameleon.kernels.sinc import Sinc, SincSquared
from pymc_kameleon.validation import checked_choice

__all__ = ["as_kernel"]

_BY_NAME = {
    "gaussian": Gaussian,
    "matern": Matern,
    "laplacian": Laplacian,
    "inverse_multiquadric": InverseMultiquadric,
    "sinc": Sinc,
    "sinc_squared": SincSquared,
    "linear": Linear,
    "polynomial": Polynomial,
}

_OWN = {
    "gradients": "CustomKernel(value, gradient)",
    "spectrum": "CustomKernel(value, frequencies=...)",
}


def _has(kernel, needs):
    return kernel.has_gradients if needs == "gradients" else kernel.has_spectrum


def _names(needs):
    return ", ".join(repr(name) for name, kind in _BY_NAME.items() if _has(kind(), needs))


def _lacking(kernel, needs):
    """Error message for the argument `kernel`, which has no gradients or no spectrum."""
    if needs == "gradients":
        return (
            f"kernel={kernel!r} has no gradient everywhere, which Kernel Adaptive "
            f"Metropolis-Hastings needs. Take one of {_names(needs)}, Matern(smoothness) above 1, "
            f"{_OWN[needs]}, or FastKameleonStep, which works with any kernel that has a spectrum."
        )
    return (
        f"kernel={kernel!r} has no spectral density, which random Fourier features need. "
        f"Take one of {_names(needs)}, or {_OWN[needs]}."
    )


def as_kernel(kernel: Any, needs: str = "gradients") -> Kernel:
    """Turn the argument `kernel` of a step into a `Kernel`.

    Parameters
    ----------
    kernel : Kernel, type, str, or pair of callables
        A kernel object or class, the name of one in lower case ("gaussian", "matern",
        "laplacian", "inverse_multiquadric", "sinc", "sinc_squared", "linear", "polynomial"), or
        (value, gradient) as `CustomKernel` takes them.
    needs : {"gradients", "spectrum"}
        What the kernel must have.

    Raises
    ------
    ValueError, TypeError
        If it is unknown, or lacks what is needed.
    """
    checked_choice("needs", needs, _OWN)
    if isinstance(kernel, Kernel):
        found = kernel
    elif isinstance(kernel, type) and issubclass(kernel, Kernel) and kernel is not CustomKernel:
        found = kernel()
    elif isinstance(kernel, tuple) and len(kernel) == 2:
        found = CustomKernel(*kernel)
    elif isinstance(kernel, str) and kernel.lower() in _BY_NAME:
        found = _BY_NAME[kernel.lower()]()
    elif isinstance(kernel, str):
        raise ValueError(
            f"kernel={kernel!r} is unknown. Take one of {_names(needs)}, or a Kernel object."
        )
    else:
        raise TypeError(
            f"kernel={kernel!r}: pass a Kernel object such as Gaussian(), one of {_names(needs)}, "
            f"or your own as {_OWN[needs]}; a value alone is not enough."
        )
    if not _has(found, needs):
        raise ValueError(_lacking(kernel, needs))
    return found
