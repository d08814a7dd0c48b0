"""Checks the costs that a network states against what it runs; part of the contract."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tandem.networks.cost import Parts
from tandem.nn.attention import pairs_asked
from tandem.testing.cases import CONTEXT, EOS, Case, document


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
    matrices, attention = _flops(backpropagate)
    head = 6 * (n - begin) * cost.head  # of the targets here; in training a network may also predict sentence ends
    assert expected["head"] >= head, f"cost says {expected['head']:,} training FLOPs of the head, {head:,} are needed"
    _equal(matrices, expected["linear"] + cost.once + head, "training FLOPs of matrices")
    # PyTorch's math attention keeps its scores: 12 a pair and channel, where `cost` counts 14 to recompute them, too
    least = expected["attention"] * 12 // 14
    # Two streams, each reading all of both
    most = 12 * cost.passes * cost.pair * len(network.blocks) * (2 * n) ** 2
    assert least <= attention <= most, f"training FLOPs of attention: {attention:,}, cost says {least:,} at least"

    session = network.session(1)
    matrices, _ = _flops(lambda: session.prefill([document(n - 1, 1)]))
    expected = replace(cost, pair=0).first_logits(n - 1)
    _equal(matrices, expected, "FLOPs of matrices in a prefill and its last position's logits")
    matrices, attention = _flops(lambda: session.step(torch.tensor([EOS])))
    key, keys = 4 * cost.pair, cost.keys(n - 1)
    _equal(matrices, cost.decode(n - 1) - key * keys, "FLOPs of matrices in a step")
    # What one of two streams reads is computed for both, then masked: a key in each block but the last
    streams = getattr(getattr(network, "wrapped", network), "streams", ())
    masked = len(network.blocks) - 1 if len(streams) > 1 else 0
    assert 0 <= attention - key * keys <= key * masked, (
        f"FLOPs of attention in a step: {attention:,}, cost says {key * keys:,}: {keys} keys of {key}"
    )


def check_pairs(case: Case) -> None:
    """`cost` counts the keys that queries are asked to read: in training, in a prompt and at every step."""
    network, batch = case.fresh(), case.pack([[document(CONTEXT, 1)]])
    if network.reads_sentences:
        return  # counted for sentences of typical length
    cost, n = network.cost(), CONTEXT
    begin = 0 if batch.blocks is None else int(batch.blocks.max())
    parts = Parts(begin, n - begin) if begin else None
    with pairs_asked() as asked:
        network(network.embed(batch.tokens), batch)
    found, expected = 14 * sum(asked), cost.training(n, parts=parts)["attention"]
    assert expected <= found <= 1.01 * expected, (  # a sink is read once more in a first block, whose length is drawn
        f"training FLOPs of attention on a document of {n} tokens: {found:,}, cost says {expected:,} by `pairs`"
    )
    session = network.session(1)
    with pairs_asked() as asked:
        session.prefill([document(7, 1)])
    of_attention = cost.first_logits(7) - replace(cost, pair=0).first_logits(7)
    _equal(4 * sum(asked), of_attention, "FLOPs of attention in a prompt of 7 tokens, by `prefill_pairs` or `pairs`")
    for index in range(7, n):
        with pairs_asked() as asked:
            session.step(torch.tensor([EOS]))
        _equal(4 * sum(asked), 4 * cost.pair * cost.keys(index), f"FLOPs of attention at index {index}, by `keys`")


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


def _flops(run: Callable[[], object]) -> tuple[int, int]:
    """(FLOPs of products with matrices, FLOPs of batched products, which are those of attention)."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # the CPU's flash kernel counts as 0
        run()
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for op, flops in counts.items() if "bmm" in op)
    return sum(counts.values()) - attention, attention


def _equal(actual: int, expected: int, what: str) -> None:
    assert actual == expected, f"{what}: {actual:,}, cost says {expected:,}"
