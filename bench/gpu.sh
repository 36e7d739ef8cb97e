#!/usr/bin/env bash
# kvloom bench on a GPU: models of two known shapes with random weights, in at most eight minutes.
#
# Usage: bench/gpu.sh [OUT]
#
# The tables go to stdout, JSON and plots to OUT (or $OUT, or ./gpu-bench), a folder for each model. What matters most
# runs first; when the time is over, what runs is stopped and the rest is left out, and the exit code is 1.
# For a small trial: MODELS=random:toy LENGTHS=256 LONGEST=256 DEVICE=cpu DTYPE=float32 bench/gpu.sh
set -u
out=${1:-${OUT:-gpu-bench}}
kvloom=${KVLOOM:-kvloom}
models=${MODELS:-random:qwen3-0.6b random:llama-8b}
lengths=${LENGTHS:-8K,16K,32K}
longest=${LONGEST:-32K}
end=$(($(date +%s) + ${LIMIT_S:-465}))
code=0

bench() {  # NAME MODEL OPTIONS...
    local name=$1 model=$2 left=$((end - $(date +%s)))
    shift 2
    if [ "$left" -lt 5 ]; then
        echo "left out: bench $name of $model, the time is over"
        code=1
        return
    fi
    echo "== bench $name of $model, $left s left"
    # shellcheck disable=SC2086 # $kvloom may be several words
    timeout "$left" $kvloom bench "$name" -m "$model" --device "${DEVICE:-cuda}" --dtype "${DTYPE:-bfloat16}" \
        --out "$out/${model#random:}" "$@" 2>&1 || { echo "bench $name of $model ended with $?"; code=1; }
}

for model in $models; do
    bench ttft "$model" --lengths "$lengths" --ratios 0.05,0.15,0.3 --repeats 3 \
        --methods transformers,full,none,infoflow
done
for model in $models; do
    bench decode "$model" --lengths "$lengths" --steps 16 --repeats 2
    bench index "$model" --lengths "$longest" --repeats 3
done
for model in $models; do
    bench memory "$model" --lengths "$longest" --methods full,infoflow
done
exit $code
