"""Measurements: what a round accepts, and what kernels take."""
