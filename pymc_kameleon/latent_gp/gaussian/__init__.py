"""Gaussian algebra: sites, blocks of sites, and sparse Cholesky factors."""
