"""Hyperparameters and latent function together."""
