"""Transitions: one loop, the proposals that it runs, and their acceptance."""
