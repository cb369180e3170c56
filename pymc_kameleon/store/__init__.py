"""Evaluations of expensive likelihoods: kept in a file, and read by other chains and runs."""

from pymc_kameleon.store.evaluation_store import EvaluationStore

__all__ = ["EvaluationStore"]
