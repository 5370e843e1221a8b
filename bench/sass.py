"""Compile the RoPE kernel for sm_90 without a GPU and count instructions in its machine code: python -m bench.sass

Prints one line of JSON per variant. Exit code 3 and a line with the reason if this triton has no assembler.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernel is decorated, so before its import

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from kernels import rope_triton


def compile_one(dtype: str, interleaved: bool, D: int, P: int) -> dict[str, str | int]:
    """Compile one variant of the kernel for sm_90 and count the instructions in its machine code.

    dtype: fp32 or bf16, as Triton calls them. D: head width; P: rotary pairs. shared and stack are in bytes; loads_128
    and stores_128 are the global accesses of 128 bits; local is the number of accesses to spilled registers.
    """
    fn = rope_triton._rope_kernel
    block = rope_triton.tile(P, 4 if dtype == "fp32" else 2)
    warps = block.pop("num_warps")
    constants = {
        "D": D, "P": P, "BLOCK_TAIL": triton.next_power_of_2(max(1, D - 2 * P)), "BLOCK_H": rope_triton.BLOCK_H,
        "HEADS": rope_triton.HEADS, "INTERLEAVED": interleaved, "HAS_POSITIONS": False, **block,
    }  # fmt: skip
    signature, attrs = {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            head = name.removesuffix("_ptr")
            signature[name] = "*i64" if head in ("phase", "positions") else f"*{dtype}"
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name.endswith(("_sb", "_st", "_sh")) and name != "p_sb":
                attrs[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(fn.arg_names.index(k),): v for k, v in constants.items()}
    source = ASTSource(fn, signature, constexprs, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        sass = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    loads, stores = count(r"\bLDG\b"), count(r"\bSTG\b")
    wide = (count(r"\bLDG\.[A-Z0-9.]*128\b"), count(r"\bSTG\.[A-Z0-9.]*128\b"))
    return {
        "dtype": dtype, "interleaved": interleaved, "D": D, "P": P, "shared": built.metadata.shared,
        "loads": loads, "loads_128": wide[0], "stores": stores, "stores_128": wide[1],
        "shuffles": count(r"\bSHFL\b"), "local": count(r"\b(LDL|STL)\b"),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]), "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
    }  # fmt: skip


def compile_keys() -> list[str]:
    """The keys of Triton's cache of compiled kernels, for forward and backward at many shapes: all should be equal."""
    kernel = rope_triton._rope_kernel
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    keys = []

    class Recorder:
        def __getitem__(self, grid):
            def record(*args, num_warps, **kwargs):
                _, specialization, options = binder(*args, num_warps=num_warps, debug=False, **kwargs)
                keys.append(f"{specialization} {options}")

            return record

    phase = torch.ones(64, dtype=torch.int64)
    for B, T, H, offset in ((1, 1, 16, 0), (2, 17, 16, 5), (3, 256, 16, 10**6), (1, 512, 4, 1), (5, 33, 8, 16)):
        packed = torch.zeros(B, T, 3 * H, 128, dtype=torch.bfloat16)
        q, k, _ = packed.split(H, dim=2)
        gradient = torch.zeros(B, H, T, 128, dtype=torch.bfloat16).transpose(1, 2)  # as attention returns it
        for x, y in ((q, k), (gradient, gradient)):
            out = torch.empty(x.shape, dtype=x.dtype)
            rope_triton.launch(x, y, out, out, phase, None, offset, False, 1.0, wrap=lambda kernel: Recorder())
    return keys


def main() -> None:
    """Print the number of distinct compilations over many shapes, then one line for each variant."""
    print(json.dumps({"compiles": len(set(compile_keys()))}), flush=True)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not ((tools / "cuobjdump").exists() and (tools / "ptxas").exists()):
        print("skipped: this triton has no ptxas and cuobjdump")
        sys.exit(3)
    for dtype in ("bf16", "fp32"):
        for interleaved in (False, True):
            for D, P in ((128, 64), (64, 32)):
                print(json.dumps(compile_one(dtype, interleaved, D, P)), flush=True)


if __name__ == "__main__":
    main()
