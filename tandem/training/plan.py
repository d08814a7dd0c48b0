"""What a run will do and cost, shown before anything is spent; `plan` and `train` print this page."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from tandem.corpus import documents_to_read
from tandem.nn.init import roles
from tandem.recipe import counted
from tandem.training.display import clock, scaled, short
from tandem.training.folder import RunFolder
from tandem.training.parallel import STATES
from tandem.training.speed import COUNTED, Speed
from tandem.training.start import is_same_text

if TYPE_CHECKING:
    from tandem.training.run import Run


def page(run: "Run", speed: Speed | str) -> dict[str, str]:
    """The plan by line title; `speed`: or why it is not measured."""
    recipe, cost, batch = run.recipe, run.cost, run.recipe.batch
    written = {key: value.strip('"') for key, value, _ in recipe.table() if value != "null"}
    options = {key: value for key, value in written.items() if key.startswith("network.")}
    name = options.pop("network.name")
    network = ", ".join(f"{key.removeprefix('network.')} {value}" for key, value in options.items())
    by_role = sorted(cost.parameters.items(), key=lambda item: -item[1])
    flops, read = cost.training(batch.context, parts=run.view.at(0).parts), documents_to_read(run.corpus.train)
    by_part = " + ".join(f"{part} {scaled(n / batch.context)}" for part, n in flops.items())
    return {
        "network": f"{name}: {network}",
        "parameters": f"{scaled(cost.total_parameters)} = " + " + ".join(f"{r} {scaled(n)}" for r, n in by_role),
        "optimiser": f"{recipe.value('optimiser.name')}: {' + '.join(_groups(run))}{_peak(run)}",
        "text": f"{_sources(run, read)}, {run.rows.of_run(run.steps).words}{_leak(run)}{_ids(run)}",
        **_start(run),
        **chosen(run),
        "cost": f"{scaled(sum(flops.values()) / batch.context)}FLOP per position = {by_part}",
        "budget": f"{recipe.budget} = {_phases(run)}"
        f" = {scaled(run.tokens(run.steps))} tokens = {run.flops(run.steps):.2e} FLOP",
        **(_measured(run, speed) if isinstance(speed, Speed) else _not_measured(run, speed)),
    }


def _measured(run: "Run", speed: Speed) -> dict[str, str]:
    seconds = speed.seconds(run.flops(run.steps))
    return {
        "time": f"about {clock(speed.start_seconds + seconds)} with the start, then at "
        f"{scaled(run.tokens(run.steps) / seconds)} tokens/s, evaluation apart ({COUNTED} steps measured)",
        "memory": f"{speed.memory / 2**30:.2f} GiB at the peak of these steps",
        "attention": "; ".join(f"{name} ({reason})" for name, reason in speed.attention.items()),
    }


def _not_measured(run: "Run", why: str) -> dict[str, str]:
    states = STATES * run.cost.total_parameters / 2**30
    return {
        "time": f"not measured: {why}",
        "memory": f"not measured: weights, gradients and optimiser alone take up to {states:.2f} GiB",
    }


def chosen(run: "Run") -> dict[str, str]:
    """The lines of how this process executes steps, which the next one to go on with the run may do in another way."""
    return {
        "device": f"{run.device.value} ({run.device.reason}), {counted(torch.get_num_threads(), 'threads')}",
        "processes": f"{run.ranks.count}, {run.parallel.value} ({run.parallel.reason})",
        "precision": f"weights float32, compute {str(run.precision.value)[6:]} ({run.precision.reason})",
        "compile": f"{'blocks' if run.compiled.value else 'no'} ({run.compiled.reason})",
    }


def _start(run: "Run") -> dict[str, str]:
    """Whose weights the run starts from, if any, and whether these may have seen what is held out here."""
    if (path := run.recipe.start.run) is None:
        return {}
    is_same = not path.exists() or is_same_text(RunFolder.open(path), run.recipe, run.corpus)
    return {"start": f"weights of {path}" + ("" if is_same else ", of another text: it may hold what is held out")}


def _groups(run: "Run") -> list[str]:
    """For each optimiser group its contents, size, peak rate and decay; also the network's parts with `lr_scale`."""
    role, config = roles(run.network), run.recipe.optimiser
    names = {id(parameter): name for name, parameter in run.network.named_parameters()}
    found = []
    for group in run.optimiser.inner.param_groups:
        held = [names[id(parameter)] for parameter in group["params"]]
        what = [f"{n.partition('.')[0]} {role[n]}" if config.lr_scale else role[n] for n in held]
        count = scaled(sum(parameter.numel() for parameter in group["params"]))
        decay = f"decay {group['weight_decay']:g}" if group["weight_decay"] else "no decay"
        found.append(f"{', '.join(dict.fromkeys(what))} {count} at {short(config.lr * group['scale'])}, {decay}")
    return found


def _peak(run: "Run") -> str:
    """The highest rate of a run that is too short for its schedule; empty if the rate reaches its peak."""
    reached, apart = 0.0, -(-run.steps // 10**6)  # of more steps than a million, a million at equal distances
    for step in range(0, run.steps, apart):
        reached = max(reached, run.schedule(step))
        if reached > 0.99:  # most runs are there after their warm-up
            return ""
    return f"; the rate reaches {reached:.2g} of its peak: schedule.warmup or schedule.decay is long for this run"


def _sources(run: "Run", read: np.ndarray) -> str:
    """Where the text comes from, its size, and how often it is read, if repeated; for a mixture, of each source."""
    store, texts = run.corpus.train, run.recipe.corpus.texts

    def size(lengths: np.ndarray, share: float = 1.0) -> str:
        times = float(f"{share * run.tokens(run.steps) / lengths.sum():.3g}")
        told = f"{scaled(int(lengths.sum()))} tokens in {counted(len(lengths), 'documents')}"
        return told + (f", read {times:,.15g} times" if times > 1 else "")

    if not (shares := store.manifest.shares):
        return f"{texts if isinstance(texts, str) else ', '.join(texts)}: {size(store.lengths[read])}"
    of = store.source_of[read]
    parts = ((name, share, store.lengths[read[of == number]]) for number, (name, share) in enumerate(shares.items()))
    return " + ".join(f"{name} {share:.1%} ({size(lengths, share)})" for name, share, lengths in parts)


def _leak(run: "Run") -> str:
    """How many held-out documents stand in the training text, too; empty if none is known to."""
    held_out = run.corpus.validation.manifest
    where = "it" if run.corpus.train.most is None else "the whole of its texts"
    told = f"; {held_out.trained_on:,} of {counted(held_out.documents, 'documents')} held out stand in {where}, too"
    return told if held_out.trained_on else ""


def _ids(run: "Run") -> str:
    """The ids of a tokenizer that the text was too small to give as many as were asked for; else empty."""
    asked, made = run.recipe.corpus.vocabulary, run.corpus.train.vocabulary
    return f"; {made:,} ids of corpus.vocabulary={asked}, as it gives no more" if asked and made < asked else ""


def _phases(run: "Run") -> str:
    """Steps by phase with the mean of their tokens, and the positions that the network computes where their number is
    not that of the tokens, of which streams may lack a part of a step."""
    parts = []
    for phase, steps in run.view.before(run.steps):
        tokens = (run.tokens(phase.first + steps) - run.tokens(phase.first)) / steps
        note = phase.note or ("the optimiser keeps its state" if phase.first else "")
        parts.append(f"{counted(steps, 'steps')} of {tokens:,.0f} tokens" + (f" ({note})" if note else ""))
    latent, of_a_step = run.view.positions(run.steps), run.view.positions(1)
    is_text = abs(latent - run.tokens(run.steps)) < of_a_step
    return " + ".join(parts) + ("" if is_text else f" = {scaled(latent)} positions")
