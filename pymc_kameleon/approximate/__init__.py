"""An approximate posterior from a few hundred evaluations: `surrogate_posterior`."""
