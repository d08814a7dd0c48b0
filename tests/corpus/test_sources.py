"""Sources stream documents in a fixed order and name file and line of what they cannot read."""

import gzip
import os
import re

import pytest
from pydantic import ValidationError

from tandem.corpus import Corpus
from tandem.corpus.sources import File, find_sources
from tandem.recipe import UserError


def texts_of(*names, field="text"):
    return [text for source in find_sources("corpus.texts", list(map(str, names)), field) for text, _ in source.read()]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes("first\r\nünd".encode())
    (tmp_path / "b" / "c.md").write_text("third", encoding="utf-8")
    (tmp_path / "b" / "blank.txt").write_text(" \n")
    (tmp_path / "ignored.png").write_bytes(b"\x89")
    with gzip.open(tmp_path / "b" / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "second", "body": "other"}\n\n{"text": "", "body": "one"}\n')
    return tmp_path


def test_folders_globs_and_files_yield_their_documents_in_order(folder):
    assert texts_of(folder) == ["first\r\nünd", "second", "third"]
    assert texts_of(folder / "b" / "*.md", folder / "a.txt") == ["third", "first\r\nünd"]
    assert texts_of(folder / "**" / "*.jsonl.gz", field="body") == ["other", "one"]


def test_texts_may_have_their_fields_by_several_names(folder):
    (folder / "d.jsonl").write_text('{"content": "fourth"}\n{"content": "not this", "text": "but this"}\n')
    fields = ["none", "text", "content"]
    assert texts_of(folder, field=fields) == ["first\r\nünd", "second", "third", "fourth", "but this"]
    found = re.escape('no field "none" or "body" in it (found: content); corpus.field names it, several as a list')
    with pytest.raises(UserError, match=f"d.jsonl:1: {found}"):
        texts_of(folder / "d.jsonl", field=["none", "body"])
    with pytest.raises(ValidationError, match="at least 1"):
        Corpus.Config(field=[])


def test_a_glob_passes_folders_over_and_a_tilde_is_the_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "b.txt").mkdir()
    assert texts_of("~/*.txt") == texts_of(folder / "*.txt") == ["first\r\nünd"]
    assert texts_of("~/b") == ["second", "third"]


def test_a_folder_is_read_through_links_to_folders_and_without_hidden_files(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "under").mkdir()
    (elsewhere / "under" / "x.txt").write_text("linked")
    (folder / "[c]").symlink_to(elsewhere)
    (folder / "b" / "._a.txt").write_text("of another system")
    assert texts_of(folder) == texts_of(folder / "**" / "*.[tmj]*") == ["linked", "first\r\nünd", "second", "third"]
    assert texts_of(folder / "[c]") == ["linked"]


@pytest.mark.parametrize("name", ["d.txt", "folder"])
def test_a_link_to_nothing_is_told_not_left_out(folder, name):
    (folder / "picture.png").symlink_to(folder / "gone.png")
    assert texts_of(folder) == ["first\r\nünd", "second", "third"]
    (folder / "b" / name).symlink_to(folder / "gone")
    for texts in folder, folder / "b" / f"{name[:3]}*":
        with pytest.raises(UserError, match=rf'corpus.texts: ".*b/{name}" is a link to .*gone, which is not there'):
            texts_of(texts)
    assert texts_of(folder / "b" / "*.md") == ["third"]


def test_progress_ends_at_the_size_of_the_source(folder):
    for source in find_sources("corpus.texts", [str(folder)], "text"):
        done = [done for _, done in source.read()]
        assert done == sorted(done) and all(0 < d <= source.size for d in done)
    lines = folder / "many.jsonl"
    lines.write_text('{"text": "x"}\n' * 1000)
    done = [done for _, done in File(lines, ("text",)).read()]
    assert done[0] == 14 and done[-1] == lines.stat().st_size


def test_the_identity_of_a_file_changes_with_its_contents_and_its_field(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")
    identities = [File(path, ("text",)).identity, File(path, ("body",)).identity]
    path.write_text("[]\n")
    os.utime(path, ns=(0, 1))
    identities.append(File(path, ("text",)).identity)
    path.write_text("[1]\n")
    os.utime(path, ns=(0, 1))
    assert len({*identities, File(path, ("text",)).identity}) == 4
    assert File(path, ("text",)).identity == File(path, ("text",)).identity


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfmarked")
    assert texts_of(tmp_path / "x.txt") == ["marked"]


def test_documents_are_streamed(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\nbad\n')
    assert next(File(path, ("text",)).read())[0] == "good"  # the second line was not looked at


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{nope}", "not a JSON line"),
        (b'{"body": "x", "id": 1}', 'no field "text" in it (found: body, id)'),
        (b'{"x": ' + b"[" * 100_000, "not a JSON line"),
        (b'["x"]', 'no field "text" in it (found: list)'),
        (b'{"text": 7}', 'field "text" holds 7, not a text; leave it out'),
        (b'{"text": "\xff"}', "not a JSON line"),
        (b'{"text": "\\ud800"}', "not Unicode"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "x"}\n' + line + b"\n")
    with pytest.raises(UserError) as error:
        texts_of(path)
    assert f"{path}:2: " in str(error.value) and said in str(error.value)


def test_a_byte_that_is_not_utf8_is_named_by_its_line(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(UserError, match=r"x\.txt:3: not UTF-8"):
        texts_of(path)


def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"plain text")
    with pytest.raises(UserError, match="damaged after line 0"):
        texts_of(path)


def test_an_unknown_kind_or_place_names_what_is_allowed(folder):
    for name in (folder / "ignored.png", folder / "*.png"):
        with pytest.raises(UserError, match=r'unknown kind of file "\.png"; allowed are "builtin", \.txt'):
            texts_of(name)
    (folder / "empty").mkdir()
    for name in (folder / "nowhere", folder / "*.jsonl", folder / "empty"):
        with pytest.raises(UserError, match="no such text found; allowed are"):
            texts_of(name)
    for names in ([], [""], [" "]):
        with pytest.raises(UserError, match="names no text"):
            texts_of(*names)


def test_a_relative_path_that_names_nothing_is_told_with_its_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "b")
    with pytest.raises(UserError, match=f"no such text found in {folder / 'b'}, where this command runs; allowed"):
        texts_of("a.txt")
