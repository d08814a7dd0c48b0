"""Checks the costs that a network states against what it runs; part of the contract."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tandem.networks import double_decoder
from tandem.networks.cost import Parts
from tandem.nn import attention
from tandem.nn.attention import Plan, Source
from tandem.testing.cases import CONTEXT, EOS, Case, document, shared_tasks
from tandem.testing.comparing import backward


def check_parameters(case: Case) -> None:
    """`cost` counts the parameters that the network has."""
    network = case.fresh()
    counted, held = network.cost().total_parameters, sum(p.numel() for p in network.parameters())
    assert counted == held, f"cost says {counted} parameters, the network holds {held}"


def check_flops(case: Case) -> None:
    """`cost` counts the products that run: matrices exactly; attention runs at least the pairs that `cost` counts."""
    network, n = case.fresh(), CONTEXT
    cost, batch = network.cost(), case.pack([[document(CONTEXT, 1)]])
    begin = 0 if batch.blocks is None else int(batch.blocks.max())  # of the targets

    def backpropagate() -> None:
        hidden, extra = network(network.embed(batch.tokens), batch)
        loss = network.nll(hidden[:, begin:], batch.targets[:, begin:])[0]
        torch.stack([loss, *(term for term in extra.values() if term.requires_grad)]).sum().backward()

    expected = cost.training(n, parts=Parts(begin, n - begin) if begin else None)
    matrices, attention = flops_run(backpropagate)
    head = 6 * (n - begin) * cost.head  # of the targets here; in training a network may also predict sentence ends
    assert expected["head"] >= head, f"cost says {expected['head']:,} training FLOPs of the head, {head:,} are needed"
    _equal(matrices, expected["linear"] + cost.once + head, "training FLOPs of matrices")
    # PyTorch's math attention keeps its scores: 12 a pair and channel, where `cost` counts 14 to recompute them, too
    least = expected["attention"] * 12 // 14
    # Two streams, each reading all of both
    most = 12 * cost.passes * cost.pair * len(network.blocks) * (2 * n) ** 2
    assert least <= attention <= most, f"training FLOPs of attention: {attention:,}, cost says {least:,} at least"

    session = network.session(1)
    matrices, _ = flops_run(lambda: session.prefill([document(n - 1, 1)]))
    expected = replace(cost, pair=0).first_logits(n - 1)
    _equal(matrices, expected, "FLOPs of matrices in a prefill and its last position's logits")
    matrices, attention = flops_run(lambda: session.step(torch.tensor([EOS])))
    key, keys = 4 * cost.pair, cost.keys(n - 1)
    _equal(matrices, cost.decode(n - 1) - key * keys, "FLOPs of matrices in a step")
    # What one of two streams reads is computed for both, then masked: a key in each block but the last, in every pass
    streams = getattr(getattr(network, "wrapped", network), "streams", ())
    masked = (len(network.blocks) - 1) * getattr(session, "K", 1) if len(streams) > 1 else 0
    assert 0 <= attention - key * keys <= key * masked, (
        f"FLOPs of attention in a step: {attention:,}, cost says {key * keys:,}: {keys} keys of {key}"
    )


def check_objectives(case: Case) -> None:
    """An objective runs no product with matrices that `cost` does not count."""
    for task in shared_tasks(case, settings=1):
        network, rows = case.fresh(), [[document(CONTEXT, 1)]]
        parts, (batch,) = task.phase(rows).parts, task.batches(rows)
        n = batch.tokens.shape[1]
        if parts and parts.continued:  # a mean; here as this batch was drawn
            begin = int(batch.blocks.max())  # type: ignore[union-attr]
            parts = Parts(begin, n - begin)
        cost, (matrices, _) = network.cost(), flops_run(partial(backward, network, task.objective, [batch]))
        expected = cost.training(n, parts=parts)
        most = expected["linear"] + expected["head"] + cost.once
        assert matrices <= most, f"{task}: {matrices:,} training FLOPs of matrices, cost says {most:,}"


def check_pairs(case: Case) -> None:
    """`cost` counts the keys that queries are asked to read, in training, in a prompt and at every step, and the
    products with matrices of every step."""
    network = case.fresh()
    if network.reads_sentences:
        return  # counted for sentences of typical length
    cost, n = network.cost(), CONTEXT
    for lengths in (n,), (n - 15, 15):
        batch = case.pack([[document(length, 1) for length in lengths]])
        begin = 0 if batch.blocks is None else int(batch.blocks.max())
        if begin and len(lengths) > 1:
            continue  # `cost` divides one document
        with _asked() as asked:
            network(network.embed(batch.tokens), batch)
        expected = cost.training(n, lengths, Parts(begin, n - begin) if begin else None)["attention"]
        found, most = 14 * sum(asked), 1.01 * expected  # a sink is read once more in the first of drawn blocks
        told = f"training FLOPs of attention on documents of {lengths} tokens: {found:,}, cost says {expected:,}"
        assert expected <= found <= most, told
    session = network.session(1)
    with _asked() as asked:
        session.prefill([document(3, 1)])
    of_attention = cost.first_logits(3) - replace(cost, pair=0).first_logits(3)
    _equal(4 * sum(asked), of_attention, "FLOPs of attention in a prompt of 3 tokens, by `prefill_pairs` or `pairs`")
    for index in range(3, n):
        with _asked() as asked:
            matrices, _ = flops_run(lambda: session.step(torch.tensor([EOS])))
        read = 4 * cost.pair * cost.keys(index)
        _equal(4 * sum(asked), read, f"FLOPs of attention at index {index}, by `keys`")
        _equal(matrices, cost.decode(index) - read, f"FLOPs of matrices at index {index}")


def check_cache(case: Case) -> None:
    """`cost` counts the bytes that a session holds."""
    network = case.fresh()
    cost, session, read = network.cost(), network.session(2), 3
    session.prefill([document(3, 1), document(3, 2)])
    while read < CONTEXT:
        _equal(session.bytes, 2 * 4 * cost.cache(read), f"bytes of 2 rows in float32 after {read} tokens")
        session.step(torch.tensor([1, 2]))
        read += 1
    _equal(session.fork().bytes, session.bytes, "bytes of a fork")


@contextmanager
def _asked() -> Iterator[list[int]]:
    """What attention is asked to read while this is open, a number for each call: pairs times channels H D."""
    asked: list[int] = []
    check, scores = attention._check_tensors, double_decoder.scores

    def count(q: Tensor, spans: Iterable[Any]) -> None:
        B, H, _, D = q.shape
        asked.append(sum(int((span.hi - span.lo).sum()) * B // len(span.lo) for span in spans) * H * D)

    def checked(queries: tuple[Tensor, ...], sources: Sequence[Source], plan: Plan) -> None:
        check(queries, sources, plan)
        count(queries[0], itertools.chain(*plan.spans))

    def scored(q: Tensor, sources: Sequence[Source]) -> tuple[Tensor, Tensor]:
        """Where one softmax over all sources will not do."""
        count(q, [source.span for source in sources])
        return scores(q, sources)

    with patch.object(attention, "_check_tensors", checked), patch.object(double_decoder, "scores", scored):
        yield asked


def flops_run(run: Callable[[], object]) -> tuple[int, int]:
    """(FLOPs of products with matrices, FLOPs of batched products, which are those of attention)."""
    with sdpa_kernel(SDPBackend.MATH), _Counter() as counter:  # the CPU's flash kernel counts as 0
        run()
    attention = sum(flops for op, flops in counter.flops.items() if "bmm" in op)
    return counter.flops.total() - attention, attention


@cache
def _is_composite(function: OpOverload) -> bool:
    return function.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


class _Counter(TorchDispatchMode):
    """FLOPs by the name of the operator. PyTorch's FlopCounterMode, which also tells modules apart, takes twice the
    time for networks this small."""

    def __init__(self):
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, count = kwargs or {}, flop_registry.get(function._overloadpacket)
        if count is None and _is_composite(function):  # and autograd has not taken it apart
            with self:
                return function.decompose(*args, **kwargs)
        found = function(*args, **kwargs)
        if count is not None:
            self.flops[str(function)] += count(*args, **kwargs, out_val=found)
        return found


def _equal(actual: int, expected: int, what: str) -> None:
    assert actual == expected, f"{what}: {actual:,}, cost says {expected:,}"
