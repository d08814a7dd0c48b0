"""Preparing a corpus against the tokenizers library encoding the same texts from memory: speed, and memory growth.

    python benchmarks/prepare.py --texts 'data/*.jsonl.gz' [--tokenizer gpt2_folder] [--megabytes 100] [--out FILE]

A BPE of 4,096 trained on the texts is always measured, other tokenizers on request. A ratio of 1 would mean that
reading, splitting, counting bytes and writing cost nothing. Interleaved pairs, one process each; the ratio per CPU
second is printed beside the wall-clock ratio, because it hardly depends on what else the machine is doing.
"""

import argparse
import gzip
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import append, header, machine, options_of, quartiles

from tandem.corpus.prepare import Corpus, prepare
from tandem.corpus.reading import BATCH
from tandem.corpus.sources import find_sources
from tandem.corpus.tokenizer import Tokenizer, load_tokenizer
from tandem.training.health import peak_memory

CPU = torch.device("cpu")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--tokenizer", nargs="*", default=[])
    parser.add_argument("--megabytes", type=int, default=100, help="of text, shared evenly by the files")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    parser.add_argument("--arm", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        arm, *arguments = options.arm
        print(json.dumps(ARMS[arm](*arguments)))
        return
    print(header())
    with tempfile.TemporaryDirectory() as scratch:
        corpus, trained = Path(scratch, "texts"), Path(scratch, "bpe.json")
        gather(options.texts, options.megabytes * 1_000_000, corpus)
        Tokenizer.train(itertools.islice(documents(corpus), 5000), 4096).to_file(trained)
        for tokenizer in (str(trained), *options.tokenizer):
            compare(corpus, tokenizer, options.pairs, scratch, options.out)


def gather(texts: list[str], size: int, folder: Path) -> None:
    """The same amount from the start of every file, as gzipped JSON lines."""
    folder.mkdir()
    sources = find_sources("--texts", texts, "text")
    for number, source in enumerate(sources):
        taken = 0
        with gzip.open(folder / f"{number:03}.jsonl.gz", "wt") as file:
            for text, _ in source.read():
                file.write(json.dumps({"text": text}) + "\n")
                taken += len(text.encode())
                if taken >= size / len(sources):
                    break


def documents(corpus: str | Path):
    return (text for source in find_sources("--texts", [str(corpus)], "text") for text, _ in source.read())


def encode_alone(corpus: str, tokenizer: str, folder: str) -> dict:
    """Texts in memory, in batches like those of `prepare`; ids stay inside the library."""
    inner = load_tokenizer(tokenizer)._inner
    batches: list[list[str]] = [[]]
    for text in documents(corpus):
        if sum(map(len, batches[-1])) >= BATCH:
            batches.append([])
        batches[-1].append(text)
    return timed(lambda: sum(len(e) for b in batches for e in inner.encode_batch_fast(b, add_special_tokens=False)))


def prepare_all(corpus: str, tokenizer: str, folder: str) -> dict:
    def run() -> int:
        prepared = prepare(Corpus.Config(texts=corpus, tokenizer=tokenizer, folder=folder))
        return sum(len(store.tokens) - len(store) for store in (prepared.train, prepared.validation))

    return timed(run)


ARMS = {"encode": encode_alone, "prepare": prepare_all}


def timed(run) -> dict:
    before, start, cpu = peak_memory(CPU), time.perf_counter(), time.process_time()
    tokens = run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    grown = peak_memory(CPU) - before
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu, "memory_growth": grown}


def compare(corpus: Path, tokenizer: str, pairs: int, scratch: str, out: Path | None) -> None:
    name, runs = Path(tokenizer).stem, {arm: [] for arm in ARMS}
    for pair in range(pairs):
        for arm in ARMS if pair % 2 else reversed(ARMS):
            command = [sys.executable, __file__, "--texts", "-", "--arm", arm, str(corpus), tokenizer]
            said = subprocess.check_output([*command, f"{scratch}/{name}-{pair}"])
            runs[arm].append(json.loads(said))
    assert len({run["tokens"] for arm in runs.values() for run in arm}) == 1, "both sides encode the same"
    record = {"what": f"prepare / encode alone, {name}", "pairs": pairs, "runs": runs}
    for unit in ("seconds", "cpu_seconds"):
        ratios = [e[unit] / p[unit] for e, p in zip(runs["encode"], runs["prepare"], strict=True)]
        low, ratio, high = record[unit] = quartiles(ratios)
        print(f"  {record['what']:<40} tokens per {unit:<12} {ratio:.2f} x  [{low:.2f}, {high:.2f}]")
    record["tokens"] = runs["prepare"][0]["tokens"]
    record["memory_growth"] = max(run["memory_growth"] for run in runs["prepare"])
    rate = record["tokens"] / statistics.median(run["seconds"] for run in runs["prepare"])
    print(
        f"  {record['tokens'] / 1e6:.1f} M tokens, {rate / 1e6:.2f} M tokens/s, {pairs} interleaved pairs, "
        f"memory + {record['memory_growth'] / 1e6:.0f} MB"
    )
    if out:
        append(out, record | {"machine": machine()})


if __name__ == "__main__":
    main()
