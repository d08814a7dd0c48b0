"""Span corruption: how much is cut out, that it can be put back, and that nothing but words is cut."""

import numpy as np
import pytest
import torch

from tandem.corpus.corruption import CorruptedRows, Corruption, corrupt, first_sentinel, start_of_generation
from tandem.corpus.partition import drawing
from tandem.corpus.views import IGNORE
from tandem.testing.cases import EOS, VOCABULARY, document, packed

SENTINEL, START = first_sentinel(VOCABULARY), start_of_generation(VOCABULARY)
LENGTHS = [1, 2, 3, 5, 9, 20, 64, 500, 2047, 4000]  # the last has room for more pieces than sentinels


def restored(context, asked, sentinels):
    """The text: every sentinel of the context replaced by what stands behind it in what is asked."""
    pieces, text = {}, []
    for token in asked[:-1]:
        if token in sentinels:
            current = pieces.setdefault(int(token), [])
        else:
            current.append(int(token))
    for token in context:
        text += pieces.pop(int(token)) if token in sentinels else [int(token)]
    assert not pieces
    return text


@pytest.mark.parametrize("sampler", ["exact", "poisson"])
@pytest.mark.parametrize("length", LENGTHS)
def test_context_and_what_is_asked_give_the_text_back(sampler, length):
    corruption, sentinels = Corruption(sampler=sampler), range(SENTINEL, SENTINEL + 100)
    for seed in range(20):
        text = np.array(document(length + 1, seed))
        cut = corruption.cut(text != EOS, drawing(seed))
        context, asked = corrupt(text, cut, SENTINEL, EOS)
        assert restored(context, asked, sentinels) == text.tolist()
        assert not cut[text == EOS].any() and asked[-1] == EOS
        for side in (context, asked):
            names = [token for token in side.tolist() if token in sentinels]
            assert names == [SENTINEL + i for i in range(len(names))] and len(names) <= 100


@pytest.mark.parametrize("length", LENGTHS)
def test_exact_cuts_exactly_its_share_in_pieces_apart(length):
    corruption, counts = Corruption(), []
    for seed in range(20):
        cut = corruption.cut(np.ones(length, bool), drawing(seed))
        m, k = corruption.amounts(length)
        opens = cut & ~np.r_[False, cut[:-1]]
        assert cut.sum() == m == max(1, round(0.15 * length)) and opens.sum() == min(k, m, length - m + 1)
        counts.append(tuple(np.flatnonzero(opens).tolist()))
    assert len(set(counts)) > min(10, (length - 1) // 2)  # anywhere, not in one place


@pytest.mark.parametrize(("n", "m", "k"), [(2048, 307, 77), (2047, 307, 77), (100, 15, 4), (12, 2, 1), (2, 1, 1)])
def test_a_share_is_rounded_and_so_is_the_number_of_its_pieces(n, m, k):
    assert Corruption().amounts(n) == (m, k)


def test_the_authors_sampler_cuts_less_in_longer_pieces():
    cuts = [Corruption(sampler="poisson").cut(np.ones(2046, bool), drawing(seed)) for seed in range(300)]
    pieces = np.mean([(cut & ~np.r_[False, cut[:-1]]).sum() for cut in cuts])
    share = np.mean([cut.mean() for cut in cuts])
    assert abs(share - 0.139) < 0.004 and abs(pieces - 65.5) < 2 and abs(2046 * share / pieces - 4.35) < 0.1


def test_a_batch_is_all_documents_behind_each_other_without_a_pad():
    rows = [[document(20, 1), document(1, 2), document(19, 3)], [document(40, 4)]]
    view = CorruptedRows(packed(rows), Corruption(sentinels=5))
    batch = view.batch(0)
    begins = sorted(set(batch.starts[0].tolist()))
    assert batch.tokens.shape[0] == 1 and len(begins) == 3  # the document that is its end alone is left out
    sentinels = range(SENTINEL, SENTINEL + 5)
    for begin, end, text in zip(
        begins, [*begins[1:], batch.tokens.shape[1]], [rows[0][0], rows[0][2], rows[1][0]], strict=True
    ):
        tokens, targets, blocks = (x[0, begin:end] for x in (batch.tokens, batch.targets, batch.blocks))
        generated = blocks != begin
        assert (blocks[generated] == begin + int((~generated).sum())).all() and tokens[generated][0] == START
        assert torch.equal(tokens[generated][1:], targets[generated][:-1]) and (targets[~generated] == IGNORE).all()
        assert restored(tokens[~generated].tolist(), targets[generated].tolist(), sentinels) == text
        assert (targets == EOS).sum() == 1
    parts = [view.batch(0, part, 2) for part in range(2)]
    assert torch.equal(torch.cat([part.tokens for part in parts], dim=1), batch.tokens)
    assert not torch.equal(view.batch(2).tokens, view.batch(0).tokens)
    assert view.parts[0] + view.parts[1] == 40 + 2 * view.corruption.amounts(40)[1] + 1
