"""Lossless DDTree speculative decoding of Kimi K2.6."""
