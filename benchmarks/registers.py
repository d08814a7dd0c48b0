"""What the compiler makes of the fused kernels for an H100 (sm_90): registers, spills, memory. Needs no CUDA device.

    python benchmarks/registers.py [--cases two_streams] [--widths 64 128] [--out registers.jsonl]

A multiprocessor has 65,536 registers and 227 KiB of shared memory, which decide how many programs it runs at once; what
does not fit in a program's registers is spilled to slow memory. Loops over tiles come in two forms, with a mask and
without. Their products should be HGMMA, on the matrix units of a whole warp group (decoding, with its few queries, has
HMMA), and keys and values should come 16 bytes at a time, copied ahead of their use (LDGSTS.E.BYPASS.128). The
arguments are those of the benchmarks: T 4,096, bfloat16, tiles as shipped.
"""

import contextlib
import io
import os
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # read as triton is imported

import torch
import triton
from machine import header, options_of, write
from triton.backends.compiler import GPUTarget

from tandem.nn import attention_triton as fused

REGISTERS, SHARED = 65_536, 227 * 2**10
B, T = 2, 4096


class Case(NamedTuple):
    groups: int
    sources: int
    heads_per_key: int


COUNTED = {"HGMMA": r"\sHGMMA\.", "HMMA": r"\sHMMA\.", "copies": r"\sLDGSTS\.E\.BYPASS\.128"}
CASES = {"causal": Case(1, 1, 1), "two_streams": Case(2, 2, 1), "grouped_heads": Case(1, 1, 3)}
TOLD: dict[str, str] = {}
"""What ptxas said of a kernel as triton compiled it, which it does once."""


class Hopper:
    """In place of a device's driver: enough to compile, not to run."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


def compiled(case: Case, D: int) -> list[dict[str, Any]]:
    """A record of every kernel that attention of this kind launches: forward, backward, decoding."""
    found: list[dict[str, Any]] = []

    def compile_only(kernel, grid, shape, like, *arguments, **constants):
        width = fused._block_width(like.shape[3])
        with contextlib.redirect_stdout(io.StringIO()) as told:
            made = kernel.warmup(*arguments, grid=grid, **constants, BLOCK_D=width, **shape.options)
        said = TOLD.setdefault(made.hash, told.getvalue())
        found.append({"kernel": kernel.__name__, "tile": list(shape)} | facts(made, said, shape.warps))

    launch, fused._launch = fused._launch, compile_only
    try:
        heads = case.heads_per_key
        q, k, v = (
            [torch.empty(B, T, H, D, dtype=torch.bfloat16).transpose(1, 2) for _ in range(n)]
            for n, H in ((case.groups, 4 * heads), (case.sources, 4), (case.sources, 4))
        )
        bounds = torch.zeros(2, 1, case.sources, case.groups, T, dtype=torch.int32)
        readers = [torch.zeros(2, 1, case.groups, T, dtype=torch.int32) for _ in k]
        y, lse = fused.attend(q, k, v, bounds, readers, D**-0.5)
        fused.attend_backward(y, q, k, v, y, lse, bounds, readers, D**-0.5)
        fused.decode([x[:, :, :1] for x in q], k, v, bounds[..., :1], D**-0.5)
    finally:
        fused._launch = launch
    return list({record["kernel"]: record for record in found}.values())


def facts(kernel: Any, told: str, warps: int) -> dict[str, Any]:
    """Resources of a program, programs of a multiprocessor, and what the machine code holds; `told`: by ptxas."""
    with tempfile.NamedTemporaryFile() as made:
        made.write(kernel.asm["cubin"])
        made.flush()
        disassembled = [triton.knobs.nvidia.nvdisasm.path, "-c", made.name]
        code = subprocess.run(disassembled, capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(re.findall(pattern, told)[0]) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill st"))
    shared, of_warp = kernel.metadata.shared, 32 * (registers + -registers % 8)
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "programs": min(REGISTERS // (of_warp * warps), SHARED // (shared + 1024)),
        "loops": loops(code),
        **{name: len(re.findall(pattern, code)) for name, pattern in COUNTED.items()},
    }


def loops(code: str) -> list[int]:
    """Instructions of a warp in one round of every loop that has products."""
    begun, lengths, count, products = {}, [], 0, [0]
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            begun[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            count += 1
            products.append(products[-1] + ("MMA" in line))
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
            if back and back[1] in begun and products[-1] > products[begun[back[1]]]:
                lengths.append(count - begun[back[1]])
    return lengths


def main() -> None:
    arguments = options_of(__doc__)
    arguments.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    arguments.add_argument("--widths", nargs="+", type=int, default=[64, 128], help="of a head")
    arguments.add_argument("--out")
    options = arguments.parse_args()
    print(header())
    triton.runtime.driver.set_active(Hopper())
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    records = []
    for D in options.widths:
        for case in options.cases:
            print(f"{case}, D {D}: registers, spilled bytes, shared KiB, programs of a multiprocessor, loops")
            for record in compiled(CASES[case], D):
                records.append({"case": case, "D": D} | record)
                tile = f"{record['tile'][0]} x {record['tile'][1]}, {record['tile'][2]} warps"
                numbers = f"{record['registers']:5} {record['spilled_bytes']:5} {record['shared_bytes'] / 1024:7.1f}"
                print(f"  {record['kernel']:<30} {tile:>18} {numbers} {record['programs']:3}  {record['loops'] or ''}")
    write(options.out, records)


if __name__ == "__main__":
    main()
