"""Checks losses, their gradients, and what objectives ask for; part of the contract."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tandem.networks.network import Network
from tandem.recipe import registered
from tandem.testing.cases import EOS, Case, Task, document, shared_tasks, tasks, texts
from tandem.testing.comparing import EXACT, backward, close, same_gradients


def check_loss(case: Case) -> None:
    """The loss of a batch is the sum of its scores, gradients included."""
    by_loss, by_score, batch = case.build(), case.build(), case.pack(texts())
    hidden, _ = by_loss(by_loss.embed(batch.tokens), batch)
    loss, sums = by_loss.nll(hidden, batch.targets)
    expected = by_score.score(batch).sum()
    close(torch.stack((loss, sums.sum())), expected.expand(2), 100 * EXACT, "loss, and sums, against scores")
    loss.backward()
    expected.backward()
    reached = {name for net in (by_loss, by_score) for name, p in net.named_parameters() if p.grad is not None}
    own = lambda name: name if name in reached else None  # other parameters serve extra terms alone
    same_gradients(by_loss, by_score, "loss against scores", own)


def check_degeneracy(case: Case) -> None:
    """At the settings that make it a plain decoder, loss and gradients are the plain decoder's."""
    config, plain, own = case.network.degenerate(case.config)
    network = replace(case, config=config).build()
    vocabulary = len(network.head)  # with the boundaries that it predicts
    decoder = Case("decoder", registered("network")["decoder"], plain, vocabulary).build(seed=1)
    state = {other: value for name, value in network.state_dict().items() if (other := own(name)) is not None}
    decoder.load_state_dict(state)
    for task in tasks(case.network, registered("network")["decoder"]):
        batches = [replace(batch, blocks=None) for batch in task.batches(texts())]
        loss = backward(network, task.objective, batches)
        expected = backward(decoder, task.objective, [network.as_plain(batch) for batch in batches])
        close(loss, expected, EXACT, f"{task}: loss against the plain decoder's")
        same_gradients(network, decoder, f"{task}, against the plain decoder", own)


def check_accumulation(case: Case) -> None:
    """A step split into micro-batches, with unequal numbers of targets, is the same step."""
    rows = [[document(15, 1)], [document(3, 2)] * 5, [document(n, n) for n in (8, 3, 4)], [[EOS]] * 15]
    for task in shared_tasks(case):  # the last row has no targets
        whole, parts = case.build(), case.build()
        loss = backward(whole, task.objective, task.batches(rows))
        cut = task.batches(rows, parts=len(rows))
        close(backward(parts, task.objective, cut), loss, EXACT, f"{task}: loss in micro-batches")
        same_gradients(parts, whole, f"{task}, micro-batches against one")


def check_targets(case: Case) -> None:
    """What one document of a row adds to a loss and its sums does not depend on the other."""
    network = case.build()
    for task in shared_tasks(case):
        if task.objective.crosses_documents:
            continue
        both, first, second, neither = (_sums(network, task, seeds) for seeds in ((1, 2), (1, 3), (4, 2), (4, 3)))
        for name in both:
            crossing = both[name] - first[name] - second[name] + neither[name]
            close(crossing, torch.zeros_like(crossing), EXACT, f"{task}: {name} of two documents together and apart")


def _sums(network: Network, task: Task, seeds: tuple[int, int]) -> dict[str, Tensor]:
    """The loss of a row of two documents, which `seeds` decide, and its sums, without the network's own terms."""
    (batch,) = task.batches([[document(length, seed) for length, seed in zip((14, 11), seeds, strict=True)]])
    loss, sums = task.objective.loss(network, batch, task.objective.count(network, batch))
    own = {} if network.terms else {"loss": loss.detach()}
    return own | {name: value for name, value in sums.items() if name not in network.terms}


def check_gradients(case: Case) -> None:
    """Every parameter receives a gradient, finite and not zero."""
    for task in shared_tasks(case):
        network = case.build()
        backward(network, task.objective, task.batches(texts()))
        for parameter, value in network.named_parameters():
            assert value.grad is not None and value.grad.isfinite().all(), f"{task}: {parameter} has no finite gradient"
            assert value.grad.any(), f"{task}: the gradient of {parameter} is zero"


def check_overfitting(case: Case) -> None:
    """One batch can be learned by heart, in the first phase of every objective, as far as its `floor`."""
    for task in shared_tasks(case, settings=1):
        batches = task.batches([[document(8, 1)], [document(3, 2), document(5, 3)]])
        network, floor = case.fresh(), task.objective.floor(batches[0])
        optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
        losses = [backward(network, task.objective, batches).item()]
        while losses[-1] - floor >= 0.1 * losses[0] and len(losses) <= 120:
            optimiser.step()
            losses.append(backward(network, task.objective, batches).item())
        told = f"{losses[0]:.2f} nats before, {losses[-1]:.2f} after {len(losses) - 1} steps, {floor:.2f} in `floor`"
        assert 0 <= losses[-1] - floor < 0.1 * losses[0], f"{task}: {told}"


def check_recompute(case: Case) -> None:
    """Recomputing activations in the backward pass changes nothing."""
    _same_training(case, lambda network: setattr(network, "recompute", True), "recomputed, the last block first")


def check_compiled(case: Case, backend: str = "eager") -> None:
    """Compiled training equals eager training; by default checks only the captured graphs."""
    torch._dynamo.reset()
    _same_training(case, lambda network: network.compile(backend), "compiled")


def _same_training(case: Case, change: Callable[[Network], object], what: str) -> None:
    plain, changed = case.build(), case.build()
    change(changed)
    for task in shared_tasks(case, settings=1):
        batches = task.batches(texts())
        loss = backward(plain, task.objective, batches)
        close(backward(changed, task.objective, batches), loss, EXACT, f"{task}: loss {what}")
        same_gradients(changed, plain, f"{task}, {what}")
