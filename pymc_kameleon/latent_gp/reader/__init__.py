"""From a PyMC model to its Gaussian variables, their prior, and a likelihood that factorises."""
