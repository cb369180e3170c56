"""Public data sets of binary classification, read from the folder PYMC_KAMELEON_DATA names."""

import os
from pathlib import Path

import numpy as np
import pytest
from scipy.io import loadmat


def data_file(name):
    """Path of a file of the folder; skips the test where it is not there."""
    folder = os.environ.get("PYMC_KAMELEON_DATA")
    if not folder:
        pytest.skip(f"{name} is read from the folder that PYMC_KAMELEON_DATA names; it is not set")
    path = Path(folder) / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


def standardised(inputs):
    """Every column with mean 0 and standard deviation 1."""
    return (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)


def glass():
    """UCI glass identification: standardised inputs (214, 9) and labels, +1 for class <= 4."""
    table = np.loadtxt(data_file("glass.data"), delimiter=",")
    return standardised(table[:, 1:-1]), np.where(table[:, -1] <= 4, 1.0, -1.0)


def crabs():
    """Crabs of MASS: standardised inputs (200, 5) and labels, +1 for male."""
    path = data_file("crabs.csv")
    inputs = np.loadtxt(path, delimiter=",", skiprows=1, usecols=range(4, 9))
    sex = np.loadtxt(path, delimiter=",", skiprows=1, usecols=2, dtype=str)
    return standardised(inputs), np.where(np.char.strip(sex, '"') == "M", 1.0, -1.0)


def usps():
    """USPS digits, 3 against 5 (Kuss & Rasmussen 2005): inputs (767, 256) and labels."""
    content = loadmat(data_file("usps3vs5.mat"))
    return content["usps3vs5_data"], content["usps3vs5_labels"].ravel().astype(float)
