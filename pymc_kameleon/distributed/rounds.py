"""How tuning is divided into rounds."""

import math

from pymc_kameleon.validation import checked_integer

__all__ = ["shared_tuning", "tuning_rounds"]

POWER, LEAST_TUNING = 0.6, 60


def tuning_rounds(tune: int, rounds: int) -> list[int]:
    """Draws of each round, the last of which is the longest.

    Parameters
    ----------
    tune, rounds : int
    """
    rounds = min(checked_integer("rounds", rounds, 1), max(tune, 1))
    # The last one is double: only there a chain keeps what it learns of itself.
    length = max(1, tune // (rounds + 1))
    return [length] * (rounds - 1) + [tune - length * (rounds - 1)]


def shared_tuning(tune: int, chains: int) -> int:
    """Draws of tuning of each of several chains that share what they evaluate.

    Each has to learn its own step size and scales, so that it is more than a share of what one
    chain alone takes.

    Parameters
    ----------
    tune : int
        Of a chain alone.
    chains : int
    """
    return min(tune, max(LEAST_TUNING, math.ceil(tune / chains**POWER)))
