"""Boundaries: turns the pieces of a text into sentences of tokens, none too long, few too short (see sentences.py).

Letters: N tokens of a document without its end; S sentences.
"""

import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

SHORTEST = 3
"""A sentence with fewer tokens is joined to a neighbour."""

# From characters to tokens --------------------------------------------------------------------------------------

_IS_SPACE = np.array([chr(point).isspace() for point in range(0x3002)])
"""By code point; the last entry stands for all higher ones, none of which is white space."""


def characters(text: str) -> tuple[np.ndarray, np.ndarray]:
    """The code point of each character (n,), and the UTF-8 byte at which it begins (n + 1,), the end included."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return points, np.cumsum(np.r_[0, 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)])


def token_starts(pieces: Sequence[str], sizes: np.ndarray) -> np.ndarray:
    """The tokens at which sentences start, (S,) int64, the first one 0.

    Args:
        pieces: the pieces into which the splitter cut the text, in order.
        sizes: bytes of text that each token covers, (N,); they add up to those of the pieces.
    """
    return aligned(pieces, sizes)[0]


def aligned(pieces: Sequence[str], sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """`token_starts`, and how many tokens hold text of two sentences."""
    points, begins = characters("".join(pieces))
    visible = np.flatnonzero(~_IS_SPACE[np.minimum(points, len(_IS_SPACE) - 1)])
    if not len(visible):  # one sentence; of an empty text it is the document end alone
        return np.zeros(1, np.int64), 0
    piece = np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])
    begins, ends = begins[:-1], np.cumsum(sizes, dtype=np.int64)
    # The first and the last visible character of which each token holds a byte.
    first = np.searchsorted(visible, np.searchsorted(begins, ends - sizes, side="right") - 1)
    last = np.searchsorted(visible, np.searchsorted(begins, ends) - 1, side="right") - 1
    has_text = first <= last
    sentence = np.full(len(sizes), piece[visible[0]])
    sentence[has_text] = piece[visible[first[has_text]]]
    shared = int((piece[visible[last[has_text]]] > sentence[has_text]).sum())
    return np.flatnonzero(np.diff(np.maximum.accumulate(sentence), prepend=-1)), shared


# Cap and merge --------------------------------------------------------------------------------------------------


def cap_lengths(lengths: Sequence[int], cap: int, strength: Callable[[int], int]) -> list[int]:
    """Cuts sentences of more than `cap` tokens into pieces of at most `cap`.

    Args:
        lengths: tokens of the sentences of a document, in order.
        strength: gives the strength of the mark after the first n tokens of the document.
    """

    def cut(begin: int, length: int) -> list[int]:
        if length <= cap:
            return [length]
        half = range(-(-length // 4), 3 * length // 4 + 1)
        first = min(half, key=lambda n: (-strength(begin + n), abs(2 * n - length), n))
        return cut(begin, first) + cut(begin + first, length - first)

    begins = itertools.accumulate(lengths, initial=0)
    return [piece for begin, length in zip(begins, lengths, strict=False) for piece in cut(begin, length)]


def merge_lengths(lengths: Sequence[int], cap: int) -> list[int]:
    """Joins sentences of fewer than SHORTEST tokens to the previous one, or else to the next, if the sum fits."""
    merged: list[int] = []
    waiting = 0  # tokens to join to the next
    for length, following in zip(lengths, [*lengths[1:], cap], strict=True):
        length, waiting = length + waiting, 0
        if length < SHORTEST and merged and merged[-1] + length <= cap:
            merged[-1] += length
        elif length < SHORTEST and length + following <= cap:
            waiting = length
        else:
            merged.append(length)
    return merged


_MARKS = (
    (5, re.compile(r"\n\s*$")),
    (4, re.compile(r"[.!?…][\"'”’»)\]}]*\s*$")),
    (3, re.compile(r"[;:]\s*$")),
    (2, re.compile(r"([,)\]}–—]|--|\s-)\s*$")),
    (1, re.compile(r"")),
)
_WINDOW = 64
"""Bytes examined before a cut."""


def mark(text: bytes, ends: np.ndarray, tokens: int) -> int:
    """Strength of the mark after the first `tokens` tokens of a document; `ends`: the byte at which each token ends.

    5 line break, 4 end of a sentence with any closing quotes or brackets, 3 `;` `:`, 2 comma, bracket or dash, 1 end of
    a word. A mark counts only at the end of a word (so not in 3.5), after any white space that follows; a long dash
    also counts between words.
    """
    at = int(ends[tokens - 1])
    before = text[max(0, at - _WINDOW) : at].decode(errors="ignore")
    after = text[at : int(ends[tokens])] if tokens < len(ends) else b""
    if not after.strip() or after[0] & 0xC0 == 0x80:  # white space stays with the sentence before; or half a character
        return 0
    if after[:1].isspace() or before[-1:].isspace():
        return next(strength for strength, pattern in _MARKS if pattern.search(before))
    return 2 if before.endswith(("–", "—", "--")) else 0
