#!/usr/bin/env bash
# Needs a CUDA GPU: run the tests marked gpu, the kernel's benchmark and a short training run, then print a summary.
# bash bench/gpu_check.sh
set -u
cd "$(dirname "$0")/.."
log=$(mktemp -d)
python -m pytest -q -m gpu tests | tee "$log/tests"; tests=${PIPESTATUS[0]}
python -m bench.rope gpu | tee "$log/bench"; bench=${PIPESTATUS[0]}
python train.py pos=rope name=gpu-check fresh=true steps=500 kernel=triton | tee "$log/train"; train=${PIPESTATUS[0]}
python eval.py run=gpu-check ctx=8192 scaling=yarn kernel=triton | tee "$log/eval"; eval=${PIPESTATUS[0]}
echo; echo "summary"
row() { printf '%-22s %-7s %s\n' "$1" "$([ "$2" = 0 ] && echo ok || echo FAILED)" "$3"; }
row "tests marked gpu" "$tests" "$(tail -1 "$log/tests")"
row "benchmark" "$bench" "$(grep -m1 ' ours  *contiguous  *forward ' "$log/bench")"
row "training" "$train" "$(grep '^trained' "$log/train")"
row "evaluation" "$eval" "$(grep '^gain over' "$log/eval")"
[ $((tests + bench + train + eval)) = 0 ]
