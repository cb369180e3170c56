"""Log evidence of a model from draws that carry it, and estimates that every method shares."""

from pymc_kameleon.evidence.log_evidence import compare_evidence, log_evidence

__all__ = ["compare_evidence", "log_evidence"]
