"""Hares and lynx of the Hudson Bay: an ODE model without gradients, sampled in two ways.

Run it with ``python -m pymc_kameleon``.
"""

from pymc_kameleon.demo.command import (
    SamplerRun,
    comparison_table,
    run_demo,
    sample_both,
    summary_table,
)
from pymc_kameleon.demo.figure import lynx_hare_figure
from pymc_kameleon.demo.model import LotkaVolterra, lynx_hare_model, solve_lotka_volterra

__all__ = [
    "LotkaVolterra",
    "SamplerRun",
    "comparison_table",
    "lynx_hare_figure",
    "lynx_hare_model",
    "run_demo",
    "sample_both",
    "solve_lotka_volterra",
    "summary_table",
]
