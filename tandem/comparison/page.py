"""Pieces of a page: one HTML file whose charts are inline, which loads nothing and follows the reader's light or dark
theme."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from tandem.comparison.study import Study
from tandem.comparison.table import NONE

TEMPLATE = Path(__file__).with_name("page.html")


def rendered(
    study: Study,
    told: Mapping[str, str],
    facts: Iterable[tuple[str, str]],
    warnings: str,
    sections: Mapping[str, str],
    won: bool = False,
) -> str:
    """A page: `told` has headline, reason and test; sections without content are left out."""
    return Template(TEMPLATE.read_text("utf-8")).substitute(
        {key: escape(text) for key, text in {"title": study.title, "question": study.question, **told}.items()},
        kind="won" if won else "open",
        facts="".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts),
        warnings=warnings,
        sections="".join(
            f'<section><h2 id="{title.split()[0].lower()}-{place}">{escape(title)}</h2>{html}</section>'
            for place, (title, html) in enumerate(sections.items())
            if html
        ),
    )


def warned(notes: Iterable[str]) -> str:
    """What stands above the tables of a page in a colour of its own."""
    return "".join(f'<p class="warning">{escape(note)}</p>' for note in notes)


def side_by_side(drawn: Mapping[str, str], arms: Iterable[str], place: Callable[[str], int]) -> str:
    """Charts by title, under a legend of the arms with the colour of each one's `place`; empty charts are left out."""
    shown = "".join(f'<div class="chart"><p>{escape(head)}</p>{chart}</div>' for head, chart in drawn.items() if chart)
    keys = "".join(f'<span><span class="key arm-{place(arm)}"></span>{escape(arm)}</span>' for arm in arms)
    return f'<p class="legend">{keys}</p><div class="grid-of-charts">{shown}</div>' if shown else ""


def html_table(rows: Sequence[Sequence[str]], place: Callable[[str], int], winner: str | None = None) -> str:
    """The first row is the header; each cell of the first column has the colour of its `place`."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = ""
    for arm, *cells in rows[1:]:
        kind = ' class="winner"' if arm == winner else ""
        name = f'<th scope="row"><span class="key arm-{place(arm)}"></span>{escape(arm)}</th>'
        body += f"<tr{kind}>{name}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def listed(rows: Iterable[tuple[str, ...]], head: str = "") -> str:
    """A table with a name in its first column and what it stands for in the others; empty without rows."""
    cells = ((f"<th>{escape(name)}</th>", *(f"<td>{escape(value)}</td>" for value in values)) for name, *values in rows)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="scroll"><table class="list">{head}<tbody>{body}</tbody></table></div>' if body else ""


def footnote(text: str) -> str:
    """What stands below a table or chart."""
    return f'<p class="note">{escape(text)}</p>'


def worded(value: Any) -> str:
    """A setting of a recipe as a table shows it."""
    if isinstance(value, list | tuple):
        return ", ".join(map(worded, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {worded(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else portable(str(value))


def portable(text: str) -> str:
    """Hides the folders of this machine: of `${DATA}/corpus/*.txt` corpus/*.txt is left, of what looks like an absolute
    or home path its last part."""
    text = re.sub(r"^\$\{\w+\}/?", "", text)
    return text.replace("\\", "/").rstrip("/").rpartition("/")[2] if text[:1] in "/~" or text[1:3] == ":\\" else text
