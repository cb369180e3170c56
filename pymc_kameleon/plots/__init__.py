"""Pictures of what steps have learnt and found."""

from pymc_kameleon.plots.adaptation import plot_adaptation
from pymc_kameleon.plots.efficiency import plot_efficiency
from pymc_kameleon.plots.evidence_estimates import plot_evidence
from pymc_kameleon.plots.proposals import plot_proposals
from pymc_kameleon.plots.surrogate import plot_surrogate

__all__ = [
    "plot_adaptation",
    "plot_efficiency",
    "plot_evidence",
    "plot_proposals",
    "plot_surrogate",
]
