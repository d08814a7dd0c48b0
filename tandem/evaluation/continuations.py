"""How likely a network finds given continuations, and whether it would have written them.

Everything goes through a session, so this works for every network that generates: the log-likelihood of a continuation
is the one that generation assigns to it, and it is greedy if generation at temperature 0 would have written it. A
prompt is read once for all its continuations:

    prompt     The cat sat           session.prefill       log p( on), log p( by)
    asked       on the mat           fork, step, step      log p( the), log p( mat)
                by the door          fork, step, step      log p( the), log p( door)

A continuation holds the sentence boundaries that a network reads in it: the nats of ends count, as in the ruler
(likelihood.py).

Finished rows keep running unseen, as in generation. Up to rounding, no result depends on how many prompts are read at a
time; equal questions are asked once, so that equal choices tie exactly. Log-probabilities are float32, with or without
autocast; their sums are float64.

A session only goes forward, so a batch takes as many steps as its longest continuation has tokens: batches are made of
continuations of similar length.
Shapes: B rows, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.networks.network import Ids, Network, Session, ids_of
from tandem.recipe import UserError
from tandem.training.display import Told


class Question(NamedTuple):
    """How likely are these tokens after those? Both have at least one."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


class Answer(NamedTuple):
    log_likelihood: float
    """Natural, of the continuation given the prompt. Sentence ends count; sentence begins are certain and do not."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest of all that generation may draw."""


def question(network: Network, prompt: Ids, continuation: Ids) -> Question:
    """A question whose tokens, all but the last, fit into the network's context: the prompt's oldest are left out.

    Raises: UserError if the network has too few positions for the continuation itself.
    """
    if network.longest is not None and len(continuation) > network.longest:
        raise UserError(
            f"a continuation of {len(continuation)} tokens is asked, but this network has learned positions for "
            f"{network.longest} in all: leave the task out"
        )
    room = max(1, network.context + 1 - len(continuation))
    return Question(tuple(ids_of(prompt[-room:])), tuple(ids_of(continuation)))


def answers(
    network: Network,
    questions: Sequence[Question],
    *,
    rows: int,
    progress: Told = lambda done, total: None,
) -> list[Answer]:
    """Answers in the order of the questions, computed on the device of the network.

    Args:
        rows: prompts read at a time.
        progress: called with prompts read so far and prompts in all.
    """
    by_prompt: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for prompt, continuation in dict.fromkeys(questions):
        by_prompt.setdefault(prompt, []).append(continuation)
    found: dict[Question, Answer] = {}
    done = 0
    for prompts in _batches(by_prompt, rows, network.longest):
        with torch.no_grad(), torch.autocast(network.head.device.type, enabled=False):
            found |= _read(network, prompts, [by_prompt[prompt] for prompt in prompts])
        done += len(prompts)
        progress(done, len(by_prompt))
    return [found[asked] for asked in questions]


def _batches(
    by_prompt: Mapping[tuple[int, ...], list[tuple[int, ...]]], rows: int, longest: int | None
) -> Iterator[list[tuple[int, ...]]]:
    """The prompts, at most `rows` at a time, by the length of their longest continuation, then by their own.

    If positions are limited, the longest prompt of a batch has room for its longest continuation: all rows go that far.
    """
    steps = {prompt: max(map(len, continuations)) for prompt, continuations in by_prompt.items()}
    batch: list[tuple[int, ...]] = []
    length = 0
    for prompt in sorted(by_prompt, key=lambda prompt: (steps[prompt], len(prompt), prompt)):
        length = max(length, len(prompt))
        is_too_long = longest is not None and length + steps[prompt] - 1 > longest
        if batch and (len(batch) == rows or is_too_long):
            yield batch
            batch, length = [], len(prompt)
        batch.append(prompt)
    if batch:
        yield batch


def _read(
    network: Network, prompts: list[tuple[int, ...]], continuations: list[list[tuple[int, ...]]]
) -> dict[Question, Answer]:
    """One session over some prompts, forked for the first continuation of each, the second of each, ..."""
    session, found = network.session(len(prompts)), {}
    after_prompt = session.prefill([list(prompt) for prompt in prompts])
    most = max(map(len, continuations))
    for place in range(most):
        asked = [of_row[place] if place < len(of_row) else () for of_row in continuations]
        branch = session.fork() if place < most - 1 else session
        for prompt, continuation, answer in zip(
            prompts, asked, _follow(network, branch, after_prompt, asked), strict=True
        ):
            if continuation:
                found[Question(prompt, continuation)] = answer
    return found


def _follow(
    network: Network, session: Session, logits_BV: Tensor, continuations: list[tuple[int, ...]]
) -> list[Answer]:
    """The answer of every row, from a session's logits now and after each further token; (): no question."""
    T = max(map(len, continuations))
    tokens_BT = torch.tensor([[*row, *[0] * (T - len(row))] for row in continuations], device=logits_BV.device)
    log_p, is_likeliest = [], []
    for t in range(T):
        if t:
            logits_BV = session.step(tokens_BT[:, t - 1])
        log_p.append(logits_BV.float().log_softmax(-1).gather(-1, tokens_BT[:, t : t + 1]))
        is_likeliest.append(logits_BV[:, : network.ids].argmax(-1, keepdim=True) == tokens_BT[:, t : t + 1])
    log_p_BT = torch.cat(log_p, 1).double().where(tokens_BT <= network.vocabulary, 0.0)  # no sentence begin counts
    found = zip(log_p_BT.cpu(), torch.cat(is_likeliest, 1).cpu(), continuations, strict=True)
    return [Answer(nats[: len(row)].sum().item(), bool(is_best[: len(row)].all())) for nats, is_best, row in found]
