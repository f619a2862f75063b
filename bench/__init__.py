"""Measurements: what a round accepts, and what kernels take."""

import sys

if sys.argv[:1] == ["-m"]:  # `python -m bench.x`, of which this is imported first
    program = next((word for word in sys.orig_argv if word.startswith("bench.")), "")
    if program in ("bench.bench_step", "bench.multi_gpu", "bench.rounds"):
        from bench import packages

        packages.main(program, *packages.GPU)
