"""Black boxes of a log density, asked for their values at several points at once."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from pytensor.graph.traversal import ancestors

from pymc_kameleon.mcmc.chain import N_TERMS
from pymc_kameleon.model.black_box import Simulator
from pymc_kameleon.model.model_function import ModelFunction
from pymc_kameleon.model.operations import has_black_box, is_black_box


class Batches:
    """The black boxes of a log density, if all that it holds can be asked for several points.

    `size` is at how many a chain should ask at once; 1 where a black box takes one point at a time,
    or depends on another one. What they return is kept until the log density is evaluated at these
    points, or others are announced.
    """

    def __init__(self, function: ModelFunction):
        self._function = function
        found = [variable.owner for variable in ancestors(function.outputs) if variable.owner]
        nodes = [node for node in set(found) if is_black_box(node.op)]
        self._operations = {node.op for node in nodes}
        if all(map(_takes_several, nodes)):
            self.size = max((_box(op).n_at_once for op in self._operations), default=1)
        else:
            self.size = 1

    def announce(self, points: Sequence[np.ndarray]) -> None:
        """Call the black boxes at `points`, each (d,), where the log density will be evaluated."""
        boxes = {_box(op) for op in self._operations}
        for box in boxes:
            box.forget()
        if self.size == 1 or len(points) < 2:
            return
        # Their arguments are what the function itself computes: another one may round otherwise.
        for box in boxes:
            box.asked = []
        try:
            for point in points:
                with suppress(Exception):  # the evaluation itself will raise it
                    self._function.into(point, np.empty(N_TERMS))
        finally:
            asked = {box: box.taken_asked() for box in boxes}
        for box, requests in asked.items():
            box.evaluate_ahead(requests)


def _box(operation):
    """Return the black box of an operation; what keeps its values in a store has it as `op`."""
    return getattr(operation, "op", operation).black_box


def _takes_several(node):
    is_simulator = isinstance(getattr(node.op, "op", node.op), Simulator)
    return is_simulator and _box(node.op).n_at_once > 1 and not any(map(has_black_box, node.inputs))
