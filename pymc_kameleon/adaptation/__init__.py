"""What a random walk learns while it is tuned: a `Learner` for each algorithm.

That of `KameleonStep` is in its own file; one that fits a surrogate is beside what it fits, in
`surrogate.learner` and `latent_gp.hyperparameters.learning`.
"""
