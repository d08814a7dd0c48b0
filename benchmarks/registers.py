"""What the compiler makes of the fused kernels for an H100 (sm_90): registers, spills, memory. Needs no CUDA device.

    python benchmarks/registers.py [--cases two_streams] [--widths 64 128] [--out registers.jsonl]

A multiprocessor has 65,536 registers and 227 KiB of shared memory, which decide how many programs it runs at once; what
does not fit in a program's registers is spilled to slow memory. Loops over tiles come in two forms, with a mask and
without. Their products should be HGMMA, on the matrix units of a whole warp group (decoding, with its few queries, has
HMMA), and keys and values should come 16 bytes at a time, copied ahead of their use (LDGSTS.E.BYPASS.128). The
arguments are those of the benchmarks: T 4,096, bfloat16, tiles as shipped. The kernels of the head and of caches have
no products.
"""

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # read as triton is imported

import torch
import triton
from machine import header, options_of, write
from triton.backends.compiler import GPUTarget

from tandem.nn import attention_triton as fused
from tandem.nn import cache_triton, head_triton
from tandem.nn.cache import FixedCache

REGISTERS, SHARED, WARPS, PROGRAMS = 65_536, 227 * 2**10, 64, 32
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


class Compiling:
    """In place of a kernel: compiles it for the arguments of a launch, and runs nothing."""

    def __init__(self, kernel: Any, found: dict[str, dict[str, Any]]):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments, **given):
            with contextlib.redirect_stdout(io.StringIO()) as told:
                made = self.kernel.warmup(*arguments, grid=grid, **given)
            said = TOLD.setdefault(made.hash, told.getvalue())
            columns = given.get("BLOCK_N") or given.get("BLOCK") or given["BLOCK_D"]
            tile = [given.get("BLOCK_M", 1), columns, given["num_warps"]]
            self.found[self.kernel.__name__] = {"tile": tile} | facts(made, said, given["num_warps"])

        return launch


@contextlib.contextmanager
def compiling_only(module: Any) -> Iterator[dict[str, dict[str, Any]]]:
    """What is found of the kernels that `module` launches meanwhile, by their names."""
    found, names = {}, [name for name in vars(module) if name.endswith("_kernel")]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(module, name, Compiling(getattr(module, name), found)))
        yield found


def of_attention(case: Case, D: int) -> dict[str, dict[str, Any]]:
    """Every kernel that attention of this kind launches: forward, backward, decoding."""
    heads = case.heads_per_key
    q, k, v = (
        [torch.empty(B, T, H, D, dtype=torch.bfloat16).transpose(1, 2) for _ in range(n)]
        for n, H in ((case.groups, 4 * heads), (case.sources, 4), (case.sources, 4))
    )
    bounds = torch.zeros(2, 1, case.sources, case.groups, T, dtype=torch.int32)
    readers = [torch.zeros(2, 1, case.groups, T, dtype=torch.int32) for _ in k]
    with compiling_only(fused.kernels) as found:
        y, lse = fused.attend(q, k, v, bounds, readers, D**-0.5)
        fused.attend_backward(y, q, k, v, y, lse, bounds, readers, D**-0.5)
        fused.decode([x[:, :, :1] for x in q], k, v, bounds[..., :1], D**-0.5)
    return found


def of_head(slots: int) -> dict[str, dict[str, Any]]:
    """The head's kernel between its products, for GPT-2's vocabulary."""
    of_slots = torch.zeros(B, slots, dtype=torch.long), torch.zeros(B, slots), torch.ones(B, slots, dtype=torch.bool)
    with compiling_only(head_triton) as found:
        head_triton.nll_and_gradient(torch.empty(B, 50_304, dtype=torch.bfloat16), *of_slots, 50_302)
    return found


def of_caches(D: int) -> dict[str, dict[str, Any]]:
    """The kernel that writes a step of two streams into their caches."""
    k, clock = torch.empty(B, 4, 1, D, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.long)
    stores = [FixedCache(k.new_empty(2, B, 4, n, D), clock, window) for n, window in ((T, None), (130, 64))]
    with compiling_only(cache_triton) as found:
        cache_triton.append(stores, [k, k], [k, k])
    return found


def facts(kernel: Any, told: str, warps: int) -> dict[str, Any]:
    """Resources of a program, programs of a multiprocessor, and what the machine code holds; `told`: by ptxas."""
    # The disassembler takes half a second to start.
    code = disassembled(kernel.asm["cubin"]) if re.search(r"mma|cp\.async", kernel.asm["ptx"]) else ""
    registers, spilled = (int(re.findall(pattern, told)[0]) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill st"))
    shared, of_warp = kernel.metadata.shared, 32 * (registers + -registers % 8)
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "programs": min(REGISTERS // (of_warp * warps), SHARED // (shared + 1024), WARPS // warps, PROGRAMS),
        "loops": loops(code),
        **{name: len(re.findall(pattern, code)) for name, pattern in COUNTED.items()},
    }


@cache
def disassembled(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile() as made:
        made.write(binary)
        made.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", made.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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

    def add(case: str, of: int, found: dict[str, dict[str, Any]]) -> None:
        print(f"{case}, {of}: registers, spilled bytes, shared KiB, programs of a multiprocessor, loops")
        for name, record in found.items():
            records.append({"case": case, "of": of, "kernel": name} | record)
            tile = "{} x {}, {} warps".format(*record["tile"])
            numbers = f"{record['registers']:5} {record['spilled_bytes']:5} {record['shared_bytes'] / 1024:7.1f}"
            print(f"  {name:<22} {tile:>18} {numbers} {record['programs']:3}  {record['loops'] or ''}")

    for D in options.widths:
        for case in options.cases:
            add(f"{case}, heads of", D, of_attention(CASES[case], D))
        add("caches, heads of", D, of_caches(D))
    for slots in (1, 8):
        add("head, targets", slots, of_head(slots))
    write(options.out, records)


if __name__ == "__main__":
    main()
