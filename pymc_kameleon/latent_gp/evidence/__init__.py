"""Estimates of log evidence."""
