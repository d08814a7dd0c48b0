"""Every kind of file yields the same documents, streamed, and what is wrong with one is told by file and row."""

import gzip
import json
import sys

import pytest

from tandem.corpus.files import File, is_title
from tandem.recipe import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"Document {i} says é{'x' * (i % 37)}." for i in range(3000)]
LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


def write_parquet(path, texts=TEXTS, **more):
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, path, row_group_size=700, **more)


WRITERS = {
    "x.jsonl": lambda path: path.write_bytes(LINES),
    "marked.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n")),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "x.jsonl.zst": lambda path: path.write_bytes(zstd(LINES)),
    "two-frames.jsonl.zst": lambda path: path.write_bytes(zstd(LINES[:70_000]) + zstd(LINES[70_000:])),
    "x.parquet": write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_yields_the_same_documents(tmp_path, name):
    file = File(tmp_path / name, ("text",))
    WRITERS[name](file.path)
    file.check()
    found = list(file.read())
    assert [text for text, _ in found] == TEXTS
    done = [done for _, done in found]
    assert done == sorted(done) and 0 < done[0] <= done[-1] == file.size


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_file_cut_short_is_refused(tmp_path, name, kept):
    file = File(tmp_path / name, ("text",))
    WRITERS[name](file.path)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(
        UserError, match=rf"{name}: (damaged after line \d+|not a parquet file, or cut short) .*fetch it"
    ):
        list(file.read())


def test_a_page_that_is_damaged_inside_is_told_by_its_row(tmp_path):
    file = File(tmp_path / "x.parquet", ("text",))
    write_parquet(file.path, compression="zstd", use_dictionary=False)
    group = parquet.ParquetFile(file.path).metadata.row_group(2).column(1)
    data = bytearray(file.path.read_bytes())
    middle = group.data_page_offset + group.total_compressed_size // 2
    data[middle : middle + 40] = bytes(40)
    file.path.write_bytes(data)
    with pytest.raises(UserError, match=r"x\.parquet: damaged after row \d+ \(.*fetch it again") as error:
        list(file.read())
    assert 1000 < int(str(error.value).split("after row ")[1].split()[0]) <= 2100


@pytest.mark.parametrize(
    ("texts", "said"),
    [(["a", None, "b"], "row 2: .* holds null, not a text"), ([7, 8], 'row 1: column "text" holds 7, not a text')],
)
def test_a_row_without_a_text_is_named(tmp_path, texts, said):
    write_parquet(tmp_path / "x.parquet", texts)
    with pytest.raises(UserError, match=rf"x\.parquet: {said}"):
        list(File(tmp_path / "x.parquet", ("text",)).read())


def test_a_column_that_is_not_there_is_named_with_those_that_are_before_anything_is_read(tmp_path):
    write_parquet(tmp_path / "x.parquet")
    with pytest.raises(
        UserError, match=r'x\.parquet: no column "body" in it \(found: id, text\); corpus\.field names it'
    ):
        File(tmp_path / "x.parquet", ("body",)).check()


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl.zst"])
def test_a_missing_extra_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch, name):
    WRITERS[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pyarrow is not installed; pip install 'tandem-lm\[text\]'"):
        File(tmp_path / name, ("text",)).check()


def test_a_list_of_texts_is_a_document_in_sentences(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": ["One. ", "Two."]}\n{"text": [" ", ""]}\n{"text": ["a", 1]}\n')
    documents = File(tmp_path / "x.jsonl", ("text",)).read()
    assert next(documents)[0] == ["One. ", "Two."]
    with pytest.raises(UserError, match=r'x\.jsonl:3: field "text" holds \["a", 1\], not a text'):
        next(documents)
    write_parquet(tmp_path / "x.parquet", [["One. ", "Two."]])
    assert [text for text, _ in File(tmp_path / "x.parquet", ("text",)).read()] == [["One. ", "Two."]]


@pytest.mark.parametrize(
    ("line", "opens"),
    [
        *[(" = Robert Boulter = ", True), ("=T=", True), (" = 1 2 3 = \n", True)],
        *[("= = Career = =", False), (" == X == ", False), ("= A = B =", False), ("=", False), ("==", False)],
        *[(" = = ", False), ("= x", False), (" = = = Y = = = ", False), ("", False), ("x = 3", False)],
    ],
)
def test_a_title_has_one_mark_on_each_side(line, opens):
    assert is_title(line) == opens


def test_an_article_of_wikitext_is_a_document(tmp_path):
    file = File(tmp_path / "wiki.valid.tokens", ("text",))
    file.path.write_text("junk\n = One = \n\nFirst line. \n = = Part = = \ntext\n = Two = \n\n= Empty =\nx = 3 = y\n")
    found = list(file.read())
    assert [text for text, _ in found] == [
        " = One =\n\nFirst line.\n = = Part = =\ntext",
        " = Two =\n",
        "= Empty =\nx = 3 = y",
    ]
    assert found[-1][1] == file.size > found[0][1] > 0
    file.path.write_bytes(b"\xef\xbb\xbf" + b" = One = \n = Two = \n")
    assert [text for text, _ in file.read()] == [" = One =", " = Two ="]
    file.path.write_text("no title\n")
    with pytest.raises(UserError, match=r"wiki\.valid\.tokens: no line reads as the title of an article"):
        list(file.read())
