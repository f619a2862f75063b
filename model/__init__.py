"""Configuration, weights, cache and forward passes of the target and of the drafter."""
