"""Perplexity by passes, contraction and speed of decoding of the arms of a study: a table and a picture.

    for run in studies/NAME/runs/*seed*; do tandem analyse contraction $run; done     # plain decoders refuse
    python docs/results/context_ready_table.py studies/NAME docs/results/NAME         # passes.txt, passes.png

Means over seeds. Perplexities at K = 1, 2, 3, 5, 10 and streaming are of the documents of the analysis; `judged` is
that of all documents that the report compares, the only one that plain decoders have. Tokens a second are what each
run measured of itself when it ended, one text at a time.
"""

import json
import math
import sys
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

COLUMNS = ("1", "2", "3", "5", "10", "stream")


def read(study: Path) -> dict[str, list[dict]]:
    """By arm its runs: lines of results.jsonl, with the analysis where there is one."""
    arms: dict[str, list[dict]] = {}
    for run in map(json.loads, (study / "results.jsonl").read_text().splitlines()):
        if not run["trial"]:
            record = study / "runs" / run["run"] / "analysis" / "contraction.json"
            run["contraction"] = json.loads(record.read_text()) if record.exists() else None
            arms.setdefault(run["arm"], []).append(run)
    return arms


def rows(arms: dict[str, list[dict]]) -> list[list[str]]:
    """Of the table, its head first."""
    head = ["arm", "runs", *(f"K = {K}" for K in COLUMNS[:-1]), "streaming", "judged", "rho", "passes", "tokens/s"]
    table = [head]
    for arm, runs in arms.items():
        analysed = [run["contraction"] for run in runs if run["contraction"]]
        passes = [str(record["passes_to_tolerance"] or f"> {record['options']['passes']}") for record in analysed]
        table.append([
            arm,
            str(len(runs)),
            *(f"{mean(r[f'perplexity_{K}'] for r in analysed):.2f}" if analysed else "" for K in COLUMNS),
            f"{mean(math.exp(run['nats_per_token']) for run in runs):.2f}",
            f"{mean(record['rho'] for record in analysed):.2f}" if analysed else "",
            ", ".join(passes),
            f"{mean(run['decoding']['tokens_per_second'] for run in runs):,.0f}",
        ])  # fmt: skip
    return table


def draw(arms: dict[str, list[dict]], path: Path) -> None:
    """Perplexity over passes, streaming dotted."""
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes, numbers = figure.subplots(), [int(K) for K in COLUMNS[:-1]]
    for i, (arm, runs) in enumerate(arms.items()):
        analysed = [run["contraction"] for run in runs if run["contraction"]]
        if analysed:
            found = {K: mean(record[f"perplexity_{K}"] for record in analysed) for K in COLUMNS}
            axes.plot(numbers, [found[K] for K in COLUMNS[:-1]], f"C{i}o-", label=arm)
            axes.axhline(found["stream"], color=f"C{i}", linestyle=":")
    axes.set_xlabel("passes, K (dotted: streaming)")
    axes.set_ylabel("perplexity")
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def main():
    study, out = map(Path, sys.argv[1:])
    arms = read(study)
    table = rows(arms)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    out.mkdir(parents=True, exist_ok=True)
    (out / "passes.txt").write_text("\n".join(lines) + "\n")
    draw(arms, out / "passes.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
