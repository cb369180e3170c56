"""What the benchmarks report: a distance of marginals, and the cells of a table."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from pymc_kameleon.approximate.predicted_error import BANDWIDTH, marginal_total_variation

REFERENCE = np.random.default_rng(1).standard_normal((400_000, 2))


def test_normals_a_standard_deviation_apart_in_one_of_two_coordinates():
    """Smoothed normals are normals, whose distance has a closed form.

    The reference has a distance of 0.0018 to its own density, and draws as many as it another.
    """
    draws = np.random.default_rng(2).normal([1.0, 0.0], 1.0, (400_000, 2))
    apart = 2.0 * stats.norm.cdf(0.5 / np.sqrt(1.0 + BANDWIDTH**2)) - 1.0
    assert marginal_total_variation(draws, REFERENCE) == pytest.approx(apart / 2.0, abs=0.01)


def test_draws_that_all_lie_beyond_the_bins_have_distance_one():
    assert marginal_total_variation(REFERENCE + 100.0, REFERENCE) == pytest.approx(1.0, abs=1e-4)


def test_how_often_draws_are_repeated_does_not_count():
    """Density estimates with a bandwidth for each number of draws failed this by 0.02."""
    draws = REFERENCE[:500]
    repeated = marginal_total_variation(np.tile(draws, (20, 1)), REFERENCE)
    assert repeated == pytest.approx(marginal_total_variation(draws, REFERENCE))


def test_a_cell_of_the_comparison_has_the_median_over_seeds():
    """A star where one of the runs is doubtful; what ended the runs where most did not end."""
    cell = pytest.importorskip("benchmarks.compare", reason="the tests are not in a clone").cell
    runs = pd.DataFrame({"MMTV": [0.1, 0.9, 0.234], "R-hat": np.nan, "outcome": ""})
    assert cell(runs, "MMTV") == "0.23"
    assert cell(runs.assign(doubtful=["no", "no", "yes"]), "MMTV") == r"0.23\*"
    assert cell(runs.assign(**{"R-hat": [1.0, 1.2, 1.0]}), "MMTV") == r"0.23\*"
    assert cell(runs.assign(outcome=["", "over time", "over time"]), "MMTV") == "over time"
    assert cell(runs.assign(outcome="ValueError: ..."), "MMTV") == "failed"
