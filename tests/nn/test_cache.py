import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.nn.cache import Cache, FixedCache


def entries(first, length):
    """Keys that say at which position they were written, and values that differ from them."""
    k = torch.arange(first, first + length, dtype=torch.float32)[None, None, :, None].expand(2, 3, -1, 4)
    return k, k + 0.5


@settings(max_examples=60, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(0, 70)),
    chunks=st.lists(st.integers(1, 90), min_size=1, max_size=60),
)
def test_an_append_returns_its_entries_and_those_still_readable_in_order(window, chunks):
    cache, written = Cache(window), 0
    for length in chunks:
        k, v = cache.append(*entries(written, length))
        oldest = 0 if window is None else max(0, written - window)
        written += length
        expected_k, expected_v = entries(oldest, written - oldest)
        assert torch.equal(k, expected_k) and torch.equal(v, expected_v)
        assert len(cache) == (written if window is None else min(window, written))
        assert cache.bytes == len(cache) * 2 * (2 * 3 * 4) * 4


@pytest.mark.parametrize("window", [None, 0, 5])
@pytest.mark.parametrize("length", [0, 3, 64, 100])
def test_forks_go_on_apart(window, length):
    cache = Cache(window)
    if length:
        cache.append(*entries(0, length))
    forks = [cache, cache.fork(), cache.fork()]
    assert {len(fork) for fork in forks} == {len(cache)} and {fork.bytes for fork in forks} == {cache.bytes}
    for step in range(70):
        for number, fork in enumerate(forks):
            fork.append(*entries(1000 * number + step, 1))
    for number, fork in enumerate(forks):
        k, _ = fork.append(*entries(-1, 1))
        held = min(window, 70) if window is not None else 70
        own = torch.arange(70 - held, 70) + 1000 * number
        assert torch.equal(k[0, 0, -1 - held : -1, 0], own.float())
        if window is None:
            assert torch.equal(k[0, 0, :length, 0], torch.arange(length).float())


@pytest.mark.parametrize("prompt", [1, 8, 9, 1000])
def test_a_ring_does_not_grow_with_the_text(prompt):
    """Nor with the prompt."""
    cache = Cache(8)
    cache.append(*entries(0, prompt))
    for step in range(1000):
        assert cache.kv.untyped_storage().nbytes() <= 64 * cache.bytes // len(cache)
        cache.append(*entries(step, 1))


def test_storage_of_an_unbounded_cache_doubles():
    cache, allocations = Cache(), set()
    for step in range(1000):
        cache.append(*entries(step, 1))
        allocations.add(cache.kv.data_ptr())
    assert len(allocations) <= 6 and cache.kv.shape[3] <= 2100


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5), (0, None)])
def test_one_launch_writes_what_each_fixed_cache_would(windows):
    kernel = pytest.importorskip("tandem.nn.cache_triton", reason="needs triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on a CPU in Triton's interpreter
    plain, launched = ([], [])
    clock = torch.zeros(1, dtype=torch.long, device=device)
    for window in windows:
        held = Cache(window)
        held.append(*(x.to(device) for x in entries(0, 9)))
        for caches in (plain, launched):
            caches.append(FixedCache.of(held.fork(), 9, 30, clock))
    for number in range(9, 25):
        clock.fill_(number)
        new = [[x.to(device) + 100 * s for x in entries(number, 1)] for s in range(len(windows))]
        for cache, (k, v) in zip(plain, new, strict=True):
            cache._put(clock, torch.stack((k, v)))
        kernel.append(launched, *zip(*new, strict=True))
        assert all(torch.equal(a.kv, b.kv) for a, b in zip(plain, launched, strict=True))
