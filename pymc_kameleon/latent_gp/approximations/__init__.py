"""Gaussians in the place of the posterior of a latent function."""
