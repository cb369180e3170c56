"""What a chain learns while it is tuned: a `Learner` for each algorithm.

That of `KameleonStep` is in its own file, that of trajectories in `surrogate.trajectory_adaptation`
and that of the joint step of a latent function in `latent_gp.joint.learning`.
"""
