"""Draws docs/masks.svg: what each position may read in the five methods, as spans of one or two sources.

    python docs/masks.py

A cell is a (query, key) pair; a row reads one contiguous span of each source. Twelve tokens, documents of 5 and 7.
"""

from pathlib import Path

T, STARTS = 12, [0] * 5 + [5] * 7
BLOCK = [0, 0, 0, 3, 3, 5, 5, 5, 8, 8, 8, 11]  # blocks of the double decoder
SENTENCE = [0, 0, 0, 3, 3, 5, 5, 7, 7, 7, 10, 10]
BLUE, ORANGE, CELL, GAP = "#3b6ea5", "#e08a3c", 11, 46


def first_sentence(i):
    """Sentences of the document of i that end before the sentence of i: one thought each."""
    return [s for s in range(T) if SENTENCE[s] == s and STARTS[i] <= s < SENTENCE[i]]


PANELS = [  # title, spans of the first source, title and spans of the second
    ("decoder", "tokens", [(STARTS[i], i + 1) for i in range(T)], None, None),
    (
        "state-prediction separation",
        "states",
        [(STARTS[i], i + 1) for i in range(T)],
        "predictions, window 2",
        [(max(STARTS[i], i - 2), i + 1) for i in range(T)],
    ),
    (
        "double decoder",
        "context",
        [(STARTS[i], max(BLOCK[i], STARTS[i])) for i in range(T)],
        "own block",
        [(max(BLOCK[i], STARTS[i]), i + 1) for i in range(T)],
    ),
    ("superposition, bags of 2", "bags", [(0, i + 1) for i in range(T // 2)], None, None),
    (
        "thought gestalt",
        "thoughts",
        [(0, len(first_sentence(i))) for i in range(T)],
        "own sentence",
        [(SENTENCE[i], i + 1) for i in range(T)],
    ),
    ("context-ready, each pass", "corrected tokens", [(STARTS[i], i + 1) for i in range(T)], None, None),
]


def grid(x, y, spans, keys, colour):
    for i, (lo, hi) in enumerate(spans):
        for j in range(keys):
            fill = colour if lo <= j < hi else "#e9ebee"
            yield f'<rect x="{x + j * CELL}" y="{y + i * CELL}" width="{CELL - 1}" height="{CELL - 1}" fill="{fill}"/>'


def text(x, y, words, size=11, weight="normal"):
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{words}</text>'


def panel(x, y, title, first, spans, second, spans2):
    yield text(x, y - 22, title, 13, "600")
    keys = max(1, max(hi for _, hi in spans)) if first == "thoughts" else len(spans)
    yield text(x, y - 6, first)
    yield from grid(x, y, spans, keys, BLUE)
    if spans2:
        x2 = x + max(keys * CELL, 6.2 * len(first)) + 12
        yield text(x2, y - 6, second)
        yield from grid(x2, y, spans2, T, ORANGE)


def main():
    wide, high = 2 * T * CELL + 2 * GAP, T * CELL + 2 * GAP
    parts = []
    for n, given in enumerate(PANELS):
        parts += panel(GAP / 2 + n % 3 * wide, GAP + n // 3 * high, *given)
    body = "\n".join(parts)
    size = f'width="{3 * wide}" height="{2 * high}" viewBox="0 0 {3 * wide} {2 * high}"'
    style = 'font-family="Helvetica, Arial, sans-serif" fill="#24292f"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><rect width="100%" height="100%" fill="white"/>'
    Path(__file__).with_name("masks.svg").write_text(f"{svg}\n{body}\n</svg>\n")


if __name__ == "__main__":
    main()
