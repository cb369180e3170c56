"""A PyMC model as functions of one raveled, unconstrained vector."""
