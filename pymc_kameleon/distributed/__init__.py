"""Chains of one model on the workers of a Dask cluster."""

from pymc_kameleon.distributed.sample import sample

__all__ = ["sample"]
