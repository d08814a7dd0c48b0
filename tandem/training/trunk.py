"""Runs that begin with the steps of another, where both are the same.

With a warm-up in steps and a constant rate until the decay (schedule wsd), a run of 900 steps takes the first steps of
one of 2,000 exactly as that one does, and differs only from its own decay on:

    trunk     ／￣￣￣￣￣￣￣￣￣￣￣＼     2,000 steps, with checkpoint.branches=[900 steps]
    branch    ／￣￣￣￣＼                   900 steps, of which 89 are trained: start.trunk=runs/trunk

A step is a function of the weights and of (seed, step), so a branch ends with the weights, bit for bit, that it would
have had alone, provided that both are trained on one kind of device, by as many processes, and both are compiled or
neither is. So do runs that decay for longer or shorter, or leave their bags earlier or later; and a longer run begins
where a shorter one began to decay. How many steps two runs have in common is found by comparing their phases and rates
(`Run.shared`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tandem.disk import replace_file
from tandem.recipe import UserError, load, parse_budget
from tandem.training.checkpoint import standing, step_of
from tandem.training.display import say
from tandem.training.folder import MAY_DIFFER, RunFolder, read_part
from tandem.training.parallel import Ranks
from tandem.training.run import Run
from tandem.training.sinks import Record, as_line

OTHERWISE = ("budget", "schedule", "objective.until")
"""Keys in which two runs may differ and still have steps in common, which their phases and rates then tell."""


def steps_in_common(run: Run) -> int:
    """The first steps of a run that its trunk has taken; 0 without one.

    Raises: UserError where the trunk is no run of the same text and, but for `OTHERWISE`, of the same recipe.
    """
    path = run.recipe.start.trunk
    if path is None:
        return 0
    try:
        trunk = RunFolder.open(path)
        trunk.require_text(run.corpus.fingerprints)
    except UserError as error:
        raise UserError(f"start.trunk = {error}") from error
    may = {*MAY_DIFFER, *OTHERWISE} - {"batch.micro_batches"}  # for these draw the masks, and balance the experts
    if lines := trunk.differences(run.recipe.to_yaml(), (*may,)):
        told = f"start.trunk = {path}: only {', '.join(OTHERWISE)} may be others there. It differs in"
        raise UserError("\n".join([told, *lines]))
    return min(run.shared(load(str(trunk.recipe)), trunk.steps or 0), run.steps - 1)


def branches(run: Run) -> dict[str, int]:
    """By budget in checkpoint.branches, the step after which a run of that budget parts from this one; those that have
    nothing in common, or not one step, are left out."""
    lengths = dict.fromkeys(run.recipe.checkpoint.branches, 0)
    for text in lengths:
        with contextlib.suppress(UserError):  # for not one step: of no concern to this run, and told to that one
            lengths[text] = run.paid(parse_budget(text)) or 0
    parting = {text: min(run.shared(run.recipe, steps), steps - 1) for text, steps in lengths.items()}
    return {text: step for text, step in parting.items() if step > 0}


@contextlib.contextmanager
def tells_if_dropped(last: Path, ranks: Ranks) -> Iterator[None]:
    """Raises: UserError where the checkpoint `last` is dropped while it is read: the run that it is of trains on."""
    try:
        yield
    except (UserError, OSError):
        with ranks.together():
            if ranks.first(last.exists):
                raise
            why = "dropped while it was read, for its run trains on"
            cure = "start the same command again, or once that run is finished; checkpoint.branches there keeps one"
            raise UserError(f"start.trunk: {last}: {why}; {cure}") from None


def branched(run: Run, folder: RunFolder) -> Path | None:
    """The checkpoint of its trunk with which a new run begins, whose record up to there becomes the run's; None where
    it has no trunk, or there is no such checkpoint, and then it says so.
    """
    path, ranks = run.recipe.start.trunk, run.ranks
    if path is None:
        return None
    with ranks.together():
        common, trunk = steps_in_common(run), RunFolder.open(path)
    taken = lambda: next((c for c in reversed(standing(trunk.checkpoints)) if 0 < step_of(c) <= common), None)
    if (last := ranks.first(taken)) is None:
        why = f"{common:,} steps in common, and no checkpoint of them (checkpoint.branches of a trunk keeps one)"
        if trunk.steps is None:
            why = "not trained yet"
        elif not common:
            needed = "the same schedule.warmup, in steps, and no sentence streams, which go by the length of a run"
            why = f"no steps in common (runs that have some have {needed})"
        say(f"{path}: {why}; all are trained", "trunk")
        return None

    def taken_over() -> bytes:
        """The trunk's record, whose later steps are dropped as for any run that goes on, with this run's length, from
        which comes the number of its steps where it has no plan, and the step at which its own phases end."""

        def own(record: Record) -> Record:
            here = {"steps": run.steps, "note": run.view.at(record["step"] - 1).note}
            return {key: here.get(key, value) for key, value in record.items()}

        return b"".join(as_line(own(record)) for record in trunk.records())

    ranks.first(lambda: replace_file(folder.metrics, taken_over()))
    told, before = f"{path}, step {step_of(last)}", lambda: read_part(trunk.environment, list)
    ranks.first(lambda: folder.executes(trunk=told, trunk_step=step_of(last), trunk_environment=before()))
    say(f"{path}: of {common:,} steps in common {step_of(last):,} are taken over", "trunk")
    return last
