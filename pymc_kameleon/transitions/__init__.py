"""Markov transitions, written once: compiled where the log density is, plain Python elsewhere."""
