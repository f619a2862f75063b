#!/usr/bin/env bash
# All that needs several GPUs of one machine: one table, one JSON file in bench/results.
#   bench/run_multi_gpu.sh              every visible GPU
#   bench/run_multi_gpu.sh --ranks 2    some; further options as of `python -m bench.multi_gpu`
# PYTHON                interpreter (python3)
# DDTREE_NUMBA_COMMIT   what is measured, where the sources are a copy without their repository
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m bench.multi_gpu "$@"
