"""Targets with known posteriors, and simulators like those of practice, to try samplers on."""

from pymc_kameleon.targets.densities import Banana, CorrelatedGaussian, Flower, Ring, Target

__all__ = ["Banana", "CorrelatedGaussian", "Flower", "Ring", "Target"]
