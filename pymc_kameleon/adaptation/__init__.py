"""What a chain learns while it is tuned: a `Learner` for each algorithm.

That of `KameleonStep` is in its own file, that of trajectories in `surrogate.learner`
and that of the joint step of a latent function in `latent_gp.hyperparameters.learning`.
"""
