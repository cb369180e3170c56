"""Pictures of what steps have learnt and found."""

from pymc_kameleon.plots.proposal_contours import plot_proposals
from pymc_kameleon.plots.results import plot_adaptation, plot_efficiency, plot_evidence
from pymc_kameleon.plots.surrogate import plot_surrogate
from pymc_kameleon.plots.temperatures import plot_tempering

__all__ = [
    "plot_adaptation",
    "plot_efficiency",
    "plot_evidence",
    "plot_proposals",
    "plot_surrogate",
    "plot_tempering",
]
