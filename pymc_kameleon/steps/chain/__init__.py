"""The life of one chain, the same for every step: start, tuning, report, and its saved state."""
