"""Hyperparameters moved together with the latent function, as `LatentGPStep` does."""
