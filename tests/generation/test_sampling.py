"""Sampling draws from exactly the set and the distribution that were asked for, each row by itself."""

import pytest
import torch

from tandem.generation.sampling import Sampler, draw, likeliest, row_generators


def sampler(**settings):
    return Sampler(Sampler.Config(**settings))


def logits(rows=6, vocabulary=50, seed=0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def test_temperature_zero_takes_the_largest_and_of_equals_the_first():
    z = logits()
    assert torch.equal(sampler(temperature=0.0).choose(z, []), z.argmax(-1))
    assert sampler(temperature=0.0).choose(torch.tensor([[1.0, 5.0, 5.0]]), []).tolist() == [1]


@pytest.mark.parametrize("z", [logits(), logits().round(), torch.zeros(6, 50)])  # the latter two with ties
@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-300}])
def test_a_set_of_one_is_greedy(z, settings):
    if settings.get("temperature") and (z == z.amax(-1, keepdim=True)).sum() > len(z):
        pytest.skip("a low temperature draws among equals")
    assert torch.equal(sampler(**settings).choose(z, row_generators(1, 6)), z.argmax(-1))


def likeliest_by_definition(row, top_k, top_p):
    """Token by token, the likeliest first and of equals the lowest id, until k are there or p is reached."""
    order = row.argsort(descending=True, stable=True)[:top_k]
    kept, mass = [], 0.0
    for token, probability in zip(order.tolist(), row[order].double().softmax(0).tolist(), strict=True):
        if mass >= (top_p or 2):
            break
        kept.append(token)
        mass += probability
    return sorted(kept)


@pytest.mark.parametrize("top_p", [None, 0.01, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [None, 1, 2, 17, 50, 99])
@pytest.mark.parametrize("z", [logits(), logits().round(), torch.zeros(6, 50)])
def test_top_k_and_top_p_keep_the_smallest_set(z, top_k, top_p):
    for row, kept in zip(z, likeliest(z, top_k, top_p), strict=True):
        assert kept.nonzero().flatten().tolist() == likeliest_by_definition(row, top_k, top_p)


def test_a_set_by_hand():
    z = torch.tensor([[0.1, 0.4, 0.1, 0.25, 0.15]]).log()

    def tokens(top_k, top_p):
        return likeliest(z, top_k, top_p).nonzero()[:, 1].tolist()

    assert tokens(None, 0.39) == [1]
    assert tokens(None, 0.41) == [1, 3]
    assert tokens(None, 0.85) == [0, 1, 3, 4]  # one of the two equals is enough: the first
    assert tokens(None, 1.0) == [0, 1, 2, 3, 4]
    assert tokens(2, 0.65) == [1, 3]
    assert tokens(2, 0.6) == [1]  # 0.4 of the 0.65 that top_k leaves


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}]
)
def test_frequencies_are_the_softmax_over_the_allowed_set(settings):
    """Chi-square: its mean is the degrees of freedom d and its variance 2 d; five deviations above do not happen."""
    n, z = 20_000, logits(rows=1, vocabulary=12) / 3
    z[0, 3] = -torch.inf
    scaled = z.double() / settings.get("temperature", 1.0)
    allowed = likeliest(scaled, settings.get("top_k"), settings.get("top_p"))[0] & (z[0] > -torch.inf)
    p = scaled[0].masked_fill(~allowed, -torch.inf).softmax(0)
    (generator,) = row_generators(3, 1)
    drawn = sampler(**settings).choose(z.expand(n, -1), [generator] * n)
    counts = drawn.bincount(minlength=12)
    assert not counts[~allowed].any()
    freedom = int(allowed.sum()) - 1
    assert freedom > 1
    chi = ((counts - n * p).square() / (n * p))[allowed].sum().item()
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_a_row_depends_on_its_own_stream_only():
    z, together = logits(), row_generators(7, 6)
    batch = torch.stack([sampler().choose(z, together) for _ in range(20)], 1)
    for row in range(6):
        alone = row_generators(7, 6)[row]
        assert torch.equal(torch.cat([sampler().choose(z[[row]], [alone]) for _ in range(20)]), batch[row])


def test_streams_differ_between_rows_and_seeds_and_repeat():
    def first(seed):
        return [torch.rand((), generator=g).item() for g in row_generators(seed, 4)]

    assert first(0) == first(0)
    assert len({*first(0), *first(1), *first(2)}) == 12


@pytest.mark.parametrize(("u", "place"), [(0.0, 0), (1 - 2**-53, -1)])
def test_the_ends_of_the_interval_are_the_first_and_the_last_possible_token(monkeypatch, u, place):
    """Whatever the cumulative probabilities round to, an impossible token is never drawn."""
    z = logits(rows=500)
    z[:, [0, 1, 48, 49]] = -torch.inf
    z[:, 47] = 3.0
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([u], dtype=torch.float64))
    assert (draw(z, row_generators(0, 500)) == range(2, 48)[place]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_without_probabilities_are_an_error(bad):
    z = logits()
    z[2, 5] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"no probabilities: its largest logit is {bad}"):
            sampler(temperature=temperature).choose(z, row_generators(0, 6))


def test_each_row_needs_a_generator():
    with pytest.raises(ValueError, match="6 rows, 1 generators"):
        sampler().choose(logits(), row_generators(0, 1))


@pytest.mark.parametrize(
    "settings", [{"temperature": -0.1}, {"temperature": float("inf")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_settings_out_of_bounds_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampler.Config(**settings)
