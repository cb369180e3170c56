"""A name is no part of a model: a `pm.Deterministic` changes no draw of a latent Gaussian model."""

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from models import COUNTS, UNCOMPILED, begin, drive, latent
from pytensor.graph.traversal import io_toposort
from test_latent_gp_step import hierarchical, regression, scaled
from test_latent_reading import LIKELIHOODS, PRIORS, standard_normal_function
from test_latent_vector import MODELS, N, RING, made, names, predicted

from benchmarks.latent_models import PROBLEMS
from pymc_kameleon import EllipticalSliceStep, LatentGPStep
from pymc_kameleon.latent_gp.joint.joint_model import JointModel
from pymc_kameleon.latent_gp.reading import LatentFunction, free_variable


def with_all_kept(model):
    """Name everything real that the model computes, and use what has the name in its place."""
    random, kept = {*model.basic_RVs, *model.potentials}, {}
    with model:
        for node in io_toposort([], list(random)):
            node.inputs[:] = [kept.get(v, v) for v in node.inputs]
            for i, made in enumerate(node.outputs):
                if getattr(made.type, "dtype", "")[:5] == "float" and made not in model.potentials:
                    kept[made] = pm.Deterministic(f"kept_{len(kept)}_{i}", made)
    return model
