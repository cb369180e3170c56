"""Log evidence of a model from draws that carry it, and estimates that every method shares."""

from pymc_kameleon.evidence.from_draws import compare_evidence, log_evidence

__all__ = ["compare_evidence", "log_evidence"]
