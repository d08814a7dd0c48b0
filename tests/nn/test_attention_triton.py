"""The fused kernels against the definition: in Triton's interpreter on a CPU, compiled on CUDA."""

import numpy as np
import pytest
import torch
from patterns import PATTERNS, B, D, G, H, assert_close, draw, everything, flattened, starts_of
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tandem.nn import attention, measured
from tandem.nn.attention import Source, attend, attend_dense, plan_attention
from tandem.nn.spans import Span, causal, prefix, readable

pytest.importorskip("triton", reason="the kernels are written in Triton")
from tandem.nn import attention_triton as fused

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
SMALL = fused.Shape(queries=32, keys=32, warps=4, stages=1)


@pytest.fixture
def small_tiles(monkeypatch):
    for table in (fused.HALF, fused.SINGLE):
        for width in table:
            monkeypatch.setitem(table, width, (SMALL,) * 3)


def drawn(spans, T, dtype=torch.float32, keys=None, rows=B):
    """As `draw`, on the device of these tests; heads of 8 channels are padded to 16 by the kernels."""
    q, sources, leaves = draw(spans, keys or [T] * len(spans), T, dtype, rows)
    moved = {id(x): x.detach().to(DEVICE).requires_grad_() for x in leaves}
    q = tuple(moved[id(x)] for x in q) if isinstance(q, tuple) else moved[id(q)]
    return q, [Source(moved[id(s.k)], moved[id(s.v)], s.span) for s in sources], list(moved.values())


def exact(case, dtype=torch.float64):
    q, sources, leaves = case
    wide = {id(x): x.detach().to(dtype).requires_grad_() for x in leaves}
    q = tuple(wide[id(x)] for x in q) if isinstance(q, tuple) else wide[id(q)]
    return q, [Source(wide[id(s.k)], wide[id(s.v)], s.span) for s in sources], list(wide.values())


def assert_is_the_definition(case, tolerance, backward=None):
    """Values, log-sum-exps and gradients; the largest error of each against its largest value."""
    actual = everything(attend, *case, backend="triton")
    expected = everything(attend_dense, *exact(case))
    values = len(actual) - len(case[2])
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a.isfinite(), e.isfinite())
        a, e = (x.double().nan_to_num(0, 0, 0) for x in (a, e))
        limit = tolerance if backward is None or n < values else backward
        assert (a - e).abs().max() <= limit * e.abs().max().clamp_min(1), (n, (a - e).abs().max())


# ---- the definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATTERNS)
def test_triton_is_the_definition_on_cpu_and_cuda(name, small_tiles):
    # 75 queries and keys: two whole tiles and a ragged one. 1e-5: float32 sums of at most 150 terms in another order.
    assert_is_the_definition(drawn(PATTERNS[name](75), 75), 1e-5)
