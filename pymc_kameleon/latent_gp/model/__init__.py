"""Prior and likelihood of a latent function, read from a PyMC model."""
