"""Gaussian-process regression of a log density: covariances, fit, mean, and coordinates."""
