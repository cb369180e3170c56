"""Long NUTS runs as reference values, kept in `references.json` with their Monte Carlo errors.

`python tests/references.py` makes them anew, in minutes; a test compares a short run with them in
standard errors of both.
"""

import json
from pathlib import Path

import arviz as az
import numpy as np

__all__ = ["moments", "reference", "z_scores"]

PATH = Path(__file__).with_suffix(".json")


def moments(draws) -> np.ndarray:
    """Means and mean squares with their Monte Carlo errors, (2 n, 2), of draws (chain, draw, n)."""
    draws = np.asarray(draws, dtype=float)
    found = []
    for i in range(draws.shape[-1]):
        one = np.ascontiguousarray(draws[..., i])
        for power in (one, one**2):
            found.append((power.mean(), power.std() / np.sqrt(float(az.ess(power)))))
    return np.array(found)


def reference(name: str) -> np.ndarray:
    """Return what `moments` gave for a long run, shape (2 n, 2)."""
    return np.array(json.loads(PATH.read_text())[name])


def z_scores(draws, name: str) -> np.ndarray:
    """Differences of `moments` from the reference, in standard errors of both."""
    found, expected = moments(draws), reference(name)
    return (found[:, 0] - expected[:, 0]) / np.hypot(found[:, 1], expected[:, 1])


def make() -> None:
    """Sample every model for long, and write the references."""
    import pymc as pm
    import test_latent_steps
    import test_posteriors

    models = {
        "hierarchical_poisson": (test_posteriors.hierarchical_poisson, test_posteriors.numbers),
        "ordered_mixture": (test_posteriors.ordered_mixture, test_posteriors.numbers),
        "counts": (test_latent_steps.counts_with_hyperparameters, test_latent_steps.numbers),
        "glass": (test_latent_steps.glass_classification, test_latent_steps.function_values),
    }
    found = {}
    for name, (make_model, numbers) in models.items():
        with make_model():
            idata = pm.sample(
                10_000, tune=2000, chains=4, random_seed=1, target_accept=0.95, progressbar=False
            )
        found[name] = moments(numbers(idata)).round(6).tolist()
    PATH.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    make()
