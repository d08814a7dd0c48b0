"""A store gives back the documents written, and refuses to be anything else."""

import json
import mmap
import os
import resource

import numpy as np
import pytest

from tandem.corpus import BoundaryRows, FoldedRows, Order, PackedRows, Segmentation, SentenceStreams, Streams
from tandem.corpus import store as module
from tandem.corpus.store import Store, StoreWriter, fingerprint
from tandem.corpus.tokenizer import Tokenizer
from tandem.recipe import UserError


def test_documents_come_back_with_their_end_and_their_bytes(store_of):
    store = store_of([3, 1, 5])
    assert len(store) == 3 and store.lengths.tolist() == [3, 1, 5]
    assert store.document(1).tolist() == [256]
    assert store.document(2)[:-1].tolist() == np.random.default_rng(2).integers(0, 256, 4).tolist()
    assert store.token_bytes.tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 0]
    assert store.manifest.bytes == 6 and store.tokens.dtype == np.uint16
    assert store.tokenizer.hash == Tokenizer.of_bytes().hash
    assert not store.tokens.flags.writeable
    store.verify()


def test_batches_of_appending_leave_no_trace(tmp_path, store_of):
    writer = StoreWriter(tmp_path / "again", Tokenizer.of_bytes())
    for i, n in enumerate([3, 1, 5]):
        writer.append([np.random.default_rng(i).integers(0, 256, n - 1)], [np.ones(n - 1, int)])
    writer.close([])
    assert Store(tmp_path / "again").fingerprint == store_of([3, 1, 5]).fingerprint != store_of([3, 5, 1]).fingerprint


def test_a_vocabulary_beyond_two_bytes_takes_four(tmp_path):
    tokenizer = Tokenizer.of_bytes()
    tokenizer.vocabulary = (1 << 16) + 1
    writer = StoreWriter(tmp_path / "wide", tokenizer)
    writer.append([np.array([1 << 16])], [np.array([65535])])
    writer.close([])
    store = Store(tmp_path / "wide")
    assert store.tokens.dtype == np.uint32 and store.tokens.tolist() == [1 << 16, 256]
    assert store.token_bytes[0] == 65535
    store.verify()
    with pytest.raises(UserError, match="65536 bytes of text"):
        writer.append([np.array([1])], [np.array([65536])])


@pytest.mark.parametrize("file", ["tokens.bin", "token_bytes.bin", "offsets.bin", "tokenizer.json", "manifest.json"])
def test_a_file_cut_short_or_missing_is_refused_at_once(store_of, file):
    folder = store_of([3, 4]).folder
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:-2])
    with pytest.raises(UserError, match=f"{folder} is not a usable corpus store: {file}"):
        Store(folder)
    (folder / file).unlink()
    with pytest.raises(UserError, match=f"not a usable corpus store: {file}"):
        Store(folder)


@pytest.mark.parametrize(
    ("other", "said"),
    [({"format": 99}, "its format is 99, this Tandem reads 2"), ({"dtype": "uint99"}, "should match pattern")],
)
def test_another_format_is_refused_at_once(store_of, other, said):
    folder = store_of([3, 4]).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | other))
    with pytest.raises(UserError, match=said):
        Store(folder)


@pytest.mark.parametrize("file", ["tokens.bin", "token_bytes.bin", "offsets.bin"])
def test_a_changed_byte_is_found_by_verify(store_of, file):
    folder = store_of([3, 4]).folder
    data = bytearray((folder / file).read_bytes())
    data[2] ^= 1
    (folder / file).write_bytes(data)
    with pytest.raises(
        UserError, match=f"contents have changed since .*; delete {folder.parent} and prepare the corpus again"
    ):
        Store(folder).verify()


def written(tmp_path, ids, vocabulary=257):
    tokenizer = Tokenizer.of_bytes()
    tokenizer.vocabulary = vocabulary
    writer = StoreWriter(tmp_path / "bad", tokenizer)
    writer.append([np.array(ids)], [np.ones(len(ids), int)])
    writer.close([])
    return Store(tmp_path / "bad")


def test_ids_that_no_text_can_contain_are_found_by_verify(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    with pytest.raises(UserError, match="it holds id 257, but its vocabulary ends at 256"):
        written(tmp_path, [1, 257, 2]).verify()


def test_a_document_end_inside_a_document_is_found_by_verify(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    with pytest.raises(UserError, match="id 256 is not the end of every document and nothing else"):
        written(tmp_path, [1, 2, 256, 3]).verify()


def test_a_document_end_in_the_wrong_place_is_found_by_verify(store_of):
    folder = store_of([3, 4]).folder
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    tokens[[1, 2]] = tokens[[2, 1]]  # as many ends as documents
    tokens.tofile(folder / "tokens.bin")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": fingerprint(folder)}))
    with pytest.raises(UserError, match="id 256 is not the end of every document and nothing else"):
        Store(folder).verify()


@pytest.mark.parametrize(
    "view",
    [
        lambda store: PackedRows(store, 1, 16, 512),
        lambda store: FoldedRows(Order(store, 1), 16, 128, bag=4, slots=4),
        lambda store: BoundaryRows(store, 1, 16, 512),
        lambda store: SentenceStreams(store, 1, 16, 512, Streams()),
    ],
    ids=["packed", "folded", "boundaries", "streams"],
)
def test_what_a_batch_reads_is_asked_of_the_disk_at_once(store_of, monkeypatch, view):
    """Major faults are reads that the process waits for, one by one."""
    store = store_of([2100] * 2000)
    store.segmentation = Segmentation(splitter="every", every=64)
    rows = view(store)
    rows.batch(0)  # opens what is kept in memory
    store.tokens.base.madvise(mmap.MADV_RANDOM)  # nothing is read ahead

    def faults(step):
        with (store.folder / "tokens.bin").open("rb") as file:  # out of memory
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        rows.batch(step)
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before

    found = sum(faults(step) for step in range(1, 9))
    monkeypatch.setattr(Store, "fetch", lambda *_: None)
    without = sum(faults(step) for step in range(9, 17))
    if without < 8:
        pytest.skip("nothing can be taken out of this system's memory")
    assert found <= without / 4
