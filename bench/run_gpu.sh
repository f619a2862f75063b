#!/usr/bin/env bash
# All that needs a GPU, and one table at the end: tests, memcheck and racecheck over them, benches.
#   bench/run_gpu.sh                 everything
#   bench/run_gpu.sh tests bench     some of: tests memcheck racecheck initcheck synccheck bench
# PYTHON                     interpreter (python3)
# DDTREE_NUMBA_RESULTS_DIR   folder of the figures, the plot and the logs (bench/results; logs in build/gpu)
# DDTREE_NUMBA_COMMIT        what is measured, where the sources are a copy without their repository
# DDTREE_NUMBA_TESTS         what the three test steps run (tests)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
logs=${DDTREE_NUMBA_RESULTS_DIR:-build/gpu}
export DDTREE_NUMBA_RESULTS_DIR=${DDTREE_NUMBA_RESULTS_DIR:-bench/results}
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} PYTHONUNBUFFERED=1
export PATH=$PATH:/usr/local/cuda/bin

steps=${*:-tests memcheck racecheck bench}
needed=(numpy ml_dtypes numba numba_cuda cupy pytest pytest_timeout)
[[ $steps == bench ]] || needed+=(tiktoken jinja2 tqdm greenlet safetensors)
[[ " $steps " != *" bench "* ]] || needed+=(pytest_benchmark)
for name in $steps; do
    case $name in
    tests | memcheck | racecheck | initcheck | synccheck | bench) ;;
    *) echo "$0: no step $name: tests memcheck racecheck initcheck synccheck bench" >&2 && exit 2 ;;
    esac
done
"$python" -m bench.packages "$0" "${needed[@]}" && "$python" -m bench.device "$0" || exit
if [[ $steps == *check* ]] && ! command -v compute-sanitizer >/dev/null; then
    echo "$0: compute-sanitizer (CUDA toolkit) is not in PATH; tests and bench run without it" >&2
    exit 1
fi
mkdir -p "$logs" "$DDTREE_NUMBA_RESULTS_DIR"

# Library versions of a GPU machine may warn where the pinned ones do not.
pytest=("$python" -m pytest -q -m gpu -W default -p no:cacheprovider)
read -ra tested <<<"${DDTREE_NUMBA_TESTS:-tests}"
# A sanitizer slows kernels down a hundredfold: no time limit a test.
sanitized=(--error-exitcode 9 --report-api-errors no --print-limit 20)
summary=() failed=0

step() { # name, command...: runs it into a log, shows the end of the log where it fails
    local name=$1 start=$SECONDS status=0 log=$logs/$1.log
    shift
    echo "== $name"
    "$@" >"$log" 2>&1 || status=$?
    if ((status)); then
        failed=1
        tail -n 40 "$log"
    fi
    local last
    last=$(grep -E 'passed|failed|no tests ran|ERROR SUMMARY|RACECHECK SUMMARY|not found' "$log" | tail -n 2 | tr -s '= \n' ' ')
    summary+=("$(printf '| %-9s | %-9s | %5d s | %s |' "$name" "$( ((status)) && echo "FAILED $status" || echo ok)" $((SECONDS - start)) "$last")")
}

started=$(mktemp)
for name in $steps; do
    case $name in
    tests) step tests "${pytest[@]}" "${tested[@]}" ;;
    memcheck | racecheck | initcheck | synccheck)
        step "$name" compute-sanitizer --tool "$name" "${sanitized[@]}" \
            "${pytest[@]}" -p bench.unpooled --timeout=0 "${tested[@]}" ;;
    bench) step bench "${pytest[@]}" bench ;;
    esac
done

# Only what this run has measured: an older file stays where it is.
measured=$(find "$DDTREE_NUMBA_RESULTS_DIR" -name 'kernels-*.json' -newer "$started" | head -n 1)
rm "$started"
if [[ $measured ]]; then
    "$python" -m bench.report --results "$DDTREE_NUMBA_RESULTS_DIR" --file "$measured" | tee "$logs/report.md"
fi
printf '\n| step      | outcome   |    time | |\n|---|---|---:|---|\n'
printf '%s\n' "${summary[@]}"
exit $failed
