#!/usr/bin/env bash
# What needs a GPU, for a machine that is available for half an hour: bash bench/gpu_check.sh [STEP ...]
#
# Without STEP all of them run, in this order: tests, rope, steps, training, nanogpt. Each command ends after nine
# minutes at most, and the benchmarks append their rows to files of results/ as they come. One that fails does not keep
# the others from running; the exit code is then 1.
#
# Packages: those of README.md, and of the tests. bench.rope also measures liger-kernel and transformers where they are
# installed. NANOGPT is a checkout of github.com/karpathy/nanoGPT; only the last step needs it.
set -u
cd "$(dirname "$0")/.." || exit 1
export WANDB_MODE=disabled MPLBACKEND=Agg
PYTHON=${PYTHON:-python} steps=${*:-tests rope steps training nanogpt} failed=0
gpt2=(exp=gpt2 data=sympy data.vocab_size=16384 optim.warmup=20) # its corpus needs a network

run() { # run STEP ARGUMENTS of Python
    local name=$1 begun=$SECONDS verdict=ok
    shift
    [[ " $steps " == *" $name "* ]] || return
    timeout -k 10 540 "$PYTHON" "$@" || failed=1 verdict="failed with exit code $?"
    echo "$name: $verdict, $((SECONDS - begun)) s"
}

run tests -m pytest -q -n 0 -m gpu
run rope -m bench.rope --shapes 0 1 2
run steps -m bench.step "exp=gpt2 batch_tokens=32768 kernel="{triton,torch}
for kernel in triton torch; do
    run training train.py "${gpt2[@]}" kernel=$kernel name=gpt2-$kernel steps=100 fresh=true
done
for rows in 12 32; do
    run nanogpt -m bench.nanogpt "${NANOGPT:-../nanoGPT}" "${gpt2[@]}" batch_tokens=$((rows * 1024)) --steps 60 --rounds 1
done
exit $failed
