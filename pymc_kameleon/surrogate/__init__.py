"""Sampling with a surrogate of the log density: delayed acceptance, and surrogate HMC."""

from pymc_kameleon.surrogate.gp_surrogate import FittedSurrogate, GPSurrogate

__all__ = ["FittedSurrogate", "GPSurrogate"]
