"""Compile the RoPE kernel for sm_90 without a GPU and count instructions in its machine code: python -m bench.sass

Every variant is compiled for the arguments with which the op launches the kernel, forward and backward, and prints one
line of JSON; --out FILE appends it to a file. It needs ptxas and cuobjdump, which Triton's wheels for Linux bring.
"""

import re
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from bench.rows import append, parser
from kernels import rope_triton

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# (dtype, interleaved, D, P, whether positions are given, type of the scale); the fifth is a head of which half is
# rotated, and the last a scale as a caller might type it: Inductor types a Python float so
VARIANTS = [
    (torch.bfloat16, False, 128, 64, True, "fp32"),
    (torch.bfloat16, True, 128, 64, True, "fp32"),
    (torch.float32, False, 64, 32, True, "fp32"),
    (torch.float32, True, 64, 32, False, "fp32"),
    (torch.bfloat16, False, 128, 32, True, "fp32"),
    (torch.bfloat16, False, 128, 64, True, "fp64"),
]
COUNTED = {  # name -> the pattern of its instructions
    "instructions": r"(?!NOP)",
    "loads_128": r"LDG\S*\.128",
    "stores": r"STG",
    "stores_128": r"STG\S*\.128",
    "shuffles": r"SHFL",
    "local": r"LDL|STL",
    "fp64": r"D(ADD|MUL|FMA|SETP|MNMX)|MUFU\S*64",
    "fp64_conversions": r"[FI]2[FI]\S*64",
}


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


def machine_code(launch: tuple[list, dict[str, Any], int], scale: str) -> dict[str, Any]:
    """Compile the kernel for sm_90 as Triton would for this launch, and count the instructions of its machine code.

    scale: the type of that argument. shared is in bytes; loads_128 and stores_128 are the accesses to global
    memory of 128 bits. phase_loads are those of them that read phases: they have no predicate, because the mask of the
    phases is all true if P is a power of two, while loads of q and k depend on the token. loads_before_angles counts
    the loads of q and k before the first angle becomes a float32. local are accesses to spilled registers; fp64 is
    arithmetic only. bytes_per_element: read and written in 128 bits per element of q and k, if all tokens and heads of
    a program exist. layout: elements of a lane, lanes of a warp and warps of the tile, as [tokens, dimensions].
    """
    kernel, (specialization, bound, warps) = rope_triton._rope_kernel, launch
    arguments = list(zip(kernel.arg_names, specialization, bound.values(), strict=True))
    signature = {name: kind for name, (kind, _), _ in arguments} | {"scale": scale}
    constants = {(i,): value for i, (_, (kind, _), value) in enumerate(arguments) if kind == "constexpr"}
    sixteens = [(i,) for i, (_, (kind, by), _) in enumerate(arguments) if kind != "constexpr" and by == "D"]
    source = ASTSource(kernel, signature, constants, {key: [["tt.divisibility", 16]] for key in sixteens})
    built = triton.compile(source, target=TARGET, options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(built.asm["cubin"])
        sass, usage = (
            subprocess.run([CUOBJDUMP, flag, cubin.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d+ )?([A-Z]\S*)", sass, flags=re.MULTILINE)
    counts = {name: sum(bool(re.match(pattern, x)) for _, x in lines) for name, pattern in COUNTED.items()}
    angles = next(i for i, (_, x) in enumerate(lines) if x.startswith("I2F"))
    loads = [(i, bool(predicate)) for i, (predicate, x) in enumerate(lines) if re.match(COUNTED["loads_128"], x)]
    phases = sum(not predicate for _, predicate in loads)
    accessed = 16 * 32 * warps * (len(loads) - phases + counts["stores_128"])
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*?), order", built.asm["ttgir"]))
    stored = {layouts[name] for name in re.findall(r"tt\.store .*?(#blocked\d*)>", built.asm["ttgir"])}
    return {
        "layout": "; ".join(sorted(re.sub(r" = |, (?=[a-z])", " ", layout) for layout in stored)),
        **counts,
        "phase_loads": phases,
        "loads_before_angles": sum(predicate and i < angles for i, predicate in loads),
        "shared": built.metadata.shared,
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "bytes_per_element": accessed / (bound["BLOCK_T"] * bound["HEADS"] * bound["D"]),
    }


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
    out = parser(__doc__, "/dev/null").parse_args().out
    append(out, {"triton": triton.__version__, "compiles": len(compile_keys())})
    for dtype, interleaved, D, P, given, scale in VARIANTS:
        positions, heads = torch.arange(17) if given else None, torch.zeros(2, 17, 48, D, dtype=dtype)
        with recorded_launches() as launches:
            both_directions(heads, 16, P, positions, interleaved)
        variant = {"dtype": str(dtype)[6:], "interleaved": interleaved, "D": D, "P": P, "positions": given}
        code = machine_code(launches[0], scale)
        append(out, {"triton": triton.__version__, **variant, "scale": scale, **code})


if __name__ == "__main__":
    main()
