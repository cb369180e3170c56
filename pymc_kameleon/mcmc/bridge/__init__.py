"""What compiled transitions need of Numba and PyTensor beyond what these document."""
