"""Harness tasks at several batch sizes, by Tandem's adapter and by the exported model: are the numbers the same?

    TANDEM_DATA=FOLDER python benchmarks/tasks.py runs/plain/model runs/sps/model [--limit 200] [--out FILE]

Every way answers the same items. The first way is the adapter at the first batch size; every other one shows its
largest difference from the first in an item's log-likelihood, and how many items or metrics differ: ideally none.
"""

import argparse
import sys
from pathlib import Path

from lm_eval.models.huggingface import HFLM
from machine import header, options_of, write

from tandem.evaluation.harness import Harness, run_tasks
from tandem.evaluation.task_files import read_tasks
from tandem.export.weights import load_exported


def main() -> int:
    arguments = options_of(__doc__)
    arguments.add_argument("models", nargs="+", type=Path, help="exported folders")
    arguments.add_argument("--tasks", default="hellaswag,arc_easy,piqa,lambada_openai")
    arguments.add_argument("--limit", type=int, default=200)
    arguments.add_argument("--rows", type=lambda text: [int(rows) for rows in text.split(",")], default=[1, 7, 32])
    arguments.add_argument("--out")
    options = arguments.parse_args()
    print(header())
    records = [record for model in options.models for record in compare_ways(model, options)]
    write(options.out, records)
    return int(any(record["items that differ"] or record["metrics that differ"] for record in records))


def compare_ways(model: Path, options: argparse.Namespace) -> list[dict]:
    """A record for each way and task."""
    files, first, records = read_tasks(options.tasks), None, []
    network, _ = load_exported(model)
    for way in adapter, exported:
        for rows in options.rows:
            found = run_tasks(way(model, rows), files, options.limit)
            first = first or found
            for reached, expected in zip(found, first, strict=True):
                record = {
                    "model": f"{type(network).__name__}, {sum(p.numel() for p in network.parameters()):,} parameters",
                    **{"way": way.__name__, "rows": rows, "task": reached.name, "items": reached.count},
                    **{name: metric.value for name, metric in reached.metrics.items()},
                    **differences(reached, expected),
                }
                print("  ".join(f"{name} {value}" for name, value in record.items()), flush=True)
                records.append(record)
    return records


def adapter(model: Path, rows: int):
    network, tokenizer = load_exported(model)
    return Harness(network, tokenizer, rows=rows)


def exported(model: Path, rows: int):
    return HFLM(pretrained=str(model), trust_remote_code=True, batch_size=rows, device="cpu", dtype="float32")


def differences(reached, expected) -> dict:
    """Items must agree in every metric and in what is greedy; their log-likelihoods up to rounding."""
    pairs = list(zip(reached.items, expected.items, strict=True))
    furthest = max(
        abs(nats - other)
        for item, like in pairs
        for (nats, _), (other, _) in zip(item["answers"], like["answers"], strict=True)
    )
    same = [name for name in reached.items[0] if name not in ("answers", "perplexity")]
    return {
        "furthest nats": furthest,
        "items that differ": sum(any(item[name] != like[name] for name in same) for item, like in pairs),
        "metrics that differ": sum(
            abs(metric.value - expected.metrics[name].value) > 1e-5 * abs(metric.value)
            for name, metric in reached.metrics.items()
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
