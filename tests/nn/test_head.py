"""The chunked head is the dense formula, in values, gradients and exact zeros, and never holds all logits."""

import json
import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tandem.corpus import IGNORE
from tandem.nn import head
from tandem.nn.head import nll_sums, token_nll

F64 = torch.float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of the kernel; on a CPU in Triton's interpreter


def nll_dense(hidden, weight, targets):
    """The definition, symbol by symbol: lse(z) - z_y where something is asked, 0 elsewhere; (N, S)."""
    z = hidden @ weight.T
    asked = targets != IGNORE
    lse = z.exp().sum(1, keepdim=True).log()
    return (lse - z.gather(1, targets * asked)) * asked


def draw(rows=37, slots=8, vocabulary=11, width=5, dtype=F64, seed=0):
    """hidden, weight, targets (a third ignored, many met twice), coefficients of either sign."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=g, dtype=F64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g, dtype=F64).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows, slots), generator=g)
    targets[torch.rand(rows, slots, generator=g) < 1 / 3] = IGNORE
    return hidden, weight, targets, torch.randn(rows, slots, generator=g, dtype=F64).to(dtype)


def difference(got, expected):
    """Largest difference, relative to the largest expected value."""
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def dense_with_gradients(hidden, weight, targets, coefficients, upstream=1.0):
    h, w = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    nll = nll_dense(h, w, targets)
    loss = (nll * coefficients.double()).sum()
    return loss, nll.sum(0), *torch.autograd.grad(loss * upstream, (h, w))


@pytest.mark.parametrize("chunk", [1, 7, 37, None])
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-6)])
def test_chunks_equal_the_formula(dtype, tolerance, slots, chunk):
    hidden, weight, targets, coefficients = draw(slots=slots, dtype=dtype)
    loss, sums = nll_sums(hidden, weight, targets, coefficients=coefficients, chunk=chunk)
    got = loss, sums, *torch.autograd.grad(loss * 0.3, (hidden, weight))
    assert [x.dtype for x in got] == [dtype] * 4
    dense = dense_with_gradients(hidden, weight, targets, coefficients, 0.3)
    for mine, expected in zip(got, dense, strict=True):
        assert difference(mine, expected) < tolerance


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("aligned", [{}, {"cpu": 64}], ids=["plain", "filled up"])
def test_in_one_kernel_it_says_the_same(aligned, slots, monkeypatch):
    kernel = pytest.importorskip("tandem.nn.head_triton", reason="needs triton")
    monkeypatch.setattr(head, "ALIGNED", aligned)
    monkeypatch.setattr(kernel, "BLOCK", 16)  # of 37 ids: the last is ragged
    hidden, weight, targets, coefficients = draw(vocabulary=37, slots=slots, dtype=torch.float32)
    hidden, weight = (x.detach().to(DEVICE).requires_grad_() for x in (hidden * 20, weight))  # logits of about 50
    targets[0, 0] = 36
    given = {"coefficients": coefficients.to(DEVICE), "chunk": 15}  # 37 rows: the last chunk is shorter
    plain, fused = (nll_sums(hidden, weight, targets.to(DEVICE), **given, fused=way) for way in (False, True))
    grads = (torch.autograd.grad(loss, (hidden, weight)) for loss, _ in (plain, fused))
    for mine, expected in zip((*fused, *next(grads)), (*plain, *next(grads)), strict=True):
        assert difference(mine, expected) < 3e-5  # exponentials of a device are approximate


def test_an_id_outside_the_vocabulary_is_not_a_number_in_the_kernel():
    pytest.importorskip("tandem.nn.head_triton", reason="needs triton")
    for target in (-1, 11):
        hidden, weight, targets, _ = draw(slots=1, dtype=torch.float32)
        targets[5] = target
        given = (x.detach().to(DEVICE).requires_grad_() for x in (hidden, weight))
        assert nll_sums(*given, targets.to(DEVICE), fused=True)[0].isnan()


@pytest.mark.parametrize("any_of", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_that_fill_up_a_row_of_logits_have_no_part_in_it(dtype, any_of, monkeypatch):
    hidden, weight, targets, coefficients = draw(rows=40, vocabulary=50, width=16, dtype=torch.float32)
    hidden = hidden.detach().to(dtype).requires_grad_()
    results, seen, mm = [], set(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: (seen.add((*a.shape, *b.shape)), mm(a, b, out=out))[1])
    for aligned in ({}, {"cpu": 64}):
        monkeypatch.setattr(head, "ALIGNED", aligned)
        loss, sums = nll_sums(hidden, weight, targets, coefficients=coefficients.abs(), any_of=any_of)
        results.append((loss, sums, *torch.autograd.grad(loss, (hidden, weight))))
    for plain, filled in zip(*results, strict=True):
        assert plain.shape == filled.shape and difference(filled, plain) < (1e-6 if dtype == torch.float32 else 2**-8)
    assert {(40, 16, 16, 50), (40, 16, 16, 64)} <= seen  # the control: 14 ids were there


@pytest.mark.parametrize("chunk", [1, 64])  # 1: the weight's gradient is a sum of 300 parts, rounded one by one only
def test_bfloat16_products_have_float32_losses_and_master_gradients(chunk):
    hidden, weight, targets, coefficients = draw(rows=300, vocabulary=50, width=32, dtype=torch.float32)
    # Logits near 1: rounding large ones to 8 bits would move the softmax itself.
    low = (hidden.detach() / 8).bfloat16().requires_grad_()
    coefficients = coefficients.abs()
    loss, sums = nll_sums(low, weight, targets, coefficients=coefficients, chunk=chunk)
    got = loss, sums, *torch.autograd.grad(loss, (low, weight))
    assert [x.dtype for x in got] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    for mine, expected in zip(got, dense_with_gradients(low, weight, targets, coefficients), strict=True):
        assert difference(mine, expected) < 2**-7  # bfloat16 keeps 8 bits


def test_a_confident_row_keeps_its_small_gradient_in_bfloat16():
    """1 - p is taken in float32; after rounding p to bfloat16 it would be 0."""
    hidden = torch.tensor([[8.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    loss, _ = nll_sums(hidden, weight, torch.tensor([0]))
    (grad,) = torch.autograd.grad(loss, weight)
    assert grad[0, 0].item() == pytest.approx(-8 / (1 + math.exp(8)), rel=0.01)


def test_large_logits_do_not_overflow():
    loss, _ = nll_sums(torch.tensor([[1000.0]]), torch.tensor([[1.0], [0.5], [-1.0]]), torch.tensor([1]))
    assert loss.item() == 500.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    """The dtype of the products is that of the hidden states, whatever is on around the head."""

    def run(autocast):
        hidden, weight, targets, coefficients = draw(dtype=torch.float32)
        hidden = hidden.detach().to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            loss, sums = nll_sums(hidden, weight, targets, coefficients=coefficients)
            alone = token_nll(hidden, weight, targets[:, 0])
        return loss, sums, alone, *torch.autograd.grad(loss + alone.sum(), (hidden, weight))

    for plain, under in zip(run(False), run(True), strict=True):
        assert plain.dtype == under.dtype
        assert torch.equal(plain, under)


def test_ignored_targets_are_exactly_zero():
    hidden, weight, targets, _ = draw()
    poison = torch.full(targets.shape, torch.inf, dtype=F64)  # such as one over a count of none
    loss, sums = nll_sums(hidden, weight, torch.full_like(targets, IGNORE), coefficients=poison)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss == 0
    assert not any(x.any() for x in (sums, *grads))
    assert not token_nll(hidden, weight, torch.full_like(targets[:, 0], IGNORE)).any()


def test_no_rows_give_nothing():
    hidden, weight, targets, _ = draw(rows=0)
    loss, sums = nll_sums(hidden, weight, targets)
    loss.backward()
    assert loss == 0
    assert sums.shape == (8,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_coefficients_by_slot_and_none_and_targets_of_one_dimension():
    hidden, weight, targets, _ = draw()
    by_slot = torch.linspace(1, 2, 8, dtype=F64)
    assert nll_sums(hidden, weight, targets, coefficients=by_slot)[0].item() == pytest.approx(
        nll_sums(hidden, weight, targets, coefficients=by_slot.expand(37, 8))[0].item(), rel=1e-14
    )
    loss, sums = nll_sums(hidden, weight, targets)
    assert loss.item() == pytest.approx(sums.sum().item(), rel=1e-14)
    loss, sums = nll_sums(hidden, weight, targets[:, 2], coefficients=by_slot[2].expand(37))
    assert sums.shape == (1,)
    assert loss.item() == pytest.approx(by_slot[2].item() * sums.item(), rel=1e-14)


def test_a_tied_weight_sums_both_gradients_and_padding_rows_get_none():
    _, _, targets, _ = draw()
    table = torch.nn.Parameter(torch.randn(13, 5, dtype=F64, generator=torch.Generator().manual_seed(1)))
    tokens = torch.arange(37) % 11

    def gradient(nll):
        (grad,) = torch.autograd.grad(nll(table[tokens].tanh(), table[:11]), table)
        return grad

    got = gradient(lambda hidden, weight: nll_sums(hidden, weight, targets)[0])
    assert difference(got, gradient(lambda hidden, weight: nll_dense(hidden, weight, targets).sum())) < 1e-12
    assert not got[11:].any()


@pytest.mark.parametrize("trained", ["hidden", "weight", "neither"])
def test_only_gradients_that_are_needed_are_computed(trained):
    hidden, weight, targets, _ = draw(rows=64, vocabulary=96, width=16)
    hidden.requires_grad_(trained == "hidden")
    weight.requires_grad_(trained == "weight")
    with FlopCounterMode(display=False) as counter:
        loss, _ = nll_sums(hidden, weight, targets, chunk=16)
    assert counter.get_total_flops() == 2 * 64 * 96 * 16 * (1 if trained == "neither" else 2)
    assert loss.requires_grad == (trained != "neither")


def test_flops_are_three_products_and_one_without_gradients():
    hidden, weight, targets, _ = draw(rows=64, vocabulary=96, width=16)
    with FlopCounterMode(display=False) as counter:
        nll_sums(hidden, weight, targets, chunk=16)[0].backward()
    assert counter.get_total_flops() == 6 * 64 * 96 * 16
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        nll_sums(hidden, weight, targets, chunk=16)
    assert counter.get_total_flops() == 2 * 64 * 96 * 16


def test_a_kept_graph_gives_the_same_gradients_again():
    hidden, weight, targets, _ = draw()
    loss, _ = nll_sums(hidden, weight, targets)
    first, second = (torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_is_refused():
    hidden, weight, targets, _ = draw()
    loss, sums = nll_sums(hidden, weight, targets)
    assert not sums.requires_grad
    with pytest.raises(RuntimeError, match="no second derivative; use token_nll"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_token_nll_equals_the_formula_and_can_be_differentiated_twice(chunk):
    hidden, weight, targets, coefficients = draw(slots=1)

    def derivatives(nll):
        (first,) = torch.autograd.grad(nll @ coefficients[:, 0], weight, create_graph=True)
        return nll, first, *torch.autograd.grad(first.square().sum(), (hidden, weight))

    got = derivatives(token_nll(hidden, weight, targets[:, 0], chunk=chunk))
    for mine, expected in zip(got, derivatives(nll_dense(hidden, weight, targets)[:, 0]), strict=True):
        assert difference(mine, expected) < 1e-12


def test_token_nll_answers_for_one_token_after_another():
    hidden, weight, targets, _ = draw(slots=1)
    nll = token_nll(hidden, weight, targets[:, 0], chunk=4)
    for i in range(0, 37, 5):
        (grad,) = torch.autograd.grad(nll[i], hidden, retain_graph=True)
        assert (grad.any(1).nonzero().flatten().tolist() == [i]) == (targets[i, 0] != IGNORE)


def peak_bytes(step, path):
    """Largest sum of live tensor bytes beyond those live at the start, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    recorded.export_chrome_trace(str(path))
    events = [e["args"] for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
    start = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(e["Total Allocated"] for e in events) - start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_one_chunk_of_logits_and_the_gradients(tmp_path, dtype):
    N, C, V, chunk = 1024, 16, 2048, 32
    hidden, weight, targets, _ = draw(rows=N, vocabulary=V, width=C, dtype=torch.float32)
    hidden = hidden.detach().to(dtype).requires_grad_()
    logits = chunk * V * (4 if dtype == torch.float32 else 4 + 2)  # float32, and bfloat16 for the products
    gradients = 4 * 4 * V * C + 2 * 4 * N * C  # what is saved, scaled, and cast between the dtypes
    rows = 64 * N * 8  # targets, coefficients and their masks, at most eight bytes a slot

    def step():
        nll_sums(hidden, weight, targets, chunk=chunk)[0].backward()

    step()
    weight.grad = hidden.grad = None
    peak = peak_bytes(step, tmp_path / "summed.json")
    assert logits < peak < logits + gradients + rows < 4 * N * V / 5

    def alone():
        token_nll(hidden, weight, targets[:, 0], chunk=chunk).sum().backward()

    assert peak_bytes(alone, tmp_path / "alone.json") < 4 * logits + gradients + rows


@pytest.mark.parametrize(("rows", "vocabulary", "held"), [(4096, 512, 1024 * 512), (512, 2**17, 2**25)])
def test_by_default_at_most_1024_rows_and_128_mebibytes_of_logits_are_held(tmp_path, rows, vocabulary, held):
    hidden, weight, targets = torch.zeros(rows, 1), torch.zeros(vocabulary, 1), torch.zeros(rows).long()
    peak = peak_bytes(lambda: nll_sums(hidden, weight, targets), tmp_path / "default.json")
    assert 4 * held <= peak < 4 * held * 1.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 4, dtype=torch.float16)}, "float16.*bfloat16, float32 or float64"),
        ({"hidden": torch.zeros(1, 3, 4)}, r"hidden \(1, 3, 4\).*must be \(N, C\)"),
        ({"weight": torch.zeros(5, 3)}, r"weight \(5, 3\)"),
        ({"targets": torch.zeros(2, dtype=torch.long)}, r"targets \(2,\)"),
        ({"coefficients": torch.zeros(2)}, r"coefficients \(2,\): they must be \(3,\) or \(1,\)"),
        ({"coefficients": torch.ones(3, requires_grad=True)}, "take no gradient"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    fitting = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "targets": torch.zeros(3).long()}
    hidden, weight, targets, *coefficients = (fitting | change).values()
    with pytest.raises(ValueError, match=message):
        nll_sums(hidden, weight, targets, coefficients=coefficients[0] if coefficients else None)


@pytest.mark.parametrize("target", [-1, 11])
def test_an_id_outside_the_vocabulary_is_an_error(target):
    hidden, weight, targets, _ = draw(slots=1)
    targets[5] = target
    for function in (nll_sums, token_nll):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            function(hidden, weight, targets[:, 0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_on_cuda_the_head_waits_for_nothing(dtype, fused):
    hidden, weight, targets, coefficients = draw(rows=300, vocabulary=500, width=32, dtype=torch.float32)
    hidden = (hidden.detach() / 8).to(dtype).cuda().requires_grad_()
    weight = weight.detach().cuda().requires_grad_()
    targets, coefficients = targets.cuda(), coefficients.abs().cuda()
    asked = lambda: nll_sums(hidden, weight, targets, coefficients=coefficients, chunk=64, fused=fused)
    asked()  # compiled now
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, sums = asked()
        grads = torch.autograd.grad(loss, (hidden, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = dense_with_gradients(hidden, weight, targets, coefficients)
    for mine, dense in zip((loss, sums, *grads), expected, strict=True):
        assert difference(mine, dense) < (1e-5 if dtype == torch.float32 else 2**-7)
