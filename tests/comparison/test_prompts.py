"""Prompts from files and standard input; texts and JSON lines come in their order, as they are ready."""

import json

import pytest
from typed import tandem

from tandem.comparison.prompts import print_records, print_texts, read_prompts
from tandem.generation.generate import Piece
from tandem.recipe import UserError

PIECES = [
    Piece(1, " x", 1, ""),
    Piece(0, " a", 1, ""),
    Piece(1, " y", 2, "document"),
    Piece(2, " q", 1, "length", 2),
    Piece(0, " b", 2, ""),
    Piece(0, "", 3, "document"),
]


@pytest.mark.parametrize(
    ("show", "after_each"),
    [
        (print_texts, ["A", "A a", "A a", "A a", "A a b", "A a b\n\nB x y\n\nC q\n"]),
        (print_records, [0, 0, 0, 0, 0, 3]),
    ],
)
def test_what_is_shown_at_once_and_what_waits_for_its_turn(capsys, show, after_each):
    seen = ""

    def pieces():
        nonlocal seen
        for piece, expected in zip(PIECES, [None, *after_each[:-1]], strict=True):
            seen += capsys.readouterr().out
            if expected is not None:
                assert (seen if isinstance(expected, str) else seen.count("\n")) == expected
            yield piece

    prompts = ["A", "B", "C"]
    if show is print_records:
        print_records([{"prompt": prompt, "id": {"of": prompt}} for prompt in prompts], pieces())
    else:
        print_texts(prompts, pieces())
    seen += capsys.readouterr().out
    assert (seen if isinstance(after_each[-1], str) else seen.count("\n")) == after_each[-1]
    if show is print_records:
        assert [json.loads(line) for line in seen.splitlines()] == [
            {"prompt": "A", "id": {"of": "A"}, "text": " a b", "tokens": 3, "end": "document"},
            {"prompt": "B", "id": {"of": "B"}, "text": " x y", "tokens": 2, "end": "document"},
            {"prompt": "C", "id": {"of": "C"}, "text": " q", "tokens": 1, "end": "length", "closed_by_force": 2},
        ]


def test_the_same_texts_come_from_arguments_a_file_and_standard_input(trained, tmp_path):
    prompts = ["The cat", "A naïve bird", "House and"]
    (tmp_path / "prompts.txt").write_bytes("The cat\r\n\nA naïve bird\nHouse and".encode())
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    records = (tmp_path / "prompts.jsonl").read_bytes()
    options = ["--tokens", 5, "--seed", 3, "--json"]
    expected = tandem("generate", trained, *prompts, *options)
    assert expected.exit_code == 0, expected.output
    found = [json.loads(line) for line in expected.stdout.splitlines()]
    assert expected.stdout.isascii()  # so that it is JSON whatever the terminal's characters are
    assert [record["prompt"] for record in found] == prompts and all(record["text"] for record in found)
    for given in (["--file", tmp_path / "prompts.txt"], ["--file", tmp_path / "prompts.jsonl", "--rows", 2]):
        assert tandem("generate", trained, *given, *options).stdout == expected.stdout
    assert tandem("generate", trained, "--file", "-", *options, given=records).stdout == expected.stdout
    plain = tandem("generate", trained, "--file", "-", *options[:-1], given=(tmp_path / "prompts.txt").read_bytes())
    assert plain.stdout == "\n\n".join(record["prompt"] + record["text"] for record in found) + "\n"


def test_a_prompt_of_json_lines_may_have_several_lines_and_keeps_its_other_keys(trained, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The cat\\nsees", "id": 7}\n')
    done = tandem("generate", trained, "--file", tmp_path / "prompts.jsonl", "--json", "--tokens", 2)
    record = json.loads(done.stdout)
    assert record["prompt"] == "The cat\nsees" and record["id"] == 7 and record["tokens"] == 2


def test_a_key_of_a_prompt_that_json_lines_write_is_refused(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once", "id": 1}\n{"prompt": "Twice", "end": 3, "text": "upon"}\n')
    with pytest.raises(UserError, match=r"prompts.jsonl:2: text, end: --json writes what is generated there; rename"):
        read_prompts(str(file), as_json=True)
    assert [record["prompt"] for record in read_prompts(str(file), as_json=False)] == ["Once", "Twice"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "absent.txt': No such file or directory; name a file that can be read"),
        ("empty.txt", b"\n \n", "empty.txt: holds no prompt; write one a line"),
        ("bad.txt", b"fine\n\xff\n", "bad.txt:2: not UTF-8"),
        ("bad.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "bad.jsonl:2: not a JSON line"),
        ("bad.jsonl", b'{"text": "a"}\n', 'bad.jsonl:1: no text "prompt" in it'),
        ("bad.jsonl", b"[" * 100_000, "bad.jsonl:1: not a JSON line"),
        ("bad.jsonl", b'{"prompt": 3}\n', 'bad.jsonl:1: no text "prompt" in it'),
        ("bad.jsonl", b'{"prompt": "\\ud800"}\n', 'bad.jsonl:1: "prompt" is not Unicode text (surrogates not allowed)'),
        *(
            (name, b"", f"{name}: unknown kind of file; name one that ends in .jsonl")
            for name in ("a.JSONL", "a.jsonl.gz", "a.json")
        ),
    ],
)
def test_a_file_that_can_not_be_read_is_told(trained, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = tandem("generate", trained, "--file", tmp_path / name)
    assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr, done.output
    assert not done.stdout


def test_prompts_and_a_file_together_are_refused(trained, tmp_path):
    done = tandem("generate", trained, "The", "--file", tmp_path / "x.txt")
    assert done.exit_code == 2 and "give the one or the others" in done.stderr
    done = tandem("generate", trained, "--file", "-", given=b"")
    assert done.exit_code == 2 and "standard input: holds no prompt" in done.stderr


def test_the_mark_of_an_editor_is_no_part_of_a_prompt(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfOnce\r\n\r\nTwice\r\n")
    (tmp_path / "prompts.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "Once"}\r\n{"prompt": "Twice"}')
    for name in ("prompts.txt", "prompts.jsonl"):
        found = read_prompts(str(tmp_path / name), as_json=False)
        assert found == [{"prompt": "Once"}, {"prompt": "Twice"}]
