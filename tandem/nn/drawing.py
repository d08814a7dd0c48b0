"""Spans as a picture: which key may each query read?

The example is one packed row of twelve tokens that holds two documents, a of seven tokens and b of five. One line per
query, one column per key; `#` is read, `.` is not. Causal attention within documents:

        aaaaaaabbbbb
        012345601234
    a0  #...........
    a1  ##..........
    ...
    b0  .......#....
    b1  .......##...
"""

from collections.abc import Sequence

STARTS = (0,) * 7 + (7,) * 5
"""Where the document of each position of the example begins."""
LABELS = tuple(f"a{i}" for i in range(7)) + tuple(f"b{i}" for i in range(5))


def draw_span(lo: Sequence[int], hi: Sequence[int], keys: int) -> str:
    """Draw the half-open spans `lo[i] <= j < hi[i]` of `keys` keys, one line per query, key labels written downwards.

    Queries or keys get the example's labels if there are as many as it has positions, else their numbers.
    """
    lines, columns = _labels(len(lo)), _labels(keys)
    if not (lines and columns):
        return f"{len(lines)} queries, {keys} keys: the example is too short for more"
    margin = " " * (len(lines[0]) + 2)
    picture = [margin + "".join(label[row] for label in columns) for row in range(len(columns[0]))]
    for label, first, end in zip(lines, lo, hi, strict=True):
        picture.append(f"{label}  " + "".join("#" if first <= key < end else "." for key in range(keys)))
    return "\n".join(picture)


def _labels(number: int) -> Sequence[str]:
    return LABELS if number == len(LABELS) else [str(i).rjust(len(str(number - 1))) for i in range(number)]
