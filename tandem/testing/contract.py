"""What every network must guarantee, as checks that anyone who adds one can run.

    from tandem.testing.cases import cases
    from tandem.testing.contract import CHECKS

    for case in cases():                     every registered network at each of its tiny settings
        for check in CHECKS.values():
            check(case)                      AssertionError with the reason, or nothing

A check relies only on what `Network` promises, never on which network it tests.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.corpus import Batch
from tandem.export.weights import load_network, save_network
from tandem.networks.network import Network
from tandem.testing import costs, learning
from tandem.testing.cases import CONTEXT, EOS, Case, asked, document, log_probabilities, refused, shared_tasks, texts
from tandem.testing.comparing import EXACT, FLOAT, backward, close, same_gradients
from tandem.testing.elsewhere import elsewhere, forked

# ---- what a score may depend on -------------------------------------------------------------------------------------


def check_causality(case: Case) -> None:
    """The gradient of a score is nonzero with respect to the past of its document, and exactly zero to all else."""
    network, batch = case.build(), case.pack(texts())
    x = network.embed(batch.tokens).detach().requires_grad_()
    nll = network.score(batch, x)
    for row, i in asked(batch):
        (grad,) = torch.autograd.grad(nll[row, i], x, retain_graph=True)
        read, start = grad.abs().amax(-1) > 0, int(batch.starts[row, i])
        assert read[row, i], f"token {i + 1} of row {row} is predicted without reading token {i}"
        if i > start:
            told = f"token {i + 1} of row {row} is predicted without reading token {i - 1}"
            assert read[row, i - 1], f"{told}; a tiny setting has to read it"
        read[row, start : i + 1] = False
        assert not read.any(), (
            f"token {i + 1} of row {row}, whose document starts at {start}, is predicted by reading (row, position) "
            f"{read.nonzero().tolist()}"
        )


def check_future(case: Case) -> None:
    """Changing the future, in tokens or in embeddings, changes no score, however large the change."""
    network, batch = case.build(), case.pack(texts())
    x = network.embed(batch.tokens).detach()
    nll = network.score(batch).detach()
    for cut in range(1, x.shape[1], 3):
        if cut % 2:
            changed = torch.cat((batch.tokens[:, :cut], batch.tokens.flip(0, 1)[:, cut:]), dim=1)
            scores = network.score(replace(batch, tokens=changed))
        else:
            scores = network.score(batch, torch.cat((x[:, :cut], 1e3 * torch.randn_like(x[:, cut:])), dim=1))
        close(scores[:, :cut], nll[:, :cut], EXACT, f"scores before what changes from {cut} on")


def check_documents(case: Case) -> None:
    """A document scores the same wherever it lies in a row, and whatever lies beside it."""
    network, batch = case.build(), case.pack(texts())
    nll = network.score(batch)
    for row, documents in enumerate(texts()):
        at = 0
        for text in documents:
            alone = network.score(case.pack([[text]]))[0]
            close(nll[row, at : at + len(text)], alone, EXACT, f"document at {at} of row {row}, packed against alone")
            at += len(text)


def check_restricted(case: Case) -> None:
    """Restricted to no earlier token, a network of one stream predicts from the last token alone."""
    network: Any = case.build()
    if not getattr(network, "restricted", None) or len(network.streams) > 1:
        return
    batch = case.pack(texts())
    x = network.embed(batch.tokens).detach().requires_grad_()
    nll = network.restricted(0).score(batch, x)
    for row, i in asked(batch):
        (grad,) = torch.autograd.grad(nll[row, i], x, retain_graph=True)
        grad[row, i] = 0
        read = grad.abs().amax(-1).nonzero().tolist()
        assert not read, f"token {i + 1} of row {row} is predicted by reading (row, position) {read}: see `restricted`"


def check_rows(case: Case) -> None:
    """A row scores the same alone, in any place of a batch, and padded to any length."""
    network = case.build()
    rows = [texts()[0], texts()[1], [document(5, 7)], [document(CONTEXT - 1, 8)]]
    nll = network.score(case.pack(rows))
    close(network.score(case.pack(rows[::-1])), nll.flip(0), EXACT, "rows in reverse")
    for row, documents in enumerate(rows):
        alone = network.score(case.pack([documents]))[0]
        close(nll[row, : len(alone)], alone, EXACT, f"row {row}, padded in a batch against alone")
        assert not nll[row, len(alone) :].any(), "padding has a score"


def check_reading(case: Case) -> None:
    """Scores follow from the output of `read`: with the head, it gives the logits of every position."""
    network, text = case.build(), document(16, 1)
    if network.suffixes_only:
        return
    tokens = torch.tensor([text])
    logits = network.read(Batch(tokens, tokens, torch.zeros_like(tokens)))[0] @ network.head.T
    close(logits.log_softmax(-1), log_probabilities(network, text), EXACT, "logits against scores")


def check_probabilities(case: Case) -> None:
    """The probabilities of all ids, and of boundaries where a network predicts them, sum to one."""
    network, text = case.build(), document(16, 1)
    begin = 6 if network.suffixes_only else 0
    total = log_probabilities(network, text, prompt=begin + 1 if begin else None)[begin:, : network.ids].exp().sum(-1)
    close(total, torch.ones_like(total), EXACT, "sum of the probabilities of all ids")
    logits = network.session(1).prefill([text])
    assert logits.shape == (1, len(network.head)), f"a session's logits have shape {tuple(logits.shape)}"
    assert logits.dtype == torch.float32, f"a session's logits are {logits.dtype}"


def check_device(case: Case) -> None:
    """On another device than the host's everything runs, and gives the same."""
    forked(_on_another_device, case)


def _on_another_device(case: Case) -> None:
    rows = [[document(6, 1), document(4, 2)], [document(10, 3)]]
    here, batch, what = case.build(), case.pack(rows), "on another device"
    with elsewhere() as device:
        there = case.build().to(device)
        scores = there.score(batch.to(device))
        assert scores.device == device, f"scores {what} are on {scores.device}"
        close(scores.cpu(), here.score(batch), EXACT, f"scores {what}")
        sessions = there.session(2), here.session(2)
        logits = [session.prefill([[1, 2, 3, 4], [5, 6]]) for session in sessions]
        for tokens in torch.tensor([[5, 7], [EOS, 3], [4, EOS], [2, 9]]):
            assert logits[0].device == device, f"logits {what} are on {logits[0].device}"
            close(logits[0].cpu(), logits[1], FLOAT, f"logits {what}")
            sessions = tuple(session.fork(torch.tensor([1, 0])) for session in sessions)
            logits = [session.step(tokens.to(x.device)) for session, x in zip(sessions, logits, strict=True)]
        for task in shared_tasks(case, settings=1):
            batches = task.batches(rows)
            loss = backward(there, task.objective, [batch.to(device) for batch in batches])
            close(loss.cpu(), backward(here, task.objective, batches), EXACT, f"{task}: loss {what}")
            same_gradients(there, here, f"{task} {what}")


# ---- sessions -------------------------------------------------------------------------------------------------------


def check_decoding(case: Case) -> None:
    """Prefill and steps, in any pieces, give the logits of one pass over the whole text."""
    network, text, full = case.build(), document(19, 2), {}
    for first, piece in ((1, 1), (1, 5), (9, 1), (9, 5), (14, 5), (19, 1)):
        if first not in full:
            full[first] = log_probabilities(network, text, prompt=first)
        session, read = network.session(1), first
        logits = session.prefill([text[:first]])
        while True:
            what = f"prefill of {first} and steps of {piece}: what follows token {read}"
            close(logits.log_softmax(-1)[0].double(), full[first][read - 1], FLOAT, what)
            if read == len(text):
                break
            tokens = text[read : read + piece]
            logits = session.step(torch.tensor([tokens]) if piece > 1 else torch.tensor(tokens))
            read += len(tokens)


def check_unequal_prompts(case: Case) -> None:
    """Texts of any lengths in one session give what each gives alone."""
    network, prompts = case.build(), [document(n, n)[:-1] for n in (2, 12, 8, 14)]
    session = network.session(4)
    logits = session.prefill(prompts)
    alone = torch.cat([network.session(1).prefill([prompt]) for prompt in prompts])
    close(logits, alone, FLOAT, "prompts of unequal lengths")
    _go_on(network, [session], prompts, 5, "prompts of unequal lengths")


def check_fork(case: Case) -> None:
    """Continuations of a fork do not affect each other."""
    network, prompts = case.build(), [document(n, n)[:-1] for n in (11, 6)]
    session = network.session(2)
    session.prefill(prompts)
    _go_on(network, [session, session.fork(), session.fork()], prompts, 8, "forks")


def check_fork_of_rows(case: Case) -> None:
    """A fork of some rows, in another order or several times, continues their texts."""
    network, prompts, rows = case.build(), [document(n, n)[:-1] for n in (11, 6, 9)], [2, 0, 0, 1]
    session = network.session(3)
    session.prefill(prompts)
    _go_on(network, [session.fork(torch.tensor(rows))], [prompts[row] for row in rows], 8, f"a fork of rows {rows}")


def check_join(case: Case) -> None:
    """A session that can take over the rows of others, padded ones, too, continues their texts."""
    network, prompts = case.build(), [document(n, seed)[:-1] for seed, n in enumerate((9, 9, 4))]
    session: Any = network.session(3)
    if not hasattr(session, "join"):
        return
    others = network.session(1), network.session(2)
    others[0].prefill(prompts[:1])
    others[1].prefill(prompts[1:])
    session.join(others)
    _go_on(network, [session], prompts, 4, "a session joined of two")


def check_fixed(case: Case) -> None:
    """A session that can be fixed in memory, for CUDA graphs, says then what it says otherwise."""
    sessions: list[Any] = [case.build().float().session(2) for _ in range(2)]
    plain, fixed = sessions
    if not (hasattr(fixed, "fix") and find_spec("triton") and os.environ.get("TRITON_INTERPRET")):
        return  # it reads through a kernel of Triton
    tokens, _ = (session.prefill([[5, 2, 9, 7], [3, 1]]).argmax(-1) for session in sessions)
    if refused(lambda: fixed.fix(16)):
        return
    for step in range(2):
        fixed.ready()
        close(fixed.step(tokens), expected := plain.step(tokens), FLOAT, f"fixed in memory, step {step}")
        tokens = expected.argmax(-1)
    refused(fixed.fork)  # with its reason, if at all


def _go_on(network: Network, sessions: list[Any], prompts: list[list[int]], steps: int, what: str) -> None:
    """Sessions that have read `prompts` read texts of their own, in turns, and say what one pass over a text does."""
    more = [[document(steps, 10 * n + row) for row in range(len(prompts))] for n in range(len(sessions))]
    full = [[log_probabilities(network, p + m, prompt=len(p)) for p, m in zip(prompts, texts, strict=True)]
            for texts in more]  # fmt: skip
    for step in range(steps):
        for n, session in enumerate(sessions):
            logits = session.step(torch.tensor([text[step] for text in more[n]])).log_softmax(-1).double()
            expected = torch.stack([full[n][row][len(prompt) + step] for row, prompt in enumerate(prompts)])
            close(logits, expected, FLOAT, f"{what}: session {n}, {step + 1} tokens later")


def check_prompts(case: Case) -> None:
    """Prompts are any sequences of whole numbers, and begin a session: it takes no others, before or after a step."""
    network, prompts = case.build(), [document(9, 1)[:-1], [5, 9]]
    expected = network.session(2).prefill(prompts)
    for kind in (tuple, torch.tensor, lambda prompt: np.array(prompt, np.uint32)):
        session = network.session(2)
        close(session.prefill([kind(prompt) for prompt in prompts]), expected, 0.0, f"prompts as {kind}")
        other = session.fork()
        other.step(torch.tensor([3, 4]))
        for begun in (session, other):
            assert "a new session begins again" in refused(lambda s=begun: s.prefill(prompts)), "read on"


def check_steps(case: Case) -> None:
    """Tokens are (B,) or (B, n); those of any other shape are refused, and nothing has then been read."""
    network = case.build()
    plain, asked = (network.session(2) for _ in range(2))
    for session in (plain, asked):
        session.prefill([[1, 2, 3, 4], [5, 6]])
    for shape in ((3, 2), (4,), (1, 2), (2, 0), (2, 1, 1), ()):
        told = refused(lambda s=shape: asked.step(torch.ones(s, dtype=torch.long)))
        assert f"not {shape}" in told, f"a step of two rows does not refuse tokens of shape {shape}: see `columns_of`"
    for tokens in ([7, 8], [[9, 1, 2], [3, 4, 5]]):
        close(asked.step(torch.tensor(tokens)), plain.step(torch.tensor(tokens)), 0.0, "after refusals")


def check_half_precision(case: Case) -> None:
    """In half precision a network says nearly what it says in float32: 0.05 nats beside 0.02 or less by rounding."""
    single, brain, half = (case.build().to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    batch, prompts = case.pack(texts()), [document(19, 1)[:-1], [5, 9]]
    off = (brain.score(batch) - single.score(batch)).detach().abs().mean()  # a mean: routing can flip for one token
    close(off, torch.zeros(()), 0.05, "scores in bfloat16")
    found, expected = (network.session(2).prefill(prompts).log_softmax(-1) for network in (half, single))
    close(found, expected, 0.05, "logits of a session in float16")


# ---- initialisation -------------------------------------------------------------------------------------------------


def check_initialisation(case: Case) -> None:
    """Every parameter is initialised, from the given generator alone; without one, as widely spread."""
    fresh = []
    with _unwritten_memory_is_nan():
        for seed in (1, 2):
            torch.manual_seed(seed)  # the global one, which must not matter
            fresh.append(case.fresh())
        own = case.network(case.config, case.vocabulary, CONTEXT)
    for (name, one), other in zip(fresh[0].named_parameters(), own.parameters(), strict=True):
        spread = one.std(correction=0), other.std(correction=0)
        close(spread[1], spread[0], 0.4 * spread[0].item(), f"deviation of {name}, drawn from PyTorch's generator")
    for (name, one), two in zip(fresh[0].named_parameters(), fresh[1].parameters(), strict=True):
        assert one.isfinite().all(), f"{name} is not initialised"
        assert torch.equal(one, two), f"{name} is not drawn from the generator that was given: see `initialise`"
    matrices = [p for p in case.fresh(seed=1).parameters() if p.ndim > 1]
    for one, other in zip([p for p in fresh[0].parameters() if p.ndim > 1], matrices, strict=True):
        assert not torch.equal(one, other), "another generator draws the same matrix"


class _unwritten_memory_is_nan:
    def __enter__(self) -> None:
        self.was = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory: on by default

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.was)


# ---- export ---------------------------------------------------------------------------------------------------------


def check_export(case: Case) -> None:
    """An exported network comes back bit for bit."""
    network, batch = case.fresh(), case.pack(texts())
    with tempfile.TemporaryDirectory() as folder:
        save_network(network, Path(folder))
        loaded = load_network(Path(folder))
    assert loaded.config == network.config, "other settings came back"
    state, back = network.state_dict(), loaded.state_dict()
    assert state.keys() == back.keys(), f"not in both: {state.keys() ^ back.keys()}"
    for name, value in state.items():
        assert torch.equal(value, back[name]), f"{name} changed"
    assert torch.equal(loaded.score(batch), network.score(batch)), "scores changed"


CHECKS: dict[str, Callable[[Case], None]] = {
    name.removeprefix("check_"): check
    for module in (vars(costs), vars(learning), globals())
    for name, check in module.items()
    if name.startswith("check_")
}
