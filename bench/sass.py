"""Compile the RoPE kernel for sm_90 without a GPU and count instructions in its machine code: python -m bench.sass

Every variant is compiled for the arguments with which the op launches the kernel, forward and backward, and prints one
line of JSON; --out FILE appends it to a file. Exit code 3 and a line with the reason if this triton has no assembler.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernel is decorated, so before its import

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from bench.rows import append_json
from engine.code_version import commit
from kernels import rope_triton

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# (dtype, interleaved, D, P, whether positions are given, type of the scale); the fifth is a head of which half is
# rotated, and the last a scale as a caller might type it: Inductor types a Python float so
VARIANTS = [
    (torch.bfloat16, False, 128, 64, True, "fp32"), (torch.bfloat16, True, 128, 64, True, "fp32"),
    (torch.float32, False, 64, 32, True, "fp32"), (torch.float32, True, 64, 32, False, "fp32"),
    (torch.bfloat16, False, 128, 32, True, "fp32"), (torch.bfloat16, False, 128, 64, True, "fp64"),
]  # fmt: skip
# What an instruction of the machine code is counted as
COUNTED = {
    "instructions": r"(?!NOP)", "loads_128": r"LDG\S*\.128", "stores": r"STG", "stores_128": r"STG\S*\.128",
    "shuffles": r"SHFL", "local": r"LDL|STL", "fp64": r"D(ADD|MUL|FMA|SETP|MNMX)|MUFU\S*64",
    "fp64_conversions": r"[FI]2[FI]\S*64",
}  # fmt: skip


@contextmanager
def recorded_launches() -> Generator[list[tuple[list, dict[str, Any], int]]]:
    """Within it the op launches nothing, but appends (types and divisibility, arguments, warps) of each launch."""
    kernel, launches = rope_triton._rope_kernel, []
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))

    class Recorder:
        def __getitem__(self, grid):
            def record(*args, num_warps, **kwargs):
                bound, specialization, _ = binder(*args, num_warps=num_warps, debug=False, **kwargs)
                launches.append((specialization, bound, num_warps))

            return record

    with mock.patch.object(rope_triton, "_rope_kernel", Recorder()):
        yield launches


def machine_code(launch: tuple[list, dict[str, Any], int], **types: str) -> dict[str, Any]:
    """Compile the kernel for sm_90 as Triton would for this launch, and count the instructions of its machine code.

    types: argument -> the type that it has instead. shared and stack are in bytes; loads_128 and stores_128 are the
    accesses to global memory of 128 bits. phase_loads are those of them that read phases: they have no predicate,
    because the mask of the phases is all true if P is a power of two, while loads of q and k depend on the token.
    loads_before_angles counts the loads of q and k before the first angle becomes a float32. local are accesses to
    spilled registers; fp64 is arithmetic only. bytes_per_element: see there.
    """
    kernel, (specialization, bound, warps) = rope_triton._rope_kernel, launch
    values, signature, constants, attributes = list(bound.values()), {}, {}, {}
    for i, (name, (kind, value)) in enumerate(zip(kernel.arg_names, specialization, strict=True)):
        signature[name] = types.get(name, kind)
        if kind == "constexpr":
            constants[(i,)] = values[i]
        elif value == "D":  # divisible by 16
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=TARGET, options={"num_warps": warps})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        sass, usage = (
            subprocess.run([TOOLS / "cuobjdump", flag, cubin], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    # (address, predicate, instruction, where it jumps to if it does)
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\d+ )?([A-Z]\S*)(?:.* 0x([0-9a-f]+) *;)?", sass, flags=re.M)
    code = [instruction for _, _, instruction, _ in lines]
    counts = {name: sum(bool(re.match(pattern, x)) for x in code) for name, pattern in COUNTED.items()}
    angles = next(i for i, x in enumerate(code) if x.startswith("I2F"))
    loads = [(i, bool(lines[i][1])) for i, x in enumerate(code) if re.match(COUNTED["loads_128"], x)]
    return {
        "layout": stored_layout(built.asm["ttgir"]), **counts,
        "phase_loads": sum(not predicate for _, predicate in loads),
        "loads_before_angles": sum(predicate and i < angles for i, predicate in loads),
        "shared": built.metadata.shared, "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "bytes_per_element": bytes_per_element(lines, built.asm["ptx"], bound, warps),
    }  # fmt: skip


def bytes_per_element(lines: list[tuple[str, ...]], ptx: str, bound: dict[str, Any], warps: int) -> float:
    """Bytes read and written per element of q and k, by a program whose tokens and heads all exist.

    These are the widths of the accesses in the machine code, without those to phases and positions, times the lanes,
    divided by the elements of the tile. Of a load of 64 bits PTX, not the machine code, shows that it is of an int64.
    P and D must be powers of two: otherwise some lanes access nothing.
    """
    most, lane = {}, 0  # bytes of a lane from an address to the end, on the way with the most accesses
    for address, predicate, instruction, target in reversed(lines):
        jump = 0 if instruction == "EXIT" else most.get(int(target, 16), 0) if instruction == "BRA" else lane
        lane = max(jump, lane) if predicate else jump
        if re.match("LDG|STG", instruction):
            bits = re.search(r"\.[US]?(8|16|64|128)\b", instruction)
            lane += int(bits[1]) // 8 if bits else 4
        most[int(address, 16)] = lane
    angles = sum(8 * int(n or 1) for n in re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.[bsu]64", ptx))
    return (lane - angles) * 32 * warps / (bound["BLOCK_T"] * bound["HEADS"] * bound["D"])


def stored_layout(ttgir: str) -> str:
    """The layout of the tile of a head: elements of a lane, lanes of a warp and warps, as [tokens, dimensions]."""
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*?), order", ttgir))
    names = set(re.findall(r"tt\.store .*?(#blocked\d*)>", ttgir))
    return "; ".join(sorted(re.sub(r" = |, (?=[a-z])", " ", layouts[name]) for name in names))


def both_directions(qkv: Tensor, heads: int, P: int, positions: Tensor | None, interleaved: bool) -> None:
    """Launch the kernel for rope_packed of qkv [B, T, 3 heads, D], and for its gradient in the layout of attention."""
    qkv = qkv.requires_grad_()
    phase = torch.ones(P, dtype=torch.int64)
    outputs = rope_triton.rope_packed(qkv, heads, heads, phase, positions, 5, interleaved, 1.0)
    gradients = [torch.zeros_like(y.transpose(1, 2).contiguous()).transpose(1, 2) for y in outputs]
    torch.autograd.grad(outputs, qkv, gradients)


def compile_keys() -> set[str]:
    """The keys of Triton's cache of compiled kernels for forward and backward at many shapes: they should be equal."""
    with recorded_launches() as launches:
        for B, T, H in ((1, 1, 16), (2, 17, 16), (3, 256, 16), (1, 512, 4), (5, 33, 8)):
            both_directions(torch.zeros(B, T, 3 * H, 128, dtype=torch.bfloat16), H, 64, None, False)
    return {f"{specialization} {warps}" for specialization, _, warps in launches}


def main() -> None:
    """Print the number of distinct compilations over many shapes, then one line for each variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the lines to this file, too")
    out, versions = parser.parse_args().out, {"triton": triton.__version__, "commit": commit()}

    def report(row: dict[str, Any]) -> None:
        row = {**versions, **row}
        print(json.dumps(row), flush=True)
        if out:
            append_json(out, row)

    report({"compiles": len(compile_keys())})
    if not all((TOOLS / name).exists() for name in ("ptxas", "cuobjdump")):
        print("skipped: this triton has no ptxas and cuobjdump")
        sys.exit(3)
    for dtype, interleaved, D, P, positions, scale in VARIANTS:
        with recorded_launches() as launches:
            both_directions(
                torch.zeros(2, 17, 48, D, dtype=dtype), 16, P, torch.arange(17) if positions else None, interleaved
            )
        (forward, *_), (backward, *_) = launches
        assert forward == backward, "forward and backward are not one compilation"
        report({"dtype": str(dtype).removeprefix("torch."), "interleaved": interleaved, "D": D, "P": P,
                "positions": positions, "scale": scale, **machine_code(launches[0], scale=scale)})  # fmt: skip


if __name__ == "__main__":
    main()
