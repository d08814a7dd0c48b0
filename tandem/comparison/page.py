"""Pieces of a page: one HTML file whose charts are inline, which loads nothing and follows the reader's light or dark
theme."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from tandem.comparison.charts import look
from tandem.comparison.study import Study
from tandem.comparison.table import NONE

TEMPLATE = Path(__file__).with_name("page.html")


def rendered(
    study: Study,
    told: Mapping[str, str],
    facts: Iterable[tuple[str, str]],
    warnings: Iterable[str],
    sections: Mapping[str, str],
    won: bool = False,
) -> str:
    """A page: `told` has headline, reason and test; sections without content are left out."""
    return Template(TEMPLATE.read_text("utf-8")).substitute(
        {key: escape(text) for key, text in {"title": study.title, "question": study.question, **told}.items()},
        kind="won" if won else "open",
        facts="".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts),
        warnings="".join(f'<p class="warning">{escape(warning)}</p>' for warning in warnings),
        sections="".join(
            f'<section><h2 id="{title.split()[0].lower()}-{place}">{escape(title)}</h2>{html}</section>'
            for place, (title, html) in enumerate(sections.items())
            if html
        ),
    )


def marked(arms: Iterable[str], label: str) -> str:
    """A label after a mark in the colour of its arm."""
    return f'<span class="key arm-{look(arms, label)}"></span>{escape(label)}'


def side_by_side(drawn: Mapping[str, str], arms: Collection[str]) -> str:
    """Charts by title, under a legend of the arms; empty charts are left out."""
    shown = "".join(f'<div class="chart"><p>{escape(head)}</p>{chart}</div>' for head, chart in drawn.items() if chart)
    keys = "".join(f"<span>{marked(arms, arm)}</span>" for arm in arms)
    return f'<p class="legend">{keys}</p><div class="grid-of-charts">{shown}</div>' if shown else ""


def html_table(rows: Sequence[Sequence[str]], arms: Collection[str], winner: str | None = None) -> str:
    """The first row is the header, the first column names arms; the row of the winner stands out."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = ""
    for arm, *cells in rows[1:]:
        kind = ' class="winner"' if arm == winner else ""
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr{kind}><th scope="row">{marked(arms, arm)}</th>{row}</tr>'
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
