"""A grid of studies: the same arms at several sizes and budgets, to see how loss falls with both.

    title: How far do two streams go?                  # a study like any other,
    question: ...
    recipe: decoder/tiny
    arms:
      decoder: {}
      sps: {recipe: sps/tiny}
    baseline: decoder
    seeds: [1]
    grid:                                              # but without a budget
      sizes:                                           # for each size, any keys of the study, to override it
        w32: {overrides: {network.width: 32}}
        w64: {overrides: {network.width: 64}, seeds: [1, 2, 3]}
      budgets: [1e6 tokens, 2e6 tokens, 4e6 tokens]

Each cell is a separate study with its own folder, studies/<grid>/<size>-<budget>, and report. So finished runs are not
repeated, sizes and budgets can be added or removed at any time, and several machines can share the cells as they share
the runs of a study. All cells together give the scaling report (scaling_report.py).
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.comparison import runner
from tandem.comparison.folder import StudyFolder
from tandem.comparison.scaling_report import Cell, write_scaling
from tandem.comparison.study import Study, hollow, read_layers, require_one_text, study_of
from tandem.disk import locked
from tandem.nn.init import HIDDEN, roles
from tandem.recipe import Settings, parse_budget
from tandem.recipe.budget import BudgetText
from tandem.recipe.document import Node, Problems, read_overrides
from tandem.recipe.options import read_options
from tandem.training.display import say


class GridKeys(Settings):
    """The `grid` section of a study file."""

    sizes: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    """For each size, by name, the keys of the study that it overrides."""
    budgets: Annotated[list[BudgetText], Field(min_length=1)]
    """What each run of a cell may spend, such as [1e6 tokens, 2e6 tokens]."""
    trunk: bool = False
    """Train the longest runs of a size first, and begin its other runs with their checkpoints (training/trunk.py)."""
    rows: Literal["study", "rule"] = "study"
    """Rows of a step: as in the study, or by `rows_by_rule` for the baseline (budgets in tokens)."""


@dataclass(frozen=True)
class Grid:
    """Studies by cell folder; a plain study is a grid of one cell, in the grid's own folder."""

    name: str
    cells: dict[str, Study]
    sizes: dict[str, str]
    """The size of each cell; empty for a plain study."""
    trunks: dict[str, str] = field(default_factory=dict)
    """For a cell whose runs begin as those of another, that cell."""


def load_grid(reference: str, overrides: Iterable[str] = ()) -> Grid:
    """A grid, or a plain study, with the recipes of all its arms.

    Args:
        reference: a path, or a name such as shapes (studies/shapes among the recipes).
        overrides: KEY=VALUE; a key of the study, or `section.key` of a recipe, which then applies to every arm.
    Raises: UserError with one line for each problem.
    """
    problems = Problems()
    path, files, asked = read_layers(reference, overrides, problems)
    grids = [layer.value.pop("grid") for layer in (*files, asked) if "grid" in layer.value]
    if not grids:
        return Grid(path.stem, {"": study_of(path, files, [asked], problems)}, {})
    grid = functools.reduce(lambda base, top: top.over(base), grids)
    keys = read_options(GridKeys, "grid", "grid", hollow(grid, {"sizes": 1}), problems)
    problems.raise_any()
    assert isinstance(keys, GridKeys)
    on_tops: dict[str, Node] = grid.value["sizes"].value
    for layer in (*files, asked, *on_tops.values()):
        for key in {"budget", "together"} & layer.value.keys():
            problems.add(layer.value[key].origin, f"{key}: each cell has a budget of its own; write grid.budgets")
    for size, on_top in on_tops.items():
        if not re.fullmatch(r"[\w+-]+", size):
            problems.add(on_top.origin, f"grid.sizes.{size}: must be a name of letters, digits, _, + and -")
        for key in [key for key in ("baseline", "level") if key in on_top.value]:
            problems.add(on_top.value[key].origin, f"{key}: the same at every size; write it beside grid")
    if len(set(keys.budgets)) < len(keys.budgets):
        problems.add(grid.origin, f"grid.budgets = [{', '.join(keys.budgets)}]: one is written twice")
    units = {parse_budget(budget).unit for budget in keys.budgets}
    if keys.trunk and (len(units) > 1 or units == {"seconds"} or keys.rows == "rule"):
        reason = "runs of one size must differ in length alone; give budgets in one unit, not seconds, and no rows"
        problems.add(grid.origin, f"grid.trunk: {reason}")
    if keys.rows == "rule" and units != {"tokens"}:
        problems.add(grid.origin, "grid.rows = rule: it goes by tokens; give all of grid.budgets in tokens")
    problems.raise_any()
    cells, sizes, trunks = {}, {}, {}
    longest = max(keys.budgets, key=lambda budget: parse_budget(budget).amount)
    for size, on_top in on_tops.items():
        for budget in keys.budgets:
            given = [f"budget={budget}"]
            study = study_of(path, files, [on_top, read_overrides(given, problems), asked], problems)
            if keys.rows == "rule":
                given.append(f"overrides.batch.rows={_rows(study)}")
                study = study_of(path, files, [on_top, read_overrides(given, problems), asked], problems)
            name = f"{size}-{budget.replace(' ', '-')}"
            if keys.trunk and budget == longest:
                study = replace(study, branches=[other for other in keys.budgets if other != longest])
            elif keys.trunk:
                trunks[name] = f"{size}-{longest.replace(' ', '-')}"
            cells[name], sizes[name] = study, size
    if len({bool(study.rates) for study in cells.values()}) > 1:
        reason = "rates at some sizes alone: their trials keep half of the held-out text; give all sizes rates, or none"
        problems.add(grid.origin, f"grid.sizes: {reason}")
    problems.raise_any()
    require_one_text({sizes[name]: study for name, study in cells.items()})  # budgets do not change it
    return Grid(path.stem, cells, sizes, trunks)


def compare(grid: Grid, path: Path, processes: int = 1) -> None:
    """Runs what is missing (`runner.compare`), cell by cell, then writes and shows the scaling report.

    Raises: UserError; Failed after all else is done; Stopped.
    """
    failed = []
    for name, study in sorted(grid.cells.items(), key=lambda cell: cell[0] in grid.trunks):  # trunks first
        try:
            runner.compare(study, path / name, processes, _folder(grid, name, path).trunk)
        except runner.Failed as error:
            failed.append(f"{name}: {error}" if name else str(error))
    if grid.sizes:
        with locked(path / ".lock"):  # of several commands, the last one here knows most
            found = []
            for name, study in grid.cells.items():
                results = StudyFolder(study, path / name).results()
                found.append(Cell(grid.sizes[name], str(study.budget), results, study))
            page, text = write_scaling(found, path)
        say(text)
        say(page, "report")
    if failed:
        raise runner.Failed("\n".join(failed))


def status(grid: Grid, path: Path) -> str:
    """What is done and missing in every cell."""
    told = {name: _folder(grid, name, path).status() for name in grid.cells}
    return "\n\n".join(f"{name}\n{text}" if name else text for name, text in told.items())


def _folder(grid: Grid, name: str, path: Path) -> StudyFolder:
    trunk = grid.trunks.get(name)
    return StudyFolder(grid.cells[name], path / name, _folder(grid, trunk, path) if trunk else None)


def rows_by_rule(parameters: float, tokens: float, context: int = 2048) -> int:
    """Rows of a step for a network of N = 12 C^2 L parameters that reads D tokens in rows of `context`.

    96 (N / 5e6)^0.4, rounded up to a multiple of 32, within 32 .. 1024, and few enough for 500 steps. Source:
    Block-Based Double Decoders, the authors' code.
    """
    wanted = -(-(96 * (parameters / 5e6) ** 0.4) // 32) * 32
    most = tokens // (500 * context) // 32 * 32
    return int(max(32, min(wanted, 1024, most)))


def _rows(study: Study) -> int:
    """Rows by the rule, for the parameters in the hidden matrices of the baseline."""
    recipe = study.recipes[study.baseline]
    network = recipe.choice("network").outlined(recipe.network, vocabulary=1, context=recipe.batch.context)
    role = roles(network)
    parameters = sum(p.numel() for name, p in network.named_parameters() if role[name] in HIDDEN)
    return rows_by_rule(parameters, study.budget.amount, recipe.batch.context)
