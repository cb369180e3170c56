"""Gaussian approximations of the posterior of a latent function."""
