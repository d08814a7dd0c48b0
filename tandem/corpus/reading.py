"""Reading the texts of a corpus in order, from their beginning or from any place at which reading was left.

    part 0   shard 0   shard 1   part 1   ...        a part: a source (sources.py) and the share of it that is held out

Documents of both sides come in one order, whatever is held in memory: batches of one side, and now and then one behind
which nothing is left over, so that the place it has is all there is to say of what was read.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from tandem.corpus.sources import Source

SIDES = ("train", "validation")

BATCH = 1 << 21
"""Characters encoded at a time: enough for many cores, little enough for memory."""
SAVE = 1 << 26
"""Characters after which an interrupted preparation can go on: seconds to a minute."""


class Part(NamedTuple):
    """A source of texts within a corpus."""

    source: Source
    held_out: float
    """Share of its documents that goes to validation: 1 for texts given as validation."""
    number: int
    """Number of the mixture's entry to which it belongs."""


class Place(NamedTuple):
    """Up to where the texts have been read: all that is before a shard of a part, and some documents of it."""

    part: int = 0
    shard: int = 0
    documents: int = 0
    before: int = 0
    """Bytes before the shard."""


BEGIN = Place()


class Document(NamedTuple):
    side: str
    number: int
    text: str
    sentences: list[str] | None
    """If the text came as a list of sentences."""
    done: int
    """Bytes read so far, of all parts."""
    place: Place
    """Up to this document."""


class Batch(NamedTuple):
    documents: list[Document]
    """Of one side."""
    done: int
    """Bytes read so far."""
    place: Place | None
    """Where all that was read is in this batch and those before it."""


def size_of(parts: list[Part]) -> int | None:
    sizes = [part.source.size for part in parts]
    return None if None in sizes else sum(size or 0 for size in sizes)


def documents_of(
    parts: list[Part], begin: Place = BEGIN, passed: Callable[[int], object] = lambda done: None
) -> Iterator[Document]:
    """The documents after `begin`. A share is held out by a hash of the text, so copies of a text are on the same side.

    `passed` is told the bytes read so far, now and then, while documents up to `begin` are passed over.
    """
    before = begin.before
    for number, part in enumerate(parts[begin.part :], begin.part):
        for shard in range(begin.shard if number == begin.part else 0, part.source.shards):
            place, read = Place(number, shard, 0, before), 0
            for given, read in part.source.read(shard):
                place = place._replace(documents=place.documents + 1)
                if place <= begin:
                    if place.documents % 1000 == 0:
                        passed(before + read)
                    continue
                text, sentences = (given, None) if isinstance(given, str) else ("".join(given), given)
                drawn = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
                side = SIDES[drawn < part.held_out * 2**64]
                yield Document(side, part.number, text, sentences, before + read, place)
            before += read if part.source.size is None else part.source.size


def batches_of(documents: Iterable[Document]) -> Iterator[Batch]:
    """Documents in order, by side in batches of BATCH characters, and every SAVE characters all that were read."""
    held: defaultdict[str, list[Document]] = defaultdict(list)
    size, unsaved, done = Counter[str](), 0, 0
    for document in documents:
        side, done = document.side, document.done
        held[side].append(document)
        size[side] += len(document.text)
        unsaved += len(document.text)
        if unsaved >= SAVE:
            *others, last = held.values()
            yield from (Batch(other, done, None) for other in others)
            yield Batch(last, done, document.place)
            held.clear()
            size.clear()
            unsaved = 0
        elif size[side] >= BATCH:
            yield Batch(held.pop(side), done, None)
            del size[side]
    yield from (Batch(batch, done, None) for batch in held.values())
