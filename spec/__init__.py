"""Numpy specifications: one file an operation, and the only reference of the project."""
