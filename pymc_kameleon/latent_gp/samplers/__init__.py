"""Transitions of a latent function."""
