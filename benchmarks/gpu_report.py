"""Turns the JSON lines of gpu.py into a page: the machine, the tests, every number, and which goals are reached.

python benchmarks/gpu_report.py FOLDER
"""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]


def write_report(folder: Path, verdicts: Lines) -> str:
    """Writes report.md from lines.jsonl; returns the page."""
    file = folder / "lines.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    lines = [record for record in records if "part" in record]
    machine = next((record for record in records if "part" not in record), {})
    of = {part: [line for line in lines if line["part"] == part] for part in {line["part"] for line in lines}}
    page = [
        "# Measured on " + str(machine.get("device", "no machine")),
        ", ".join(f"{key} {value}" for key, value in machine.items() if key != "device"),
        table(("part", "verdict", "s"), ([v["name"], v["verdict"], v["seconds"]] for v in verdicts)),
        "## Arms that failed\n\n" + (failed_table(lines) or "None."),
        "## Goals\n\n" + table(("goal", "asked", "measured", "reached"), goals(of)),
        "## Attention, forward and backward, ms\n\n" + attention_table(of.get("attention", [])),
        "## Lines for tandem/nn/measured.py\n\n```python\n" + "\n".join(speeds(of, machine)) + "\n```",
        *(["## Tiles\n\n" + shapes_table(of["shapes"])] if "shapes" in of else []),
        *(f"## {part}\n\n" + record_table(of[part]) for part in sorted(of.keys() - {"attention", "shapes"})),
    ]
    text = "\n\n".join(page) + "\n"
    (folder / "report.md").write_text(text)
    return text


def table(titles: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join("" if x is None else str(x) for x in line) + " |" for line in lines)


def failed_table(lines: Lines) -> str | None:
    """Every line and arm without a number, and its error: a part passes also where some of its arms fail."""
    rows = []
    for line in lines:
        of = ", ".join(str(x) for key, x in line.items() if isinstance(x, str | int) and key not in ("part", "failed"))
        arms = {"": line} | line.get("arms", {})
        rows += [[line["part"], of, arm, x["failed"]] for arm, x in arms.items() if "failed" in x]
    return table(("part", "of", "arm", "error"), rows) if rows else None


# ---- attention ------------------------------------------------------------------------------------------------------


def ms(line: dict, arm: str) -> float | None:
    return line["arms"].get(arm, {}).get("ms")


def attention_table(lines: Lines) -> str:
    names = list(dict.fromkeys(name for line in lines for name in line["arms"]))
    rows = []
    for line in lines:
        fast = ms(line, "triton")
        speed = f"{line['flops'] / fast / 1e9:.0f}" if fast and "flops" in line else None
        cells = [f"{ms(line, name):.3f}" if ms(line, name) else line["arms"].get(name) and "failed" for name in names]
        rows.append([line["T"], line["D"], line["mask"], line["documents"], *cells, speed])
    return table(("T", "D", "mask", "documents", *names, "triton TFLOP/s"), rows)


def shapes_table(lines: Lines) -> str:
    """Every kernel's tiles, the fastest first; `off`: how far its result is from that of the shipped ones."""
    rows = []
    for line in lines:
        by_kernel: dict[str, list[str]] = {}
        for arm in line["arms"]:
            by_kernel.setdefault(arm.rpartition(" ")[0], []).append(arm)
        for arms in by_kernel.values():
            for arm in sorted(arms, key=lambda arm: ms(line, arm) or float("inf")):
                shown = line["arms"][arm].get("failed") or f"{ms(line, arm):.3f}"
                off, mark = line["off"].get(arm), " (shipped)" if arm == arms[0] else ""
                rows.append([line["D"], line["mask"], arm + mark, shown, None if off is None else f"{off:.1e}"])
    return table(("D", "mask", "kernel and tiles", "ms", "off"), rows)


def speeds(of: dict[str, Lines], machine: dict) -> list[str]:
    """Lines of SPEEDS: for every shape of attention, the smallest ratio of flex to triton."""
    ratios: dict[tuple, list[float]] = {}
    for line in of.get("attention", []):
        flex, triton = ms(line, "flex"), ms(line, "triton")
        if flex and triton and "groups" in line:
            ratios.setdefault((line["sources"], line["groups"], line["D"]), []).append(flex / triton)
    device = machine.get("device")
    return [f'Speed("{device}", {s}, {g}, {D}, {min(all_):.2f}, "..."),' for (s, g, D), all_ in ratios.items()]


# ---- goals ----------------------------------------------------------------------------------------------------------


def goals(of: dict[str, Lines]) -> list[list[Any]]:
    """(what, asked, measured, reached) of every goal; numbers may be missing."""
    attention = of.get("attention", [])

    def at(mask: str, documents: str, D: int = 64, arm: str = "triton", T: int = 4096) -> float | None:
        found = [
            ms(x, arm) for x in attention if (x["mask"], x["documents"], x["D"], x["T"]) == (mask, documents, D, T)
        ]
        return next((x for x in found if x), None)  # the first: SDPA is timed in three processes, causal masks in one

    def step(network: str, key: str) -> float | None:
        return least(x.get(key) for x in of.get("steps", []) if x.get("network") == network)

    def decode(network: str, rows: int, key: str) -> float | None:
        found = [x.get(key) for x in of.get("decode", []) if (x.get("network"), x.get("rows")) == (network, rows)]
        return found[0] if found else None

    one, sps, causal = at("causal", "none"), at("sps", "none"), "causal, T 4,096, D {}: speed over the fastest SDPA"
    sdpa = {D: [at("causal", "none", D, f"sdpa {kind}") for kind in ("flash", "cudnn")] for D in (64, 128)}
    mfu, all_pairs = (
        max((x[key] for x in of.get("steps", []) if x.get("network") == "decoder" and key in x), default=None)
        for key in ("mfu", "mfu, all pairs")
    )
    graph, eager, weights = "graph tokens/s", "eager tokens/s", "weight bytes"
    wide, six = "context_ready, 1 wide block", "decoder, 6 blocks"
    by_sdpa = decode("decoder", 16, f"{eager} by SDPA")
    prompt = [decode(name, 16, "prefill seconds") for name in ("sps", "decoder")]
    decoding = "decoding, M shape, batch 16, graphs: {} over decoder"
    timed = lambda part: [x for x in of.get(part, []) if "arms" in x]  # a part that failed is a line without
    bags = next(iter(timed("bags")), {"arms": {}, "bytes": {}})
    rows = [
        *((causal.format(D), ">=", 0.80, over(least(sdpa[D]), at("causal", "none", D))) for D in (64, 128)),
        ("documents of 1,000 tokens over none", "<=", 0.40, over(at("causal", "1000"), one)),
        ("lognormal documents over none", "<=", 0.50, over(at("causal", "lognormal"), one)),
        ("SPS, window 64, over one causal stream", "<=", 2.4, over(sps, one)),
        ("... of the fastest SDPA", "", None, over(sps, least(sdpa[64]))),
        ("SPS: FlexAttention in turns over triton", ">=", 3.0, over(at("sps", "none", arm="flex in turns"), sps)),
        ("double decoder over one causal pass", "<=", 1.25, over(at("double decoder", "none"), one)),
        ("double decoder, aligned to 128", "<=", 1.10, over(at("double decoder, aligned", "none"), one)),
        ("... of the fastest SDPA", "", None, over(at("double decoder, aligned", "none"), least(sdpa[64]))),
        ("training step of SPS over the decoder, S", "<=", 1.85, step("sps", "over decoder")),
        ("model FLOP use of the decoder, S", ">=", 0.45, mfu),
        ("... as PaLM counts it, all pairs of a row", "", None, all_pairs),
        *(
            (decoding.format(name), ">=", asked, over(decode(name, 16, graph), decode("decoder", 16, graph)))
            for name, asked in (("sps", 0.95), ("double_decoder", 2.2))
        ),
        ("... the prompt before: time of sps over decoder", "", None, over(*prompt)),
        ("... eager: the decoder by its kernel over SDPA", "", None, over(decode("decoder", 16, eager), by_sdpa)),
        ("decoding, batch 1, eager: wide over six", ">=", 2.6, over(decode(wide, 1, eager), decode(six, 1, eager))),
        ("... as CUDA graphs", "", None, over(decode(wide, 1, graph), decode(six, 1, graph))),
        ("... as bytes of weights predict", "", None, over(decode(six, 1, weights), decode(wide, 1, weights))),
        ("a step in bags of 8 over one of next tokens", "<=", 1.03, over(ms(bags, "bags"), ms(bags, "next token"))),
        ("... its peak memory", "<=", 1.02, over(*(bags["bytes"].get(arm) for arm in ("bags", "next token")))),
        *(row for x in timed("passes") for row in _recomputed(x)),
    ]
    return [
        [what, f"{sign} {asked}" if asked else None, _shown(found), _is_reached(sign, asked, found)]
        for what, sign, asked, found in rows
    ]


def _recomputed(line: dict) -> Iterator[tuple]:
    """Of K = 5 passes recomputed: time over passes kept, at most (4 K - 1) / 3 K and a twentieth; memory over that of
    one pass and what each begins from, in bfloat16."""
    K, memory = 5, line["bytes"]
    states = K * line["rows"] * line["T"] * line.get("width", 0) * 2
    one = memory["K 1"] + states if memory["K 1"] and states else None
    what = f"5 passes over {line['depth']} blocks: recomputed over kept, time"
    yield what, "<=", 1.33, over(ms(line, "K 5 recomputed"), ms(line, "K 5"))
    yield "... memory over one pass and what five begin from", "<=", 1.0, over(memory["K 5 recomputed"], one)


def least(found: Iterable[float | None]) -> float | None:
    return min((x for x in found if x), default=None)


def over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _shown(found: float | None) -> str:
    return "not measured" if found is None else f"{found:.3f}"


def _is_reached(sign: str, asked: float | None, found: float | None) -> str | None:
    if asked is None or found is None:
        return None
    return "yes" if (found >= asked if sign == ">=" else found <= asked) else "no"


# ---- the rest -------------------------------------------------------------------------------------------------------


def record_table(lines: Lines) -> str:
    flat = [_flat(line) for line in lines]
    titles = list(dict.fromkeys(key for line in flat for key in line))
    return table(titles, ([line.get(title) for title in titles] for line in flat))


def _flat(line: dict) -> dict[str, str]:
    """One cell per number: the medians of arms, and floats with four digits."""
    cells = {}
    for key, value in line.items():
        if key == "arms":
            cells |= {f"{arm}, ms": f"{x['ms']:.2f}" if "ms" in x else x.get("failed") for arm, x in value.items()}
        elif isinstance(value, dict):
            cells |= {f"{key} of {name}": x for name, x in value.items()}
        elif isinstance(value, list):
            cells[key] = " to ".join(f"{x:.2f}" for x in value)
        elif key != "part":
            cells[key] = f"{value:.4g}" if isinstance(value, float) else value
    return cells


if __name__ == "__main__":
    print(write_report(Path(sys.argv[1]), []))
