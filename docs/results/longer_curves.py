"""Draws docs/results/longer/curves.png: held-out likelihood of six networks as their training FLOPs are spent.

python docs/results/longer_curves.py
"""

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent / "longer"
NAMES = {
    "decoder": "decoder",
    "bags_of_two": "Token Superposition, bags of 2 until 0.3",
    "bags": "the same, bags of 4",
    "context_one": "Context-Ready, one corrected block",
    "double_decoder": "double decoder with QK-norm",
    "sps_slower": "State-Prediction Separation",
}


def points(curve):
    return zip(*((point["flops"] / 1e12, point["nats_per_token"]) for point in curve), strict=True)


def main():
    runs = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    curves = {run["arm"]: run["curve"] for run in runs}
    untied = json.loads((HERE / "heads.jsonl").read_text().splitlines()[0])["curve"]
    figure = Figure(figsize=(8, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for arm, name in NAMES.items():
        axes.plot(*points(curves[arm]), marker=".", label=name, color="black" if arm == "decoder" else None)
    axes.plot(*points(untied), "k:", label="decoder, untied head, PyTorch's initialisation")
    axes.set_xlabel("training, TFLOP")
    axes.set_ylabel("nats per token, 25 held-out documents")
    axes.set_title("A million parameters, one seed; the learning rate falls over the last tenth", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(HERE / "curves.png", format="png")


if __name__ == "__main__":
    main()
