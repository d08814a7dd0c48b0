"""Draws docs/results/longer/curves.png, held-out likelihood as training FLOPs are spent, and prints the table of ends.

python docs/results/longer.py
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tandem.comparison.statistics import quantile

HERE = Path(__file__).parent / "longer"
NAMES = {
    "decoder": "decoder",
    "decoder_untied": "decoder, untied head, PyTorch's initialisation",
    "bags_of_two": "bags of 2 until 0.3",
    "bags": "bags of 4 until 0.3",
    "two_passes": "one corrected block, trained and read in two passes",
    "two_passes_streamed": "the same, read by the recurrence",
    "corrected_block": "in two passes, tied head, Tandem's initialisation",
    "context_one": "one corrected block, trained in 2 to 5 passes",
    "context_bags": "the same after bags of 2",
    "double_decoder": "double decoder with QK-norm",
    "double_bags": "the same after bags of 2",
    "decoder_same_text": "decoder, stopped after the tokens of SPS",
    "sps": "State-Prediction Separation (SPS)",
    "sps_slower": "SPS, rate 1e-3",
    "sps_bags": "SPS after bags of 2",
    "sps_from_token": "SPS, predictions start from their token",
    "sps_from_token_slower": "the same, rate 1e-3",
    "sps_from_token_text": "SPS, predictions start from their token, 1.73 times the FLOPs: as much text as the decoder",
    "sps_from_token_bags": "SPS, predictions start from their token, after bags of 2",
}
DRAWN = ("decoder", "decoder_untied", "bags_of_two", "bags", "context_one", "double_decoder", "sps", "sps_from_token")


def runs() -> dict[str, dict[int, dict]]:
    """Every run of this budget by arm and seed."""
    found: dict[str, dict[int, dict]] = defaultdict(dict)
    names = ["results", "more_seeds", "bags_first", "heads", "one_block_in_two_passes", "biases", "from_token"]
    for name in [*names, "decoder_at_the_tokens_of_sps"]:
        for line in (HERE / f"{name}.jsonl").read_text().splitlines():
            run = json.loads(line)
            arm = run.get("arm")
            if name == "heads" and arm == "decoder":
                arm = "decoder_untied"
            elif name == "one_block_in_two_passes":
                arm = "two_passes" if run["score_passes"] == 2 else "two_passes_streamed"
            elif name == "biases":
                arm = "sps" if run["recipe"] == "sps/1m" and not run["bias"] else None
            if arm:
                found[{"double": "double_decoder"}.get(arm, arm)][run["seed"]] = run
    return found


def row(name: str, arm: dict[int, dict], decoder: dict[int, dict]) -> str:
    """Of the table: text, ends by seed, and how far behind the decoder, paired by seed, with its 95 % interval."""
    text = next(iter(arm.values()))
    behind = np.array([run["nats_per_token"] - decoder[seed]["nats_per_token"] for seed, run in arm.items()])
    cell = f"{behind.mean():.3f}"
    if len(behind) > 2:
        half = quantile(0.05, (behind.std(ddof=1) / len(behind) ** 0.5, len(behind) - 1))
        cell += f" ({behind.mean() - half:.3f} to {behind.mean() + half:.3f})"
    ends = ", ".join(f"{arm[seed]['nats_per_token']:.3f}" if seed in arm else "-" for seed in sorted(decoder))
    tokens = text.get("training_tokens", text.get("tokens")) / 1e6
    return f"| {name} | {tokens:.1f} | {ends} | {cell if arm is not decoder else ''} |"


def main():
    found = runs()
    print("| arm | text, M tokens | nats per token, seeds 1, 2, 3 | behind the decoder |\n|---|---|---|---|")
    for arm, name in NAMES.items():
        print(row(name, found[arm], found["decoder"]))
    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, arm in enumerate(DRAWN):
        style = {"color": "black" if number < 2 else f"C{number - 2}", "linestyle": ":" if number == 1 else "-"}
        for seed, run in found[arm].items():
            if "curve" in run:
                x, y = zip(*((p["flops"] / 1e12, p["nats_per_token"]) for p in run["curve"]), strict=True)
                axes.plot(x, y, linewidth=1, label=NAMES[arm] if seed == 1 else None, **style)
    axes.set_xlabel("training, TFLOP")
    axes.set_ylabel("nats per token, 25 held-out documents")
    axes.set_title(
        "A million parameters, a line for each seed (one of SPS has none); the rate falls over the last tenth",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(HERE / "curves.png", format="png")


if __name__ == "__main__":
    main()
