"""What `KameleonStep`, `FastKameleonStep` and `PCAKameleonStep` share: their arguments."""

from collections.abc import Callable
from typing import Any

from pymc_kameleon.adaptation.subsample import SubsampleLearner
from pymc_kameleon.kernels import Gaussian, Kernel, as_kernel
from pymc_kameleon.steps.metropolis_hastings import MetropolisHastingsStep


class KernelAdaptiveStep(MetropolisHastingsStep):
    """Base of the steps whose proposals come from a kernel of the chain's history.

    A subclass gives its `learner_class`, and the `own` arguments of that; `kernel_needs` is what
    the kernel must have, as `as_kernel` takes it.
    """

    learner_class: type[SubsampleLearner]
    kernel_needs = "gradients"
    _not_arguments: tuple[str, ...] = ("learner", "own")

    def __init__(
        self,
        vars,
        *,
        own: dict[str, Any],
        kernel: Kernel | str | tuple[Callable, Callable] | None = None,
        bandwidth: float | str = "median",
        gamma: float | None = None,
        scaling: float | None = None,
        learn_scaling: bool = True,
        standardize: bool = True,
        global_share: float = 0.8,
        learning_rate: float = 1.0,
        learning_decay: float = 0.5,
        **options: Any,
    ):
        learner = self.learner_class(
            kernel=Gaussian() if kernel is None else as_kernel(kernel, needs=self.kernel_needs),
            bandwidth=bandwidth,
            gamma=gamma,
            scaling=scaling,
            learn_scaling=learn_scaling,
            standardize=standardize,
            global_share=global_share,
            learning_rate=learning_rate,
            learning_decay=learning_decay,
            **own,
        )
        super().__init__(vars, learner=learner, **options)
