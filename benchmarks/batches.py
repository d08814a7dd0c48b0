"""Random batches for benchmarks. Needs no more than importing tandem.networks does."""

import torch
from torch import Tensor

from tandem.corpus import IGNORE, Batch
from tandem.corpus.streams import Stream, StreamBatch, stream_totals


def one_document(vocabulary: int, rows: int, context: int, step: int) -> Batch:
    """Rows of random tokens, each of one document."""
    ids = drawn((rows, context + 1), vocabulary, step)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.zeros(rows, context, dtype=torch.long))


def in_bags(ids: Tensor, bag: int) -> Batch:
    """Rows of ids, each of one document, read in bags that are each asked for the next one."""
    bags = ids.unflatten(1, (-1, bag))
    targets = bags[:, 1:].clone()
    targets[:, -1, 1:] = IGNORE  # the last bag of a row has one target
    return Batch(bags[:, :-1].contiguous(), targets, torch.zeros(targets.shape[:2], dtype=torch.long))


def drawn(shape: tuple[int, ...], vocabulary: int, seed: int) -> Tensor:
    """Random ids, low ones more frequent."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) ** 3 * vocabulary).long()


def lengths_of(step: int, tokens: int) -> list[list[int]]:
    """Streams of 15 to 30 sentences, so many tokens or just over; mean 25 and a long tail."""
    generator, lengths = torch.Generator().manual_seed(step), []
    while sum(map(sum, lengths)) < tokens:
        count = int(torch.randint(15, 31, (), generator=generator))
        lognormal = (torch.randn(count, generator=generator) * 0.55 + 3.07).exp().round().clamp(3, 64)
        lengths.append(lognormal.long().tolist())
    return sorted(lengths, key=len, reverse=True)


def streams(lengths: list[list[int]], vocabulary: int) -> StreamBatch:
    """Random text in streams of sentences of these lengths."""
    text, end = drawn((sum(map(sum, lengths)),), vocabulary, 0), torch.tensor([vocabulary])
    pieces = text.split([n for stream in lengths for n in stream])
    targets = torch.cat([part for piece in pieces for part in (piece, end)])[None]
    made, ids = [Stream(i, 0, stream) for i, stream in enumerate(lengths)], list(range(len(lengths)))
    return StreamBatch(text, targets, lengths, ids, [0] * len(ids), *stream_totals(made), end_weight=0.05)
