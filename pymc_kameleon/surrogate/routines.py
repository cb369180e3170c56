"""What a first stage calls: in plain Python, or compiled once, whatever proposes."""

import functools

import numpy as np
from numba import typeof, types

from pymc_kameleon.mcmc.numba_bridge import jit, machine_code_address
from pymc_kameleon.surrogate.delayed_acceptance import (
    Routines,
    accept_with_current_mean,
    accept_with_values,
    learn,
)
from pymc_kameleon.surrogate.langevin_delayed_acceptance import accept_with_gradients
from pymc_kameleon.surrogate.sparse_gp import add_centre

__all__ = ["compiled_routines", "plain_routines"]

# Nothing but compiled code calls them.
_compiled = functools.cache(jit(no_cpython_wrapper=True))


def _acceptance(stage):
    if stage.gradients.shape[1] > 0:
        return accept_with_gradients
    return accept_with_current_mean if stage.follows[0] else accept_with_values


def plain_routines(stage) -> Routines:
    """Return what a `FirstStage` calls in plain Python."""
    return Routines(_acceptance(stage), learn, add_centre)


_found: dict = {}


def compiled_routines(stage, chain) -> Routines:
    """Return the addresses that a `FirstStage` of a `Chain` calls in compiled code.

    Both classes always bring arrays of the same types, so they are looked at once a process.
    """
    accept = _acceptance(stage)
    if accept not in _found:
        table = np.zeros(0, np.intp)
        stage = stage._replace(routines=Routines(0, 0, 0), log_prior=table)
        _found[accept] = _addresses(accept, typeof(stage), typeof(chain), typeof(table))
    return _found[accept]


def _addresses(accept, stage, chain, table):
    number, vector, matrix = types.float64, types.float64[::1], types.float64[:, ::1]
    move = (matrix, number) if accept is accept_with_gradients else (number,)
    process = stage[stage.fields.index("process")]
    return Routines(
        machine_code_address(_compiled(accept), (stage, table, chain, *move, vector)),
        machine_code_address(_compiled(learn), (stage, chain, types.boolean)),
        machine_code_address(add_centre, (process, vector, number)),
    )
