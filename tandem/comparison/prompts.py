"""Reads prompts from a file or from standard input, and prints their continuations in the same order.

prompts.txt          a prompt a line; lines with nothing in them are left out
prompts.jsonl        {"prompt": "..."} a line, so that a prompt may hold line breaks; JSON lines keep its other keys
-                    standard input: as prompts.txt, or as prompts.jsonl where JSON lines are wanted back

On the command line, what begins as a setting does (network.depth=) is one; such a prompt can come from a file.
"""

import codecs
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tandem.corpus.files import LINES, ROWS
from tandem.generation.generate import Piece
from tandem.recipe import SECTIONS, UserError

WRITTEN = ("text", "tokens", "end", "closed_by_force")
"""Keys that `print_records` adds to those of a prompt, the last where sentences may be closed by force."""
SETTING = re.compile(rf"({'|'.join(SECTIONS)})(\.\w+)+=")


def prompts_and_settings(
    words: Sequence[str], file: str | None, as_json: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """The prompts among `words`, or else those of `file`, or else an empty one; and the settings among `words`.

    Raises: UserError as `read_prompts`, and where there are prompts in both.
    """
    settings = [word for word in words if SETTING.match(word)]
    given = [{"prompt": word} for word in words if word not in settings]
    if file is None:
        return given or [{"prompt": ""}], settings
    if given:
        raise UserError(f"--file {file}: prompts are given beside it; give the one or the others")
    return read_prompts(file, as_json), settings


def read_prompts(name: str, as_json: bool) -> list[dict[str, Any]]:
    """The prompts of a file, or of standard input where `name` is "-": each a record with "prompt" and its other keys.

    Raises: UserError naming file and line, also where JSON lines (`as_json`) would hold another value of a key.
    """
    if name.lower().endswith((*LINES, *ROWS, ".json")) and not name.endswith(".jsonl"):
        raise UserError(f"--file {name}: unknown kind of file; name one that ends in .jsonl, or write a prompt a line")
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise UserError(f"--file {name!r}: {error.strerror}; name a file that can be read") from error
    where = "standard input" if name == "-" else name
    are_records = as_json if name == "-" else name.endswith(".jsonl")
    data = data.removeprefix(codecs.BOM_UTF8)
    lines = [(f"{where}:{number}", line.rstrip(b"\r")) for number, line in enumerate(data.split(b"\n"), 1)]
    prompts = {place: _prompt(line, place, are_records) for place, line in lines if line.strip()}
    if not prompts:
        raise UserError(f"{where}: holds no prompt; write one a line")
    for place, record in prompts.items() if as_json else ():
        if taken := [key for key in WRITTEN if key in record]:
            raise UserError(f"{place}: {', '.join(taken)}: --json writes what is generated there; rename it")
    return [*prompts.values()]


def _prompt(line: bytes, place: str, is_record: bool) -> dict[str, Any]:
    try:
        text = line.decode()
        record = json.loads(text) if is_record else {"prompt": text}
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 ({error.reason}); convert the file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f'{place}: not a JSON line ({error}); each must read {{"prompt": "..."}}') from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UserError(f'{place}: no text "prompt" in it; each line must read {{"prompt": "..."}}')
    try:
        record["prompt"].encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, UTF-8 cannot
        raise UserError(f'{place}: "prompt" is not Unicode text ({error.reason}); write it anew') from error
    return record


def print_texts(prompts: Sequence[str], pieces: Iterable[Piece]) -> None:
    """Prints each prompt with its continuation, an empty line between; the first unfinished one is streamed."""
    waiting = [[prompt] for prompt in prompts]
    ended: set[int] = set()
    current = 0
    for piece in pieces:
        waiting[piece.row].append(piece.text)
        if piece.end:
            ended.add(piece.row)
        while current < len(prompts):
            print("".join(waiting[current]), end="", flush=True)
            waiting[current] = []
            if current not in ended:
                break
            current += 1
            print("\n" if current < len(prompts) else "")


def print_records(prompts: Sequence[dict[str, Any]], pieces: Iterable[Piece]) -> None:
    """Prints a JSON line for each prompt, in order, each as soon as it and all before it are finished; what else its
    record holds is kept."""
    texts, ended = ["" for _ in prompts], {}
    current = 0
    for piece in pieces:
        texts[piece.row] += piece.text
        if piece.end:
            ended[piece.row] = {"tokens": piece.tokens, "end": piece.end}
            if piece.closed_by_force is not None:
                ended[piece.row]["closed_by_force"] = piece.closed_by_force
        while current in ended:
            print(json.dumps({**prompts[current], "text": texts[current], **ended[current]}), flush=True)
            current += 1
