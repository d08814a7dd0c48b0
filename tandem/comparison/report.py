"""A stand-in: the table and the page of a study."""

from pathlib import Path

from tandem.comparison.results import Result
from tandem.comparison.study import Study


def table(study: Study, results: list[Result]) -> str:
    rows = [f"{'arm':<16} {'seed':>5} {'lr':>8}  nats/token"]
    for result in results:
        trial = "  (trial)" if result.trial else ""
        rows.append(f"{result.arm:<16} {result.seed:>5} {result.lr:>8g}  {result.nats_per_token!r}{trial}")
    return "\n".join(rows)


def write_report(study: Study, results: list[Result], folder: Path) -> Path:
    (folder / "table.txt").write_text(table(study, results) + "\n")
    page = folder / "report.html"
    page.write_text(f"<title>{study.title}</title><pre>{table(study, results)}</pre>\n")
    return page
