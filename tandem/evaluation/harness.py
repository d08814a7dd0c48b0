"""Networks in EleutherAI's evaluation harness (lm-eval), which defines the tasks and their metrics.

    found = run_tasks(Harness(network, tokenizer, rows=16), read_tasks("hellaswag,lambada_openai"), limit=200)
    found[0].metrics["acc_norm"]                    # Metric(value=0.265, error=0.031)

What the harness asks, and where the answers come from:

    loglikelihood           continuations.py: sessions, as in generation
    loglikelihood_rolling   likelihood.py: the ruler, tokens 2 to last of each text, its end included
    generate_until          generation at temperature 0

A network that cannot do one of these raises an error of its own, which the command shows. No method scores the first
token of a text without context: with an empty prompt, the first token is the prompt.

Importing this module needs the extra `harness`.
"""

import contextlib
import itertools
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from tandem.corpus import Store, Tokenizer
from tandem.corpus.store import StoreWriter
from tandem.evaluation.continuations import answers, question
from tandem.evaluation.likelihood import likelihood
from tandem.evaluation.task_files import HUB, TaskFile
from tandem.generation.generate import generate
from tandem.generation.sampling import Sampler, row_generators
from tandem.networks.network import Network
from tandem.recipe import UserError, counted
from tandem.training.display import Told

MOST_TOKENS = 256
"""Tokens to generate where a task does not say; the harness's own number."""
RESAMPLES = 1000
"""For standard errors that have no formula, such as that of a perplexity."""
FEW_SHOT_SEED = 1234
"""The harness's own."""
LIKELIEST = Sampler(Sampler.Config.model_validate({"temperature": 0.0}))
REQUEST_ORDER = "prompts by the tokens of their longest continuation, then by their own"


class Harness(LM):
    """A network as the harness sees it, on the device of its weights.

    Args:
        rows: prompts read at a time, for speed and memory; scores move as with evaluation.rows.
        told: called with prompts or rows done and how many there are.
    Raises: UserError where the tokenizer has ids that the network does not know.
    """

    def __init__(self, network: Network, tokenizer: Tokenizer, *, rows: int, told: Told = lambda done, total: None):
        super().__init__()
        tokenizer.require_within(network.vocabulary)
        self.network, self.tokenizer, self.rows, self.told = network, tokenizer, rows, told

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of each request's continuation after its context."""
        pairs = [self._pair(*request.args) for request in requests]
        asked = [question(self.network, prompt, tokens) for prompt, tokens in pairs if tokens]
        found = iter(answers(self.network, asked, rows=self.rows, progress=self.told))
        return [next(found) if tokens else (0.0, True) for _, tokens in pairs]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both, with those that the network adds, cut where the context ends; its last white space belongs to
        the continuation, as the harness has it for every model. Without a context, the first token is the prompt."""
        read = self.network.prompt(self.tokenizer, context + continuation)
        text = [place for place, token in enumerate(read, 1) if token < self.network.vocabulary]
        given = len(self.tokenizer.encode(context.rstrip()))
        cut = text[max(1, given) - 1] if len(text) > given else len(read)
        if given and cut == len(read):
            raise UserError(
                f"nothing is left to ask after {context[-40:]!r}: this tokenizer joins it with {continuation[:40]!r} "
                "into fewer tokens; give the task a target_delimiter"
            )
        return read[:cut], read[cut:]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood of each request's text by the ruler, sentence ends included; that of an empty text is 0."""
        texts = [request.args[0] for request in requests]
        log_likelihoods = np.zeros(len(texts))
        with TemporaryDirectory() as folder:
            writer = StoreWriter(Path(folder) / "texts", self.tokenizer)
            writer.append(*self.tokenizer.encode_batch(texts))
            writer.close([])
            segmentation = self.network.segmentation
            store = Store(Path(folder) / "texts", segmentation and segmentation.of_plain_text)
            found = likelihood(self.network, store, context=self.network.context, rows=self.rows, progress=self.told)
        log_likelihoods[found.order] = -found.nats_by_document - found.end_nats_by_document
        return log_likelihoods.tolist()

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The greedy continuation of each request's context, up to a stop string of its task, which is left out."""
        texts = ["" for _ in requests]
        by_length: dict[int, list[int]] = {}
        options = [_options(request.args[1]) for request in requests]
        for i, (most, _) in enumerate(options):
            by_length.setdefault(most, []).append(i)
        for most, members in by_length.items():
            prompts = {i: self._prompt(requests[i].args[0], most) for i in members}
            order = sorted(members, key=lambda i: (len(prompts[i]), prompts[i]))
            for begin in range(0, len(order), self.rows):
                rows = order[begin : begin + self.rows]
                written = self._write([prompts[i] for i in rows], [options[i][1] for i in rows], most)
                for i, text in zip(rows, written, strict=True):
                    texts[i] = text
                self.told(begin + len(rows), len(order))
        return texts

    def _prompt(self, context: str, most: int) -> list[int]:
        """The newest tokens of a context that leave room for `most` more."""
        room = self.network.context - most
        if room < 1:
            raise UserError(
                f"a task asks for {most} tokens, but this network was trained with {self.network.context} in all; set "
                "generation_kwargs: {max_gen_toks: ...} in the task file"
            )
        return self.network.prompt(self.tokenizer, context)[-room:] or [self.tokenizer.eos]

    def _write(self, prompts: list[list[int]], stops: list[list[str]], most: int) -> list[str]:
        """The greedy continuation of each prompt, up to the document end or one of its stop strings."""
        tokens: list[list[int]] = [[] for _ in prompts]
        texts, going = ["" for _ in prompts], set(range(len(prompts)))
        generators = row_generators(0, len(prompts))  # unused at temperature 0
        written = generate(
            self.network, prompts, generators, sampler=LIKELIEST, max_tokens=most, stop=self.tokenizer.eos
        )
        for row, token in written:
            if token == self.tokenizer.eos:
                going.discard(row)
            elif row in going:
                tokens[row].append(token)
                texts[row] = self.tokenizer.decode(tokens[row])
                if any(stop in texts[row] for stop in stops[row]):
                    going.discard(row)
            if not going:
                break
        return [
            text[: min((text.index(stop) for stop in of_row if stop in text), default=len(text))]
            for text, of_row in zip(texts, stops, strict=True)
        ]


def _options(given: dict[str, Any]) -> tuple[int, list[str]]:
    """(tokens to generate, stop strings), read as for every model of the harness.

    Raises: UserError where a task draws at random.
    """
    options: dict[str, Any] = {**normalize_gen_kwargs(given, MOST_TOKENS)}
    if options["do_sample"]:
        raise UserError(
            "a task draws its texts at random (generation_kwargs: do_sample, temperature): only the likeliest text is "
            "the same for everyone; set do_sample: false in the task file"
        )
    return options["max_gen_toks"], [stop for stop in options["until"] if stop]


# ---- tasks -----------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    value: float
    error: float | None
    """Standard error over items; None where the harness knows none."""


@dataclass(frozen=True)
class TaskResult:
    """A network's results in a task.

    items: one for each item, in the order of the file: the answers, each (log-likelihood, is greedy) or a text, and
        the metrics of the item.
    settings: of the task, as the harness read them.
    """

    name: str
    version: Any
    metrics: dict[str, Metric]
    count: int
    items: list[dict[str, Any]]
    settings: dict[str, Any]


def run_tasks(adapter: Harness, files: Sequence[TaskFile], limit: int | None = None) -> list[TaskResult]:
    """Runs tasks on the first `limit` items of each, or on all.

    Raises: UserError naming the task that cannot be read, or that the network cannot do, and why.
    """
    results = []
    for file in files:
        try:
            loaded = _loaded(file)
            if file.config:  # a task of your own
                _require_answers(loaded, limit)
            results += _run(adapter, loaded, limit)
        except UserError as error:
            raise UserError(f"{file.where}: {error}") from error
    return results


def _loaded(file: TaskFile) -> Any:
    """The task, its data read; a task of the hub may be several."""
    is_of_hub = file.name.startswith(HUB)
    with _harness_may("run it"):
        manager = TaskManager(include_defaults=is_of_hub)
        loaded = manager.load([file.name.removeprefix(HUB) if is_of_hub else dict(file.config)])
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEW_SHOT_SEED)
    return loaded


def _require_answers(loaded: Any, limit: int | None) -> None:
    """Raises: UserError where the right answer of an item is none of its choices: the harness counts it as missed."""
    for task in loaded["tasks"].values():
        if task.OUTPUT_TYPE != "multiple_choice":
            continue
        with _harness_may("ask or score its items"):
            items = [*itertools.islice(task.eval_docs, limit)]
            counts = [*map(len, choices := [*map(task.doc_to_choice, items)])]
            right = [*map(task.doc_to_text if task.multiple_input else task.doc_to_target, items)]
        for number, (texts, count, found) in enumerate(zip(choices, counts, right, strict=True)):
            for answer in found if isinstance(found, list) else [found]:
                if answer not in (texts if isinstance(answer, str) else range(count)):
                    raise UserError(
                        f"item {number}: its right answer is {answer!r}, none of its {counted(count, 'choices')}; "
                        "write the text of one, or its number from 0 on"
                    )


@contextlib.contextmanager
def _harness_may(work: str) -> Iterator[None]:
    """Tells of what the harness, its templates and its readers of data raise, which is of no one class. An error of the
    adapter, which they call, stays what it is.

    Raises: UserError.
    """
    try:
        yield
    except Exception as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any(name.startswith("tandem.") for name in modules[2:]):  # those before are this function and its caller
            raise
        if isinstance(error, StopIteration):
            raise UserError("its data has no items") from error
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(f"the harness cannot {work}: {type(error).__name__}: {reason}") from error


def _run(adapter: Harness, loaded: Any, limit: int | None) -> list[TaskResult]:
    # Else it would resample in one process per core, each a fork of a process with threads; it tells of that on stdout.
    alone, said = patch.dict(os.environ, DISABLE_MULTIPROC="1"), contextlib.redirect_stdout(sys.stderr)
    with alone, said, _harness_may("ask or score its items"):
        found: Any = evaluate(lm=adapter, task_dict=loaded, limit=limit, bootstrap_iters=RESAMPLES)
    return [
        TaskResult(
            name=name,
            version=found["versions"].get(name),
            metrics=_metrics(values),
            count=values["sample_len"],
            items=_items(found["samples"].get(name, [])),
            settings=json.loads(json.dumps(found["configs"].get(name, {}), default=str)),
        )
        for name, values in found["results"].items()
        if "sample_len" in values  # a group may have no numbers of its own
    ]


def _metrics(values: dict[str, Any]) -> dict[str, Metric]:
    """From the harness's "acc,none" and "acc_stderr,none"."""
    found = {}
    for key, value in values.items():
        name, comma, choice = key.partition(",")
        if comma and not name.endswith("_stderr"):
            error = values.get(f"{name}_stderr,{choice}")
            is_known = isinstance(error, int | float) and not math.isnan(error)
            found[_called(name, choice)] = Metric(value, error if is_known else None)
    return found


def _called(metric: str, choice: str) -> str:
    """A metric's name, with that of the filter that picks what it judges, where the task names one."""
    return metric if choice == "none" else f"{metric} ({choice})"


def _items(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each item, of which the harness has a sample for each filter."""
    items: dict[int, dict[str, Any]] = {}
    for sample in samples:
        answers = [answer for answer, *_ in sample["resps"]]  # a repeated request has the same answer again
        item = items.setdefault(sample["doc_id"], {"item": sample["doc_id"], "answers": answers})
        item |= {_called(name, sample["filter"]): sample[name] for name in sample["metrics"]}
    plain = json.dumps([*items.values()], default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    return json.loads(plain)
