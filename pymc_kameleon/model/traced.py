"""Which variables of a model a trace has."""

import pymc as pm


def traced(model: pm.Model, var_names: list[str] | None) -> list:
    """Return the variables that a trace has, which are all those of the model without names."""
    if var_names is None:
        return model.unobserved_value_vars
    chosen = [v for v in model.unobserved_RVs if v.name in var_names]
    missing = sorted(set(var_names) - {v.name for v in chosen})
    if missing:
        known = ", ".join(v.name for v in model.unobserved_RVs)
        raise ValueError(f"var_names: the model has no {', '.join(missing)}; it has {known}.")
    return model.replace_rvs_by_values(chosen)
