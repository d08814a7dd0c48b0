"""Draws docs/results/superposition_sweep/map.png: the sweep over bags and shares of the steps, beside the paper's.

    python docs/results/superposition_map.py

Numbers are nats per token below the run that reads tokens all along. Paper: Token Superposition Training (arXiv
2605.06546), table 4: 270 M parameters, 20,000 steps, uniform weights.
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent / "superposition_sweep"
BAGS, SHARES = (2, 4, 8), (0.1, 0.3, 0.5)
PAPER = {"next_token": 3.2124, 2: (3.1847, 3.1723, 3.1729), 4: (3.1549, 3.1457, 3.1496), 8: (3.1495, 3.1425, 3.1506)}


def gains_here() -> list[list[float]]:
    """By share, by bag."""
    runs = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    found = {run["arm"]: run["nats_per_token"] for run in runs}
    arms = [[f"bag{bag}-share{round(10 * share)}" for bag in BAGS] for share in SHARES]
    return [[found["next_token"] - found[arm] for arm in row] for row in arms]


def main():
    paper = [[PAPER["next_token"] - PAPER[bag][i] for bag in BAGS] for i in range(len(SHARES))]
    figure = Figure(figsize=(9, 3.6), dpi=120, layout="constrained")
    panels = {"here: 1 M parameters, 500 steps, one seed": gains_here(), "paper: 270 M parameters, 20,000 steps": paper}
    for axes, (title, gains) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        largest = max(abs(gain) for row in gains for gain in row)
        axes.imshow(gains, cmap="RdBu", vmin=-largest, vmax=largest, origin="lower", aspect="auto")
        for row, shares in enumerate(gains):
            for column, gain in enumerate(shares):
                color = "white" if abs(gain) > 0.6 * largest else "black"
                axes.text(column, row, f"{gain:+.3f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(BAGS)), [str(bag) for bag in BAGS])
        axes.set_yticks(range(len(SHARES)), [f"{share:g}" for share in SHARES])
        axes.set_xlabel("tokens of a bag")
        axes.set_ylabel("share of the steps in bags")
        axes.set_title(title, fontsize=10)
    figure.suptitle("Nats per token gained over next tokens all along, at equal FLOPs (blue: better)", fontsize=11)
    figure.savefig(HERE / "map.png", format="png")


if __name__ == "__main__":
    main()
