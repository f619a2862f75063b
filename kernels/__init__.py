"""Numba CUDA kernels: one file an operation, named as its specification."""
