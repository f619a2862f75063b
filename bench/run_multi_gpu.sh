#!/usr/bin/env bash
# All that needs several GPUs of one machine: tables, and one JSON file in bench/results.
#   bench/run_multi_gpu.sh                  every visible GPU
#   bench/run_multi_gpu.sh --part step      one part; further options: --help
# PYTHON                     interpreter (python3)
# DDTREE_NUMBA_COMMIT        what is measured, where the sources are a copy without their repository
# DDTREE_NUMBA_RESULTS_DIR   where the JSON file goes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
"$python" -m bench.packages "$0" numpy ml_dtypes tiktoken jinja2 tqdm numba numba_cuda cupy
exec "$python" -m bench.multi_gpu "$@"
