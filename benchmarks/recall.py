"""Does a fact of the first sentence reach the fourth, by which way, and what does another's fact cost?

    python benchmarks/recall.py [--out docs/results/recall] [KEY=VALUE of the study ...]

    Ada likes red. The lamp is here. The road is here. So Ada likes red.

Name, liking and things are each one of 32, so the fourth sentence costs twice ln 32 = 3.47 nats where the first is
forgotten. The text goes to ./recall, in sentences. The study `recall` is run on it, or shown, and then each of its runs
is asked for the nats of name and liking in the fourth sentence (means of the held-out documents) and, if it has a
memory, for what the memories of other documents cost (`tandem analyse gates`).
"""

import json
import random
from pathlib import Path

import torch
from machine import options_of, write

from tandem.analysis.gates import Gates
from tandem.comparison.grid import compare, load_grid
from tandem.comparison.trained import open_trained

NAMES, LIKED, THINGS = (
    words.split()
    for words in (
        "Ada Ben Cora Dan Eva Finn Gus Hana Ian Jana Kai Lena Max Nina Otto Pia "
        "Quin Rosa Sam Tara Uma Vera Will Xena Yuri Zoe Abel Beth Carl Dora Emil Fred",
        "red blue green black white pink grey brown gold silver orange purple violet yellow amber ivory "
        "teal navy coral lilac olive ruby jade cream bronze copper indigo scarlet maroon beige azure khaki",
        "lamp door road tree ship book horse river stone cloud table wall clock train bird house "
        "apple chair coat drum fence gate hill lake map nest oven pond rope sail tent wheel",
    )
)
DOCUMENTS = {"train": 120_000, "validation": 1_000}


def write_text(folder):
    draw = random.Random(0).choice
    folder.mkdir(exist_ok=True)
    for name, documents in DOCUMENTS.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(documents):
                fact = f"{draw(NAMES)} likes {draw(LIKED)}."
                between = [f"The {draw(THINGS)} is here. " for _ in range(2)]
                file.write(json.dumps({"text": [f"{fact} ", *between, f"So {fact}"]}) + "\n")


@torch.no_grad()
def answers(run):
    """Mean nats of name and of liking in the fourth sentence."""
    store, network = run.corpus.validation, run.network
    asked = {}
    for document in range(len(store)):
        words = [store.tokenizer.decode([token]).strip() for token in store.document(document).tolist()]
        name, liking = (len(words) - words[::-1].index(word) for word in ("So", "likes"))  # what follows the last one
        asked[document] = {**dict.fromkeys(range(name, liking - 1), "name"),
                           **dict.fromkeys(range(liking, len(words) - 2), "liking")}  # fmt: skip
    found = {"name": 0.0, "liking": 0.0}
    for scoring in network.scoring(store, run.recipe.batch.context, 64, range(len(store)), True):
        nll = network.score(scoring.batch)
        for document, index, nats in zip(
            *(x.flatten().tolist() for x in (scoring.document, scoring.index, nll)), strict=True
        ):
            if what := asked.get(document, {}).get(index):
                found[what] += nats / len(store)
    return found


def main() -> int:
    arguments = options_of(__doc__)
    arguments.add_argument("--out", type=Path, help="a folder for the record and the table")
    arguments.add_argument("override", nargs="*")
    options = arguments.parse_args()
    write_text(Path("recall"))
    study = load_grid("recall", options.override)
    compare(study, Path("studies") / study.name)
    records = []
    for path in sorted((Path("studies") / study.name / "runs").iterdir()):
        run = open_trained(path)
        record = {"run": path.name, **answers(run)}
        if getattr(run.network, "gates", None):
            gates = Gates(Gates.Config(documents=400))
            record |= {"exchange": gates.measure(run)["cost_of_exchange"]}
        records.append(record)
    lines = [f"{'run':<20}{'name':>8}{'liking':>8}  nats; memories exchanged, nats per token"]
    for r in records:
        exchanged = ", ".join(f"{name} {cost:+.3f}" for name, cost in r.get("exchange", {}).items())
        lines.append(f"{r['run']:<20}{r['name']:>8.3f}{r['liking']:>8.3f}  {exchanged}")
    print(*lines, sep="\n")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write(options.out / "answers.jsonl", records)
        (options.out / "answers.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
