"""A linear regression, sampled without its gradient."""

import arviz as az
import numpy as np
import pymc as pm

from pymc_kameleon import KameleonStep

rng = np.random.default_rng(1)
x = rng.normal(size=50)
y = 1 + 2 * x + rng.normal(size=50)

with pm.Model() as model:  # any model with continuous free variables
    intercept = pm.Normal("intercept", 0, 10)
    slope = pm.Normal("slope", 0, 10)
    sigma = pm.HalfNormal("sigma", 5)
    pm.Normal("y", intercept + slope * x, sigma, observed=y)

    idata = pm.sample(step=KameleonStep(), chains=4, random_seed=1)

print(az.summary(idata))
