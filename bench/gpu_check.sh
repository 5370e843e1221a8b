#!/usr/bin/env bash
# The checks and measurements that need a GPU, in stages of at most nine minutes, for a machine without network that is
# available for half an hour:
#
#   bash bench/gpu_check.sh wheels      # before, on a machine with network: packages for Python 3.12, to .wheels/
#   bash bench/gpu_check.sh a           # ceilings, three shapes, a small training, tiles, then the tests marked gpu
#   bash bench/gpu_check.sh b           # exp=gpt2 on local text with both kernels, nanoGPT's step; five profiled steps
#   bash bench/gpu_check.sh c           # the other shapes of the benchmark; that model evaluated at 32k and 128k tokens
#   bash bench/gpu_check.sh d           # a part of the study, four jobs at a time
#   TOY=1 bash bench/gpu_check.sh a     # rehearses a stage on a CPU
#
# A step that has succeeded is not repeated when its stage is run again, and one that was killed continues. Runs, logs,
# tables and what is done are in the folder STATE (default .gpu_check, or .gpu_check-toy with TOY=1). Delete it after a
# change of the code: steps that are done are not repeated. COPY_TO=DIR copies at most eight files to DIR after each
# step, also if the stage is ended by SIGTERM: the tables, profile.txt and steps.txt, which has the end of the log of
# each step. To publish the tables, use COPY_TO=results/gpu and commit all files but steps.txt.
#
# The machine needs Python 3.12, torch with triton, numpy, scipy, matplotlib, safetensors and tokenizers. A wheel is
# installed into the folder SITE if the package is missing, or if its version must be the pinned one (`exact` below).
# wandb is not needed, since it is disabled. Of the peers of the benchmark, `wheels` brings Liger's package, fla's,
# transformers, and one file of FlashAttention: its sources are downloaded, and flash_attn/ops/triton/rotary.py is
# unpacked to .wheels/flash_rotary.py, which bench/peers.py loads. (This needs torch. Without it, put the file there by
# hand.)
#
# PYTHON: the interpreter. WHEELS: the folder of wheels (default .wheels). STAGE_SECONDS: the time of a stage (default
# 540). CORPUS: the cache of prepared corpora (default .cache). What it lacks is prepared on the machine: from sympy for
# stages a and d, and from torch's sources for b.
set -u
cd "$(dirname "$0")/.." || exit 1
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1 WANDB_MODE=disabled MPLBACKEND=Agg
cache=${CORPUS:-.cache} toy=${TOY:+1} stage=${1:-a} failed=0 until=$((SECONDS + ${STAGE_SECONDS:-540}))
wheels=${WHEELS:-.wheels}

case $stage in
wheels)
    packages=(hydra-core omegaconf PyYAML packaging tqdm tiktoken regex rustbpe sympy mpmath
        pytest pytest-xdist pytest-timeout execnet iniconfig pluggy pygments
        transformers liger-kernel==0.8.5 fla-core==0.6.0 einops)
    platforms=(manylinux_2_{28,27,26,24,17}_x86_64 manylinux2014_x86_64 any)
    "$PYTHON" -m pip wheel -q --no-deps -w "$wheels" antlr4-python3-runtime==4.9.3 || exit 1 # has no wheel
    "$PYTHON" -m pip download -q --no-deps -c constraints.txt --only-binary=:all: --python-version 3.12 \
        --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]/#/--platform=}" \
        -d "$wheels" "${packages[@]}" || exit 1
    sources=$(mktemp -d)
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "$PYTHON" -m pip download -q --no-deps --no-build-isolation \
        --no-binary flash-attn -d "$sources" flash-attn==2.8.3.post2
    if ! tar -xOzf "$sources"/flash_attn-*.tar.gz --wildcards '*/flash_attn/ops/triton/rotary.py' \
        > "$wheels/flash_rotary.py"; then
        rm -f "$wheels/flash_rotary.py"
        echo "FlashAttention: not downloaded"
    fi
    rm -r "$sources"
    exit
    ;;
a | b | c | d) ;;
*)
    echo "error: stage $stage: must be wheels, a, b, c or d"
    exit 1
    ;;
esac

state=${STATE:-.gpu_check${toy:+-toy}} # what a rehearsal has done must not count as done
state=$(mkdir -p "$state/done" && cd "$state" && pwd)
copies=${COPY_TO:+$(mkdir -p "$COPY_TO" && cd "$COPY_TO" && pwd)}

site=${SITE:-${TMPDIR:-/tmp}/ropewalk-site}
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
[ -f "$wheels/flash_rotary.py" ] && export FLASH_ROTARY=${FLASH_ROTARY:-$(cd "$wheels" && pwd)/flash_rotary.py}
mapfile -t needed < <("$PYTHON" - "$wheels" << 'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# conf/hydra_patches.py is written for this version of Hydra, which needs these of OmegaConf and antlr4. The default
# corpus is the source of sympy, and rustbpe makes its vocabulary: other versions could make another corpus
exact = {"hydra_core", "omegaconf", "antlr4_python3_runtime", "sympy", "rustbpe"}
for file in Path(sys.argv[1]).glob("*.whl"):
    name, wanted = file.name.split("-")[:2]
    try:
        installed = version(name)
    except PackageNotFoundError:
        installed = None
    if installed is None or (name in exact and installed != wanted):
        print(file)
EOF
)
install=("$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site")
if { [ ${#needed[@]} -gt 0 ] && ! "${install[@]}" "${needed[@]}"; } ||
    ! "$PYTHON" -c 'import hydra, omegaconf, tiktoken, rustbpe, sympy, pytest'; then
    echo "error: packages are missing: first, with a network, bash bench/gpu_check.sh wheels"
    exit 1
fi

copy_results() {
    [ "$copies" ] || return 0
    for file in "$state"/*.csv "$state"/*.jsonl "$state/profile.txt"; do
        [ -e "$file" ] && cp "$file" "$copies"
    done
    {
        cat "$state/summary"
        for log in "$state"/*.log; do
            printf '\n==== %s\n' "$(basename "$log" .log)"
            tail -n 100 "$log" | cut -c 1-1000
        done
    } > "$copies/steps.txt" 2> /dev/null
}
child=
trap copy_results EXIT
trap '[ "$child" ] && kill "$child" && wait "$child"; exit 143' TERM INT

report() { printf '%-14s %s\n' "$@" | tee -a "$state/summary"; }
# step NAME SECONDS COMMAND...: run it within the time, unless it has succeeded before; its output goes to STATE/NAME.log
step() {
    local name=$1 limit=$2 left=$((until - SECONDS))
    shift 2
    [ -e "$state/done/$name" ] && { report "$name" "done before"; return; }
    [ "$left" -lt 5 ] && { report "$name" "no time left: run this stage again"; failed=1; return; }
    [ "$left" -lt "$limit" ] && limit=$left
    timeout -k 10 "$limit" "$@" < /dev/null >> "$state/$name.log" 2>&1 &
    child=$!
    wait $child # in the background, since bash handles SIGTERM only when a command in the foreground has ended
    local code=$? verdict=ok
    child=
    if [ $code = 0 ]; then touch "$state/done/$name"; else failed=1 verdict="FAILED $code"; fi
    report "$name" "$(printf '%-8s %s' "$verdict" "$(tail -n 1 "$state/$name.log")")"
    copy_results
}
folders=(cache="$cache" runs="$state/runs")
train=("$PYTHON" train.py "${folders[@]}") evaluate=("$PYTHON" eval.py "${folders[@]}")
# Forty documents that are long enough to evaluate at 131072 tokens: Python sources of torch, joined
join_sources='
import sys
from pathlib import Path

import torch

folder, size = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(exist_ok=True)
documents, parts, length = 0, [], 0
for file in sorted(Path(torch.__file__).parent.rglob("*.py")):
    parts.append(file.read_text(errors="ignore"))
    length += len(parts[-1])
    if length > size:
        (folder / f"{documents:02}.txt").write_text("".join(parts))
        documents, parts, length = documents + 1, [], 0
        if documents == 40:
            break
print(documents, "documents")
'
device=cuda kernel=triton peers="" small=() long=(ctx=8192) vocabulary=16384 size=1000000 tiles=()
study=(h200) contexts=(32768 131072)
mapfile -t tests < <(grep -rl --include='test_*.py' 'mark\.gpu' tests | sort -r) # the kernel's come first
if [ "$toy" ]; then
    device=cpu kernel=torch peers="ours, interleaved" long=(ctx=128 documents=2) vocabulary=300 size=6000
    study=(smoke --only alibi-s0) contexts=(128)
    small=(exp=smoke steps=2 val_windows=2 device=cpu compile=false) tiles=(--warps 4 --heads 8)
    tests=(tests/test_gpu.py -k "one_step_of_ddp or synchronises")
fi
rope=("$PYTHON" -m bench.rope gpu --device "$device" --peer "$peers" --out "$state/rope_kernel.csv")

case $stage in
a)
    step environment 60 "$PYTHON" -c 'from bench.rows import machine; print(machine())'
    step ceilings 60 "$PYTHON" -m bench.gpu_step --device $device --ceilings "$state/gpu_ceilings.csv"
    for shape in 0 1 3; do
        step "rope-$shape" 150 "${rope[@]}" --shapes $shape
        [ "$toy" ] && break
    done
    step training 120 "${train[@]}" pos=rope name=check kernel=$kernel steps=500 "${small[@]}"
    step evaluation 120 "${evaluate[@]}" run=check kernel=$kernel device=$device scaling=yarn "${long[@]}"
    step tiles 150 "$PYTHON" -m bench.rope sweep "${tiles[@]}" --out "$state/rope_tiles.csv"
    # Where this step was killed at its limit, its repetition continues after the tests that have passed
    step tests 540 env PASSED_TESTS="$state/tests.passed" "$PYTHON" -m pytest -v -n 0 -m gpu \
        -p no:cacheprovider -p bench.passed_tests "${tests[@]}"
    ;;
b)
    step steps 300 "$PYTHON" -m bench.gpu_step --device $device --out "$state/gpu_step.csv" --profile "$state/profile.txt"
    step text 60 "$PYTHON" -c "$join_sources" "$state/text" $size
    for kernel in triton torch; do
        [ "$toy$kernel" = 1triton ] && continue
        step "gpt2-$kernel" 240 "${train[@]}" exp=gpt2 data=text "data.files='$state/text/*.txt'" data.holdout=4 \
            data.vocab_size=$vocabulary pos=rope name=gpt2-$kernel kernel=$kernel steps=100 optim.warmup=20 "${small[@]}"
    done
    ;;
c)
    for shape in 2 4 5 6; do
        step "rope-$shape" 130 "${rope[@]}" --shapes $shape
        [ "$toy" ] && break
    done
    for ctx in "${contexts[@]}"; do
        step "eval-$ctx" 240 "${evaluate[@]}" run=gpt2-$kernel scaling=yarn documents=2 device=$device ctx="$ctx"
    done
    ;;
d)
    step study 540 "$PYTHON" -m studies.matrix "${study[@]}" --jobs 4 --minutes 8.5 --cache "$cache" \
        --runs "$state/runs-study" --out "$state/matrix-h200.jsonl"
    ;;
esac
exit $failed
