"""Every pattern of spans that the library uses, cut row by row, and what the tests of attention do with them."""

import torch

from tandem.nn.attention import Source
from tandem.nn.spans import Span, causal, prefix

B, H, G, D = 3, 4, 2, 8


# ---- patterns -------------------------------------------------------------------------------------------------------


def starts_of(T, share, seed):
    """(B, T): where the segment of each position starts; every row is cut by itself, the last one not at all."""
    cut = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < share
    cut[-1] = False
    return torch.where(cut, torch.arange(T), 0).cummax(1).values


def sps(T, window, persistent="inputs", cut=None):
    """(inputs, predictions), each for the queries (input, prediction); `cut` restricts the persistent stream."""
    s, i = starts_of(T, 0.02, 1), torch.arange(T)
    recent = s if window is None else torch.maximum(s, i - window)
    if cut is not None:
        s = torch.maximum(s, i - cut)
    if persistent == "inputs":
        return [(Span(s, i + 1), Span(s, i + 1)), (Span(recent, i), Span(recent, i + 1))]
    return [(Span(recent, i + 1), Span(recent, i + 1)), (Span(s, i), Span(s, i + 1))]


def double_decoder(T):
    s, b = starts_of(T, 0.02, 1), starts_of(T, 0.03, 2)
    own = torch.maximum(b, s)
    return [causal(own), Span(s, own)]


def gist(T):
    """Own sentence, and the ends of the earlier sentences of the document, gathered."""
    begins = torch.rand(B, T, generator=torch.Generator().manual_seed(3)) < 0.1
    begins[:, 0] = True
    opens = begins & (torch.rand(B, T, generator=torch.Generator().manual_seed(4)) < 0.2)
    opens[:, 0] = True
    number = begins.long().cumsum(1) - 1
    first = torch.where(opens, number, 0).cummax(1).values
    return [causal(torch.where(begins, torch.arange(T), 0).cummax(1).values), Span(first, number)]


def bidirectional_prefix(T):
    s, i = starts_of(T, 0.02, 1), torch.arange(T)
    last = torch.stack([torch.where(row == row[j], i, 0).max() for row in s for j in range(T)]).view(B, T)
    middle = (s + last) // 2
    return [Span(s, torch.where(i < middle, middle, i + 1))]


def left_padded(T):
    pads, i = torch.tensor([[0], [T // 2], [T - 1]]), torch.arange(T)
    return [Span(torch.minimum(pads, i), torch.where(i < pads, 0, i + 1))]


PATTERNS = {
    "causal": lambda T: [causal(starts_of(T, 0.02, 1))],
    "causal_tiny_documents": lambda T: [causal(starts_of(T, 0.4, 1))],
    "causal_shared_by_rows": lambda T: [causal(starts_of(T, 0.02, 1)[:1])],
    "windowed": lambda T: [causal(starts_of(T, 0.02, 1), window=9)],
    "sps_0": lambda T: sps(T, 0),
    "sps_3": lambda T: sps(T, 3),
    "sps_64": lambda T: sps(T, 64),
    "two_x_memory": lambda T: sps(T, None),
    "delayed_state_and_reverse": lambda T: sps(T, 5, persistent="predictions"),
    "delayed_state_0": lambda T: sps(T, 0, persistent="predictions"),
    "restricted_state": lambda T: sps(T, 3, cut=20),
    "double_decoder": double_decoder,
    "encoder": lambda T: [prefix(torch.tensor([0, T // 2, T]), T)],
    "own_and_encoder": lambda T: [causal(torch.zeros(1, T, dtype=torch.long)), prefix(torch.tensor([T, 0, T // 2]), T)],
    "prefix_lm": bidirectional_prefix,
    "gist": gist,
    "memory": lambda T: [prefix(torch.tensor([0, min(5, T), min(40, T)]), T)],
    "empty_memory": lambda T: [prefix(0, T)],
    "left_padded": left_padded,
}


def draw(spans, keys, T, dtype=torch.float64, rows=B):
    """Queries (one, or a tuple of groups), sources and all leaves, the same for the same shapes."""
    generator = torch.Generator().manual_seed(0)

    def leaf(heads, length):
        x = torch.randn(rows, length, heads, D, generator=generator, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2).requires_grad_()

    groups = spans[0] if isinstance(spans[0], tuple) else (spans[0],)
    q = tuple(leaf(H, T) for _ in groups)
    kv = [(leaf(G, n), leaf(G, n)) for n in keys]
    sources = [Source(k, v, span) for (k, v), span in zip(kv, spans, strict=True)]
    return q if isinstance(spans[0], tuple) else q[0], sources, [*q, *(x for pair in kv for x in pair)]


def everything(function, q, sources, leaves, alone=True, **options):
    """Outputs, alone (unless these are known to be the same) and beside log-sum-exps, these, and the gradients of a
    random projection of the outputs, flattened into one list."""
    beside, lse = function(q, sources, return_lse=True, **options)
    y = function(q, sources, **options) if alone else beside
    ys, besides, lses = (y, beside, lse) if isinstance(q, tuple) else ((y,), (beside,), (lse,))
    assert not any(x.requires_grad for x in lses)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in ys]
    loss = sum((x * w).sum() for x, w in zip(ys, weights, strict=True))
    return [*ys, *besides, *lses, *torch.autograd.grad(loss, leaves)]


def flattened(result):
    return [x for part in result for x in flattened(part)] if isinstance(result, tuple) else [result]


def assert_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)
