"""Where blocks begin: drawn inside of documents, from (seed, step, row, document) and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.corpus import prompt_blocks
from tandem.corpus.partition import PartitionConfig, documents, draw_splits, scoring_blocks, training_blocks
from tandem.networks.double_decoder import TILE, block_spans
from tandem.nn import flex
from tandem.nn.attention import plan_attention
from tandem.recipe import load
from tandem.training.run import Run

T = 2048


def starts_of(*lengths):
    ends = np.cumsum(lengths)
    return torch.from_numpy(np.repeat(ends - lengths, lengths))[None]


def config(**given):
    return PartitionConfig(**given)


def splits_of(blocks_T, starts_T):
    """Where a block begins but no document does."""
    i = torch.arange(len(blocks_T))
    return i[(blocks_T == i) & (starts_T != i)].tolist()


def test_a_row_has_three_to_eight_blocks_a_fifth_of_it_without_context():
    """4,000 draws of the authors' sampler."""
    starts, first, last, splits = starts_of(T), [], [], []
    for key in range(4000):
        blocks = training_blocks(config(scope="row"), starts, key)[0]
        found = splits_of(blocks, starts[0])
        assert 2 <= len(found) <= 7 and found[0] >= 2 and found[-1] <= T - 2
        first.append(found[0] / T)
        last.append(found[-1])
        splits.append(len(found))
    assert min(first) == 2 / T and max(last) == T - 2  # either end is drawn in 1 of 500 rows
    assert np.mean(first) == pytest.approx(0.203, abs=0.01)
    assert 4000 * T / (sum(splits) + 4000) == pytest.approx(372, abs=8)
    assert set(splits) == {2, 3, 4, 5, 6, 7}


def test_every_document_of_four_tokens_has_a_split_and_none_outside():
    lengths, places = [1, 2, 3, 4, 5, 9, 40, 64], set()
    for key in range(200):
        starts = starts_of(*lengths)
        blocks = training_blocks(config(), starts, key)[0]
        found, end, counted = splits_of(blocks, starts[0]), 0, 0
        for n in lengths:
            end += n
            inside = [split for split in found if end - n < split < end]
            assert (n >= 4) <= len(inside) <= min(7, max(0, n - 2))
            counted += len(inside)
            places |= {(n, split - (end - n)) for split in inside}
        assert counted == len(found)
        assert (blocks >= starts[0]).all() and (blocks <= torch.arange(len(blocks))).all()
    assert places == {(n, place) for n in lengths[2:] for place in range(1, n)}  # any but its first token


def test_a_document_is_drawn_from_step_row_and_place():
    starts = torch.cat((starts_of(100, 156), starts_of(100, 156)))
    blocks = training_blocks(config(), starts, key=5, row=3)
    again = training_blocks(config(), starts[1:], key=5, row=4)  # the second row, alone
    assert torch.equal(blocks[1:], again)
    assert not torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks, training_blocks(config(), starts, key=6, row=3))
    other = torch.cat((starts_of(100, 30, 126), starts_of(100, 156)))
    assert torch.equal(training_blocks(config(), other, key=5, row=3)[0, :100], blocks[0, :100])


def test_rows_share_splits_only_where_they_are_told_to():
    starts = starts_of(256).expand(4, -1)
    rows = training_blocks(config(scope="row", shared=True), starts, key=1, row=8)
    assert (rows == rows[:1]).all()
    assert torch.equal(rows[:1], training_blocks(config(scope="row", shared=True), starts[:1], key=1, row=0))
    assert len({tuple(row.tolist()) for row in training_blocks(config(scope="row"), starts, key=1)}) == 4


def test_micro_batches_and_processes_change_no_partition(small_corpus):
    recipe = load("double_decoder/tiny", [*small_corpus, "batch.rows=4", "batch.micro_batches=2", "budget=2 steps"])
    run = Run(recipe, prepared(recipe))
    parts = run.batches(1)
    assert [batch.row for batch in parts] == [0, 2]
    tokens, starts = (torch.cat([getattr(batch, name) for batch in parts]) for name in ("tokens", "starts"))
    whole = replace(parts[0], tokens=tokens, starts=starts)
    found = torch.cat([run.network.partition(batch) for batch in parts])
    assert torch.equal(found, run.network.partition(whole))


def prepared(recipe):
    from tandem.corpus import prepare

    return prepare(recipe.corpus)


@pytest.mark.parametrize("align", [64, 128])
def test_aligned_splits_stand_at_tiles(align):
    starts = starts_of(900, 1148)
    for key in range(20):
        for given in (config(align=align), config(align=align, scope="row")):
            found = splits_of(training_blocks(given, starts, key)[0], starts[0])
            assert found and all(split % align == 0 for split in found)


def test_context_begins_at_the_latest_where_it_must():
    starts = starts_of(500, 3, 1545)
    for key in range(50):
        found = splits_of(training_blocks(config(min_context=20), starts, key)[0], starts[0])
        assert min(found) <= 20 and min(split for split in found if split > 503) <= 523
        drawn = splits_of(training_blocks(config(), starts, key)[0], starts[0])
        assert {s for s in found if s not in (20, 523)} <= set(drawn)
        row = config(scope="row", shared=True)
        found = splits_of(training_blocks(row.model_copy(update={"min_context": 20}), starts, key)[0], starts[0])
        assert min(found) <= 20 and min(split for split in found if split > 503) <= 523
        assert set(found) - {20, 523} <= set(splits_of(training_blocks(row, starts, key)[0], starts[0]))


def test_every_token_and_single():
    starts = starts_of(7, 5)
    assert training_blocks(config(strategy="every_token"), starts, 0)[0].tolist() == list(range(12))
    assert training_blocks(config(strategy="single"), starts, 0).tolist() == starts.tolist()


def test_blocks_of_a_score_know_nothing_of_the_text_to_come():
    """Neither tokens behind the first nor the length of the document; nor where in which row it lies."""
    tokens = torch.randint(100, (1, 300), generator=torch.Generator().manual_seed(0))
    whole = scoring_blocks(config(), starts_of(300), tokens, T, 0)
    assert len(splits_of(whole[0], torch.zeros(300))) >= 1
    for n in (1, 2, 50, 299):
        changed = torch.cat((tokens[:, :1], tokens[:, 1:n].flip(1)), dim=1)
        cut = scoring_blocks(config(), starts_of(n), changed, T, 0)
        assert torch.equal(cut, whole[:, :n])
    behind = scoring_blocks(config(), starts_of(11, 300), torch.cat((tokens[:, :11], tokens), dim=1), T, 0)
    assert torch.equal(behind[:, 11:] - 11, whole)
    others = [scoring_blocks(config(), starts_of(T), torch.full((1, T), first), T, number).tolist()
              for first in (1, 2) for number in (0, 1)]  # fmt: skip
    assert len(set(map(str, others))) == 4


def test_a_prompt_is_one_boundary_at_its_last_token():
    starts = starts_of(4, 6)
    assert prompt_blocks(starts, 3)[0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 6, 6]
    assert torch.equal(prompt_blocks(starts, 1), starts)
    lengths = torch.tensor([[2] * 4 + [5] * 6])
    assert prompt_blocks(starts, lengths)[0].tolist() == [0, 1, 1, 1, 4, 4, 4, 4, 8, 8]


def test_documents_of_a_row_are_those_of_more_than_a_position():
    assert list(documents(torch.tensor([0, 0, 2, 3, 3, 3]))) == [(0, 2), (3, 6)]
    assert list(documents(torch.tensor([0]))) == []


def test_a_shared_partition_of_documents_is_refused():
    with pytest.raises(ValueError, match="take scope: row"):
        PartitionConfig(shared=True)


def test_pairs_are_a_triangle_whatever_the_partition():
    generator = np.random.default_rng(0)
    for _ in range(100):
        n = int(generator.integers(5, 200))
        starts = starts_of(n, int(generator.integers(1, 60)))
        blocks = training_blocks(config(), starts, int(generator.integers(1 << 40)))
        spans = block_spans(starts, blocks, sink=False)
        pairs = sum(int((span.hi - span.lo).sum()) for span in spans)
        assert pairs == sum(m * (m + 1) // 2 for m in (n, starts.shape[1] - n))


@pytest.mark.parametrize(("align", "most", "most_whole"), [(1, 0.59, 0.64), (128, 0.54, 0.54)])
def test_executed_pairs(align, most, most_whole):
    """On average over 50 drawn partitions, in tiles and in whole blocks; benchmarks/double_decoder.py counts 1,000."""
    starts, visited, whole = starts_of(T), 0, 0
    for key in range(50):
        spans = block_spans(starts, training_blocks(config(align=align, scope="row"), starts, key), sink=False)
        visited += plan_attention(spans, [T, T], most=TILE).tiled_pairs
        edges = [[span.lo for span in spans], [span.hi for span in spans]]
        lo, hi = (torch.stack(bounds, dim=1)[:, :, None].numpy() for bounds in edges)
        mask = flex.plan(lo, hi, [T, T], torch.device("cpu")).mask
        whole += flex.BLOCK**2 * int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert 0.5 * T * (T + 1) <= visited / 50 <= most * T * T
    assert 0.53 * T * T <= whole / 50 <= most_whole * T * T


def test_a_draw_without_room_is_empty():
    generator = np.random.default_rng(0)
    assert draw_splits(generator, range(1, 1), 7).tolist() == []
    assert draw_splits(generator, range(3, 9), 0).tolist() == []
