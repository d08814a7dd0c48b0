"""The plan says what there is to read."""

from types import SimpleNamespace

import numpy as np

from tandem.training.plan import _sources


def test_the_sources_of_a_mixture_are_told_with_their_shares():
    shares = {"wiki/*.jsonl.gz": 0.7, "books": 0.3}
    train = SimpleNamespace(
        manifest=SimpleNamespace(shares=shares), lengths=np.array([900, 600, 30]), source_of=np.array([0, 0, 1])
    )
    run = SimpleNamespace(
        corpus=SimpleNamespace(train=train), recipe=SimpleNamespace(corpus=SimpleNamespace(texts="builtin"))
    )
    assert _sources(run) == (
        "wiki/*.jsonl.gz 70.0% (1.5 k tokens in 2 documents) + books 30.0% (30 tokens in 1 documents)"
    )
    train.manifest.shares = {}
    assert _sources(run) == "builtin"
