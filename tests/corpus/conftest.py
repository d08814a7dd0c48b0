"""Stores small enough to check by hand: documents of given lengths, random bytes inside."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from tandem.corpus.store import Store, StoreWriter
from tandem.corpus.tokenizer import Tokenizer


@pytest.fixture
def store_of(tmp_path_factory) -> Callable[..., Store]:
    """A store whose documents have these lengths, document end included; with shares the source of each is given."""

    def make(lengths: Sequence[int], shares: Mapping[str, float] | None = None, sources: Sequence[int] = ()) -> Store:
        folder = tmp_path_factory.mktemp("made") / "store"
        ids = [np.random.default_rng(i).integers(0, 256, n - 1) for i, n in enumerate(lengths)]
        writer = StoreWriter(folder, Tokenizer.of_bytes(), dict(shares or {}))
        writer.append(ids, [np.ones(n - 1, int) for n in lengths], sources)
        writer.close(["made up"])
        return Store(folder)

    return make
