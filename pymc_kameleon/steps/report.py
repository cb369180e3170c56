"""What a chain keeps of itself, for its warnings and for the statistics of its surrogate."""

from dataclasses import dataclass, field

from pymc.stats.convergence import WarningType

__all__ = ["Report"]


@dataclass
class Report:
    """Counts of a chain, and the warnings that it has given.

    Attributes
    ----------
    unmoved : int
        Transitions since the last draw with an accepted move.
    rejections : int
        Moves rejected in a row while tuning, where the likelihood is an estimate.
    acceptance : float
        Mean acceptance of late.
    evaluations, nonfinite : float
        Log-density evaluations; and log densities that were NaN or +inf, evaluated or known.
    failed : int
        Points of start and tuning at which the log density raised an error.
    first_failure : str or None
        Where, and which.
    known : float
        Log densities that were known from a store.
    foreign_seed : float
        `kept_estimate.foreign_seed` at the start of the chain.
    calls_made, calls_saved : int
        With a surrogate: evaluations, and transitions without one.
    screened, passed : float
        Proposals that the surrogate saw, and summed probabilities of passing it.
    is_examined : bool
        Whether the estimate that the chain stands on has been compared with others.
    pending : (WarningType, str) or None
        A warning for the next draw.
    told : set of str
        Kinds of warnings that are not to be given (again).
    """

    unmoved: int = 0
    rejections: int = 0
    acceptance: float = 0.0
    evaluations: float = 0.0
    nonfinite: float = 0.0
    failed: int = 0
    first_failure: str | None = None
    known: float = 0.0
    foreign_seed: float = 0.0
    calls_made: int = 0
    calls_saved: int = 0
    screened: float = 0.0
    passed: float = 0.0
    is_examined: bool = False
    pending: tuple[WarningType, str] | None = None
    told: set[str] = field(default_factory=set)
