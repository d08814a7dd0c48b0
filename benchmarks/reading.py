"""A batch from a corpus that is not in memory: all of its documents asked for at once (`Store.fetch`), against each
read as it is touched.

    python benchmarks/reading.py [--folder DISK] [--tokens 1e9] [--pairs 20] [--out results.jsonl]

Packed rows, 65,536 tokens a batch, from random documents (lengths lognormal, median 500) on the disk of --folder; the
file is taken out of the system's memory before every batch. Below that, the same with everything in memory.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
from machine import header, options_of, quartiles, write

from tandem.corpus import PackedRows, Store, Tokenizer
from tandem.corpus.store import StoreWriter

ROWS, CONTEXT = 16, 4096
CHUNK = 1 << 14
"""Documents written at a time."""


def made(folder: Path, tokens: int) -> Store:
    writer, draw = StoreWriter(folder, Tokenizer.of_bytes()), np.random.default_rng(0)
    while writer.tokens < tokens:
        lengths = np.maximum(1, draw.lognormal(np.log(500), 1.0, CHUNK)).astype(int)
        ends = np.cumsum(lengths)
        ids, sizes = draw.integers(0, 256, ends[-1]), np.ones(ends[-1], int)
        writer.append(np.split(ids, ends[:-1]), np.split(sizes, ends[:-1]))
    writer.close(["random"])
    return Store(folder)


def forget(store: Store) -> None:
    """Takes the tokens out of the system's memory, but for pages that a batch has touched."""
    with (store.folder / "tokens.bin").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of(rows: PackedRows, step: int, asks: bool) -> float:
    with patch.object(Store, "fetch", Store.fetch if asks else lambda *_: None):
        began = time.perf_counter()
        rows.batch(step)
        return time.perf_counter() - began


def compare(what: str, store: Store, pairs: int, cold: bool) -> dict:
    rows, seconds = PackedRows(store, 1, ROWS, CONTEXT), {True: [], False: []}
    for step in range(2 * pairs):  # each reads documents of its own; warm, they are read a second time
        forget(store) if cold else rows.batch(step)
        asks = step % 4 in (0, 3)  # alternating order within pairs
        seconds[asks].append(seconds_of(rows, step, asks))
    low, ratio, high = quartiles([a / b for a, b in zip(seconds[False], seconds[True], strict=True)])
    ms = [1e3 * statistics.median(seconds[asks]) for asks in (False, True)]
    print(f"  {what:<12} {ratio:6.2f} x  [{low:.2f}, {high:.2f}]  {ms[0]:8.2f} / {ms[1]:.2f} ms  {pairs} pairs")
    return {"what": what, "ratio": ratio, "quartiles": [low, high], "ms": ms, "pairs": pairs}


def main() -> None:
    parser = options_of(__doc__, pairs=20)
    parser.add_argument("--folder", default=".", help="a folder on the disk to be measured")
    parser.add_argument("--tokens", type=float, default=1e9)
    options = parser.parse_args()
    print(header())
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        store = made(Path(scratch, "store"), int(options.tokens))
        found = [compare(what, store, options.pairs, cold=what == "from disk") for what in ("from disk", "in memory")]
        ahead = read_ahead(store.folder)
    print(f"  read-ahead of this disk: {ahead} KiB")
    write(options.out, [{"read-ahead KiB": ahead, "tokens": int(options.tokens), **record} for record in found])


def read_ahead(folder: Path) -> int:
    """KiB that the system reads around what is touched on this disk."""
    device = folder.stat().st_dev
    return int(Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text())


if __name__ == "__main__":
    main()
