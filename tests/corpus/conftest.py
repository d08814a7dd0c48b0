"""Stores small enough to check by hand: documents of given lengths, random bytes inside."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tandem.corpus.store import Store, StoreWriter
from tandem.corpus.tokenizer import Tokenizer


@pytest.fixture
def store_of(tmp_path) -> Callable[[Sequence[int]], Store]:
    """A store whose documents have these lengths, document end included."""

    def make(lengths: Sequence[int]) -> Store:
        folder = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        ids = [np.random.default_rng(i).integers(0, 256, n - 1) for i, n in enumerate(lengths)]
        writer = StoreWriter(folder, Tokenizer.of_bytes())
        writer.append(ids, [np.ones(n - 1, int) for n in lengths])
        writer.close(["made up"])
        return Store(folder)

    return make
