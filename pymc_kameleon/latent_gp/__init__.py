"""Models with a latent Gaussian process and a likelihood that factorises over its values."""
