"""Evaluations that are kept in a file, and shared."""

from pymc_kameleon.store.evaluation_store import EvaluationStore

__all__ = ["EvaluationStore"]
