#!/usr/bin/env bash
# All that needs several GPUs of one machine: tables, and two JSON files in bench/results.
#   bench/run_multi_gpu.sh              every visible GPU
#   bench/run_multi_gpu.sh --ranks 2    some; further options as of `python -m bench.multi_gpu`
# PYTHON                     interpreter (python3)
# DDTREE_NUMBA_COMMIT        what is measured, where the sources are a copy without their repository
# DDTREE_NUMBA_RESULTS_DIR   where the JSON files go
# STEP                       options of `python -m bench.step_ranks` (full-size ranks); no: leave it out
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} PYTHONUNBUFFERED=1
code=0
"${PYTHON:-python3}" -m bench.multi_gpu "$@" || code=$?
if [ "${STEP:-}" != no ]; then
    # shellcheck disable=SC2086  # options, to be split
    "${PYTHON:-python3}" -m bench.step_ranks ${STEP:-} || code=$?
fi
exit $code
