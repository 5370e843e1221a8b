#!/usr/bin/env bash
# The checks and measurements that need a GPU, in stages of at most nine minutes, for a machine that is lent:
#
#   bash bench/gpu_check.sh wheels   # before, on a machine with network: packages for Python 3.12, to .wheels/
#   bash bench/gpu_check.sh a        # environment, ceilings, a small training, tests marked gpu, three shapes, tiles
#   bash bench/gpu_check.sh b        # exp=gpt2 on local text with both kernels, nanoGPT's step; five profiled steps
#   bash bench/gpu_check.sh c        # the other shapes of the benchmark; that model evaluated at 32k and 128k tokens
#   bash bench/gpu_check.sh d        # a part of the study, four jobs at a time
#   TOY=1 bash bench/gpu_check.sh a  # rehearses a stage on a CPU
#
# Results go to OUT (default results/gpu), each row as it comes. A step that has succeeded is not repeated when the
# stage is run again. The machine needs torch, numpy and Python 3.12; what else is missing is installed from .wheels/
# into a folder of its own. wandb is not needed, since it is disabled. CORPUS is a prepared corpus cache (default .cache).
set -u
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1 WANDB_MODE=disabled MPLBACKEND=Agg
out=$(mkdir -p "${OUT:-results/gpu}" && cd "${OUT:-results/gpu}" && pwd)
cache=${CORPUS:-.cache} toy=${TOY:+1} stage=${1:-a} failed=0 until=$((SECONDS + ${STAGE_SECONDS:-540}))
mkdir -p "$out/done"

if [ "$stage" = wheels ]; then
    packages="hydra-core==1.3.8 omegaconf==2.3.1 PyYAML packaging tqdm tiktoken regex rustbpe sympy==1.14.0 mpmath scipy
        safetensors tokenizers matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six
        pytest pytest-xdist pytest-timeout execnet iniconfig pluggy pygments"
    platforms=$(printf -- '--platform manylinux_2_%s_x86_64 ' 28 27 26 24 17; echo --platform manylinux2014_x86_64)
    "$PYTHON" -m pip wheel -q --no-deps -w .wheels antlr4-python3-runtime==4.9.3 || exit 1 # has no wheel
    # shellcheck disable=SC2086
    exec "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none $platforms --platform any -d .wheels $packages
fi

site=${SITE:-${TMPDIR:-/tmp}/ropewalk-site}
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
if ! "$PYTHON" -c 'import hydra, omegaconf, tiktoken, rustbpe, sympy, pytest' 2> /dev/null && [ ! -d "$site" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" .wheels/*.whl ||
        { echo "error: packages are missing: first, with a network, bash bench/gpu_check.sh wheels"; exit 1; }
fi

# step NAME SECONDS COMMAND...: run it within the time, unless it has succeeded before; its output goes to OUT/NAME.log
step() {
    local name=$1 limit=$2 left=$((until - SECONDS))
    shift 2
    [ -e "$out/done/$name" ] && { printf '%-14s done before\n' "$name"; return; }
    [ "$left" -lt 5 ] && { printf '%-14s no time left: run this stage again\n' "$name"; failed=1; return; }
    [ "$left" -lt "$limit" ] && limit=$left
    timeout -k 10 "$limit" "$@" < /dev/null > "$out/$name.log" 2>&1
    local code=$?
    [ $code = 0 ] && touch "$out/done/$name" || failed=1
    local verdict=ok
    [ $code = 0 ] || verdict="FAILED $code"
    printf '%-14s %-8s %s\n' "$name" "$verdict" "$(tail -n 1 "$out/$name.log")"
}
train() { echo "$PYTHON" train.py cache="$cache" runs="$out/runs" "$@"; }
evaluate() { echo "$PYTHON" eval.py cache="$cache" runs="$out/runs" "$@"; }
# Text of documents that are long enough to evaluate at 131072 tokens: the Python sources of torch, joined
join_sources() {
    [ -d "$out/text" ] && return
    "$PYTHON" - "$out/text.tmp" "${toy:+6000}" << 'EOF' && mv "$out/text.tmp" "$out/text"
import sys
from pathlib import Path

import torch

folder, size = Path(sys.argv[1]), int(sys.argv[2] or 1_000_000)
folder.mkdir(exist_ok=True)
documents, text = 0, ""
for file in sorted(Path(torch.__file__).parent.rglob("*.py")):
    text += file.read_text(errors="ignore")
    if len(text) > size and documents < 40:
        (folder / f"{documents:02}.txt").write_text(text)
        documents, text = documents + 1, ""
EOF
}
tests=(rope none window yarn rerope others) device=cuda kernel=triton
peers="" small="" long="ctx=8192" text="data.vocab_size=16384"
if [ "$toy" ]; then
    tests=(toy) device=cpu kernel=torch peers="ours, interleaved" long="ctx=128 documents=2" text="data.vocab_size=300"
    small="exp=smoke steps=2 val_windows=2 device=cpu compile=false"
fi

rope=("$PYTHON" -m bench.rope gpu --device $device --peer "$peers" --out "$out/rope_kernel.csv")

case $stage in
a)
    step environment 60 "$PYTHON" -c 'from bench.rows import machine; print(machine())'
    step ceilings 60 "$PYTHON" -m bench.gpu_step --device $device --ceilings "$out/gpu_ceilings.csv"
    # shellcheck disable=SC2046,SC2086
    step training 120 $(train pos=rope name=check fresh=true kernel=$kernel ${small:-steps=500})
    # shellcheck disable=SC2046,SC2086
    step evaluation 120 $(evaluate run=check kernel=$kernel device=$device scaling=yarn $long)
    for part in "${tests[@]}"; do
        case $part in
        rope) selected=(tests/test_rope.py) ;;
        others) selected=(tests/test_gpu.py -k "not on_cuda_as_on_a_cpu") ;;
        toy) selected=(tests/test_gpu.py -k "one_step_of_ddp or synchronises") ;;
        *) selected=(tests/test_gpu.py -k "on_cuda_as_on_a_cpu and (-$part-mha or -$part-gqa)") ;;
        esac
        step "tests-$part" 400 "$PYTHON" -m pytest -q -n 0 -m gpu -p no:cacheprovider "${selected[@]}"
    done
    for shape in 0 1 3; do
        step "rope-$shape" 150 "${rope[@]}" --shapes $shape
        [ "$toy" ] && break
    done
    [ "$toy" ] || step tiles 150 "$PYTHON" -m bench.rope sweep --out "$out/rope_tiles.csv"
    ;;
b)
    step steps 300 "$PYTHON" -m bench.gpu_step --device $device --out "$out/gpu_step.csv" --profile "$out/profile.txt"
    join_sources
    for kernel in triton torch; do
        [ "$toy$kernel" = 1triton ] && continue
        # shellcheck disable=SC2046,SC2086
        step "gpt2-$kernel" 240 $(train exp=gpt2 data=text "data.files='$out/text/*.txt'" data.holdout=4 $text pos=rope \
            name=gpt2-$kernel kernel=$kernel ${small:-steps=100 optim.warmup=20})
    done
    ;;
c)
    for shape in 2 4 5 6; do
        step "rope-$shape" 130 "${rope[@]}" --shapes $shape
        [ "$toy" ] && break
    done
    for ctx in $([ "$toy" ] && echo 128 || echo 32768 131072); do
        # shellcheck disable=SC2046
        step "eval-$ctx" 240 $(evaluate run=gpt2-$kernel scaling=yarn documents=2 device=$device ctx=$ctx)
    done
    ;;
d)
    step study 540 "$PYTHON" -m studies.matrix $([ "$toy" ] && echo smoke --only alibi-s0 || echo h200) --jobs 4 \
        --minutes 8.5 --runs "$out/runs-study" --out "$out/matrix-h200.jsonl"
    ;;
*)
    echo "error: stage $stage: must be wheels, a, b, c or d"
    exit 1
    ;;
esac
exit $failed
