"""Keys and values of one layer, kept for later tokens: all of them, or a ring of the newest.

    cache = Cache()            keeps everything; storage doubles when it is full
    ring = Cache(window=64)    an append returns its own entries and the 64 before them; older ones are dropped

The ring is a buffer of a few windows. Its live part advances to the end and is then moved back to the start, so an
append always returns one contiguous slice in order, however many tokens are appended.

    fixed = FixedCache.of(cache, ...)    the same for one token at a time in memory that never moves: CUDA graphs

Shapes: B rows, G key heads, N entries, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def rows_of_state(state: Tensor, rows: Tensor | None, dim: int = 0) -> Tensor:
    """A copy of the entries `rows` (N,) along `dim`, in that order, repeats included; None: the state itself."""
    return state if rows is None else state.index_select(dim, rows.to(state.device))


@dataclass
class Cache:
    """`window`: how many earlier entries an append can still see; None: all."""

    window: int | None = None
    kv: Tensor | None = None  # (2, B, G, capacity, D)
    start: int = 0
    end: int = 0

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Stores T entries; returns views (B, G, N, D) of all entries that their queries may read, oldest first."""
        T = k_BGTD.shape[2]
        if self.window is not None:
            if self.window < T:
                return self._take_end(k_BGTD, v_BGTD, self.window)
            self.start = max(self.start, self.end - self.window)
        if self.kv is None or self.end + T > self.kv.shape[3]:
            self._make_room(k_BGTD, T)
        assert self.kv is not None
        self.kv[0, :, :, self.end : self.end + T] = k_BGTD
        self.kv[1, :, :, self.end : self.end + T] = v_BGTD
        self.end += T
        live = self.kv[:, :, :, self.start : self.end]
        return live[0], live[1]

    def __len__(self) -> int:
        """Entries that the next append will see."""
        held = self.end - self.start
        return held if self.window is None else min(held, self.window)

    @property
    def bytes(self) -> int:
        """Bytes of the entries `held`; storage reserved ahead is not counted."""
        return 0 if self.held is None else self.held.nbytes

    @property
    def held(self) -> Tensor | None:
        """Entries that the next append will see, (2, B, G, N, D); None before the first append."""
        return None if self.kv is None else self.kv[:, :, :, self.end - len(self) : self.end]

    def fork(self, rows: Tensor | None = None, entries: int | None = None) -> "Cache":
        """An independent continuation of all rows or those in `rows`, (N,), with all or the first `entries` entries.

        With all rows, storage is shared until the first append, which copies the entries.
        """
        if self.held is None:
            return Cache(self.window)
        held = rows_of_state(self.held[:, :, :, :entries], rows, dim=1)
        return Cache(self.window, held, 0, held.shape[3])

    @classmethod
    def joined(cls, caches: Sequence["Cache"]) -> "Cache":
        """The entries of caches with equally many, their rows one after the other."""
        held = torch.cat([cache.held for cache in caches], dim=1)  # type: ignore[misc]
        return cls(caches[0].window, held, 0, held.shape[3])

    def _take_end(self, k_BGTD: Tensor, v_BGTD: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Stores no more than the end of a prompt that is longer than the ring."""
        if self.held is not None:
            k_BGTD, v_BGTD = (torch.cat(pair, dim=2) for pair in zip(self.held, (k_BGTD, v_BGTD), strict=True))
        first = k_BGTD.shape[2] - window
        self.kv = torch.stack((k_BGTD[:, :, first:], v_BGTD[:, :, first:]))
        self.start, self.end = 0, window
        return k_BGTD, v_BGTD

    def _make_room(self, like_BGTD: Tensor, T: int) -> None:
        held = self.end - self.start
        B, G, _, D = like_BGTD.shape
        room = like_BGTD.new_empty(2, B, G, max(64, 2 * (held + T)), D)
        if self.kv is not None:
            room[:, :, :, :held] = self.kv[:, :, :, self.start : self.end]
        self.kv, self.start, self.end = room, 0, held


@dataclass
class FixedCache:
    """A cache for one entry at a time, in memory that never moves: a captured graph writes where `clock` says.

        window 2, entry 7 of a ring      index   0  1  2  3  4  5      every entry stands twice, so the newest three
                                         entry   6  7  5  6 [7] 5      are always neighbours, in order: 5 6 7

    kv: (2, B, G, entries, D); entry n is stored at n, in a ring at n % (window + 1) and again window + 1 places later.
    clock: (1,) on the device, the number of the entry to append.
    """

    kv: Tensor
    clock: Tensor
    window: int | None

    @classmethod
    def of(cls, cache: Cache, count: int, capacity: int, clock: Tensor) -> "FixedCache":
        """The contents of `cache`, the newest of `count` entries, with room for `capacity` in total."""
        held, window = cache.held, cache.window
        assert held is not None
        B, G, N, D = held.shape[1:]
        fixed = cls(held.new_zeros(2, B, G, capacity if window is None else 2 * (window + 1), D), clock, window)
        fixed._put(torch.arange(count - N, count, device=held.device), held)
        return fixed

    def append(self, k_BG1D: Tensor, v_BG1D: Tensor) -> tuple[Tensor, Tensor]:
        """Stores an entry; returns the whole memory, in which the newest entries end at `index`."""
        return append_each([self], [k_BG1D], [v_BG1D])[0]

    def fork(self, rows: Tensor | None = None) -> "FixedCache":
        raise ValueError("a session that is fixed in memory has one continuation; fork it before `fix`")

    @property
    def held(self) -> Tensor:
        return self.fork().kv  # for a fork, too: how much of the memory is filled, the device alone knows

    def index(self, count: int) -> int:
        """Where entry number `count` is in the memory that its append returns."""
        return count if self.window is None else count % (self.window + 1) + self.window + 1

    @property
    def bytes(self) -> int:
        """Bytes of all memory reserved."""
        return self.kv.nbytes

    def _put(self, numbers: Tensor, entries: Tensor) -> None:
        if self.window is None:
            self.kv.index_copy_(3, numbers, entries)
        else:
            twice = entries[:, :, :, None].expand(-1, -1, -1, 2, -1, -1)
            self.kv.unflatten(3, (2, -1)).index_copy_(4, numbers % (self.window + 1), twice)


def append_each(caches: Sequence[Any], ks: Sequence[Tensor], vs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What the appends of several caches of a layer return; fixed ones on CUDA are written in one launch."""
    if not isinstance(caches[0], FixedCache):
        return [cache.append(k, v) for cache, k, v in zip(caches, ks, vs, strict=True)]
    if ks[0].is_cuda:
        from tandem.nn.cache_triton import append  # triton comes only with PyTorch for CUDA

        append(caches, ks, vs)
    else:
        for cache, k, v in zip(caches, ks, vs, strict=True):
            cache._put(cache.clock, torch.stack((k, v)))
    return [(cache.kv[0], cache.kv[1]) for cache in caches]


@dataclass
class GraphCache:
    """A cache for backpropagation through time: nothing is overwritten, so gradients flow into every entry.

    Cost: an append copies what it returns.
    """

    window: int | None = None
    k: Tensor | None = None  # (B, G, N, D)
    v: Tensor | None = None

    def append(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """As `Cache.append`."""
        if self.k is not None and self.v is not None:
            first = 0 if self.window is None else max(0, self.k.shape[2] - self.window)
            k_BGTD = torch.cat((self.k[:, :, first:], k_BGTD), dim=2)
            v_BGTD = torch.cat((self.v[:, :, first:], v_BGTD), dim=2)
        self.k, self.v = k_BGTD, v_BGTD
        return k_BGTD, v_BGTD
