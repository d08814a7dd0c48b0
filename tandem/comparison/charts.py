"""Charts as SVG text: small, sharp, and in the colours of their page.

Written by hand: a report needs only three kinds, and they must follow the page's light or dark colours, which an image
file cannot. page.html styles the CSS classes; `arm-0`, `arm-1`, ... give the colours of the arms.
Coordinates are those of a picture `WIDTH` wide, rows of dots more; the page scales it to the room that it has.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from tandem.recipe import counted
from tandem.training.display import scaled

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 12, 40
LOOKS = 16
"""Of arms: eight colours, then these again, dashed and hollow."""
LETTER = 6.5
"""Width of a letter, on average."""


class Line(NamedTuple):
    """The curves of one arm: a line for its mean, thin lines for its runs."""

    name: str
    arm: int
    mean: list[tuple[float, float]]
    runs: list[list[tuple[float, float]]]
    label: str = ""
    """Written to the right of its mean's end."""


class Row(NamedTuple):
    """One arm's difference: a dot for each seed, its mean and interval."""

    name: str
    arm: int
    dots: list[tuple[int, float]]
    """(seed, difference)."""
    mean: float
    low: float
    high: float
    text: str


def look(arms: Iterable[str], label: str) -> int:
    """The number of the look of the arm that a label is, or with which it begins: that of `sps` for `sps, 1m`."""
    return [*arms].index(label.partition(",")[0]) % LOOKS


def line_chart(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Lines over x, whose axis is logarithmic where x spans more than a factor of 8."""
    points = [point for line in lines for run in [line.mean, *line.runs] for point in run if math.isfinite(point[1])]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    logarithmic = min(xs) > 0 and max(xs) > 8 * min(xs)
    low, high = _padded(min(ys), max(ys))
    x_ticks = log_ticks(min(xs), max(xs)) if logarithmic else ticks(0, max(xs), 4)
    change: Callable[[float], float] = math.log if logarithmic else float
    right = WIDTH - RIGHT - LETTER * max(len(line.label) for line in lines)
    x_of = _axis(change(min(xs) if logarithmic else 0), change(max(xs)), LEFT, right)
    y_of = _axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_grid_y(tick, y_of(tick)) for tick in ticks(low, high, 5)]
    parts += [_tick_x(x_of(change(tick)), HEIGHT - BOTTOM, scaled(tick)) for tick in x_ticks]
    parts.append(_text((LEFT + right) / 2, HEIGHT - 4, x_label, "label"))
    for line in lines:
        place = [[(x_of(change(x)), y_of(y)) for x, y in run] for run in [line.mean, *line.runs]]
        parts += [_path(run, f"run arm-{line.arm}") for run in place[1:]]
        parts.append(_path(place[0], f"mean arm-{line.arm}", line.name))
        parts += [_dot(x, y, 2.4, f"arm-{line.arm}", f"{line.name}: {scaled(at[0])}, {at[1]:.4f}")
                  for (x, y), at in zip(place[0], line.mean, strict=True)]  # fmt: skip
        parts += [_text(x + 6, y + 4, line.label, "tick", "start") for x, y in place[0][-1:] if line.label]
    return _svg(HEIGHT, parts, f"{y_label} against {x_label}")


def dot_chart(rows: Sequence[Row], x_label: str) -> str:
    """A row of dots for each arm, on an axis that includes zero."""
    values = [0.0, *(x for row in rows for x in (row.mean, row.low, row.high, *(dot for _, dot in row.dots)))]
    low, high = _padded(*(f(x for x in values if math.isfinite(x)) for f in (min, max)))
    width, step = 600, 56
    foot = step * len(rows) + TOP
    height = foot + 50
    x_of = _axis(low, high, 24, width - 24)
    parts = [_tick_x(x_of(tick), foot, _short(tick)) for tick in ticks(low, high, 5)]
    parts += [f'<line class="zero" x1="{x_of(0):.1f}" x2="{x_of(0):.1f}" y1="{TOP}" y2="{foot}"/>']
    parts.append(_text(width / 2, height - 4, x_label, "label"))
    for place, row in enumerate(rows):
        y = TOP + step * place + 34
        name = f'<tspan class="name arm-{row.arm}">{escape(row.name)}</tspan>  {escape(row.text)}'
        parts.append(f'<text class="over" x="24" y="{y - 18}">{name}</text>')
        if math.isfinite(row.low):
            parts.append(_path([(x_of(row.low), y), (x_of(row.high), y)], f"interval arm-{row.arm}"))
        parts += [_dot(x_of(x), y, 5, f"seed arm-{row.arm}", f"seed {seed}: {x:+.4f}") for seed, x in row.dots]
        mean = x_of(row.mean)
        parts.append(_path([(mean, y - 11), (mean, y + 11)], f"mean arm-{row.arm}", f"mean {row.mean:+.4f}"))
    return _svg(height, parts, x_label, width)


def histogram(values: np.ndarray, arm: int, x_label: str, bins: int = 40) -> str:
    """A histogram centred on zero; values beyond the middle 98 % are counted in the outermost bars."""
    finite = values[np.isfinite(values)]
    reach = float(np.abs(np.quantile(finite, [0.01, 0.99])).max()) if len(finite) else 0.0
    if reach == 0:
        return ""
    counts, edges = np.histogram(finite.clip(-reach, reach), bins, (-reach, reach))
    height = 200
    x_of, y_of = _axis(-reach, reach, LEFT, WIDTH - RIGHT), _axis(0, float(counts.max()), height - BOTTOM, TOP)
    parts = [_grid_y(tick, y_of(tick)) for tick in ticks(0, float(counts.max()), 3) if tick and tick == round(tick)]
    parts += [_tick_x(x_of(tick), height - BOTTOM, _short(tick)) for tick in ticks(-reach, reach, 5)]
    for count, start, end in zip(counts, edges, edges[1:], strict=False):
        side = f"better arm-{arm}" if end <= reach / bins else "worse"
        x, y = x_of(start), y_of(count)
        parts.append(
            f'<rect class="{side}" x="{x + 0.5:.1f}" y="{y:.1f}" width="{x_of(end) - x - 1:.1f}" '
            f'height="{height - BOTTOM - y:.1f}"><title>{counted(int(count), "documents")}</title></rect>'
        )
    parts.append(f'<line class="zero" x1="{x_of(0):.1f}" x2="{x_of(0):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 4, x_label, "label"))
    return _svg(height, parts, f"documents against {x_label}")


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`; `about` is their approximate number."""
    step = (high - low) / about
    size = 10 ** math.floor(math.log10(step))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= step * 0.99)
    return [step * place for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times each power of ten in the range; only the powers themselves where that gives more than six."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    found = [tick for tick in found if low <= tick <= high]
    return found if len(found) <= 6 else [tick for tick in found if math.log10(tick) % 1 < 1e-9]


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.04 * (high - low) or 0.01 * abs(high) or 1.0
    return low - margin, high + margin


def _axis(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _short(tick: float) -> str:
    return f"{tick:g}".replace("-", "\N{MINUS SIGN}") if abs(tick) > 1e-12 else "0"


def _grid_y(tick: float, y: float) -> str:
    kind = "grid" if _short(tick) != "0" else "zero"
    text = _text(LEFT - 8, y + 4, _short(tick), "tick", "end")
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>{text}'


def _tick_x(x: float, y: float, text: str) -> str:
    return f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 4:.1f}"/>{_text(x, y + 18, text)}'


def _text(x: float, y: float, text: str, kind: str = "tick", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(x: float, y: float, radius: float, kind: str, title: str) -> str:
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(title)}</title></circle>'


def _path(points: Sequence[tuple[float, float]], kind: str, title: str = "") -> str:
    steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points if math.isfinite(x) and math.isfinite(y))
    return f'<path class="{kind}" d="M{steps}"><title>{escape(title)}</title></path>' if steps else ""


def _svg(height: float, parts: Sequence[str], title: str, width: float = WIDTH) -> str:
    inner = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{inner}</svg>'
