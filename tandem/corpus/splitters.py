"""Splitters: where the sentences of a text end. Each returns pieces that make up the text, one after the other.

    "Mr. Smith left. He ran.\\n\\nNobody saw."  ->  "Mr. Smith left. " | "He ran.\\n" | "\\n" | "Nobody saw."

White space may belong to either neighbour or stand alone: sentences.py gives it to the previous sentence.

    rules   pysbd, which knows abbreviations, numbers, quotes and lists; line by line, for its time grows with the
            square of the length: 0.3 MB/s a core by lines, but 6 s for 100 kB in one piece
    sat     Segment any Text (wtpsplit), the choice of Thought Gestalt's authors; weights from a folder, in ONNX, for
            wtpsplit's model in PyTorch does not run with transformers 5
"""

import functools
import importlib.metadata
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from tandem.recipe import UserError, require

LONGEST_LINE = 100_000
"""Characters. A longer line is cut by a pattern, and so is one that pysbd changes or fails on."""

SAT_FOLDER = (
    "a folder with config.json and model_optimized.onnx, such as those of segment-any-text/sat-3l-sm on the hub, and "
    "its tokenizer, made by AutoTokenizer.from_pretrained('facebookAI/xlm-roberta-base').save_pretrained(FOLDER)"
)

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)")

Pieces = tuple[list[str], int]
"""The pieces of a text, and how many of its lines were cut by the pattern."""


def version_of(splitter: str) -> str:
    """The version of the splitter's package, which decides the cuts. Raises: UserError if it is not installed."""
    package, extra = {"rules": ("pysbd", "sentences"), "sat": ("wtpsplit", "sat")}.get(splitter, ("", ""))
    if not package:
        return ""
    require(package, extra)
    return f"{package} {importlib.metadata.version(package)}"


@functools.cache
def splitter(name: str, weights: str | None, threshold: float | None) -> Callable[[Sequence[str]], Iterator[Pieces]]:
    """The function that cuts texts: "rules", or "sat" with its weights and threshold."""
    return _sat(weights or "", threshold or 0.0) if name == "sat" else _rules()


def _rules() -> Callable[[Sequence[str]], Iterator[Pieces]]:
    """Cuts with pysbd, line by line, without the white space around a line, which it would lose. A line that pysbd
    changes otherwise (it loses characters that it uses as marks, and spaces around runs of dots) or fails on (it takes
    a separator of ASCII before "1. " for a part of the number) is cut after `.`, `!` and `?` before white space
    instead."""
    segment = require("pysbd", "sentences").Segmenter(language="en", clean=False).segment

    def segmented(bare: str) -> list[str]:
        try:
            return segment(bare)
        except ValueError:
            return []

    def split(text: str) -> Pieces:
        pieces, by_pattern = [], 0
        for line in _LINE.findall(text):
            bare = line.strip()
            before, after = line.split(bare, 1) if bare else (line, "")
            found = segmented(bare) if 0 < len(bare) <= LONGEST_LINE else [bare]
            if "".join(found) != bare or len(bare) > LONGEST_LINE:
                found, by_pattern = _SENTENCE_END.split(bare), by_pattern + 1
            found[0] = before + found[0]
            found[-1] += after
            pieces += found
        return pieces, by_pattern

    return lambda texts: map(split, texts)


def _sat(folder: str, threshold: float) -> Callable[[Sequence[str]], Iterator[Pieces]]:
    """Segment any Text with the weights and the tokenizer in a folder; a sentence ends where its probability exceeds
    the threshold. Raises: UserError if the folder holds no such model, or if its pieces do not make up the text."""
    wtpsplit, _ = require("wtpsplit", "sat"), require("onnxruntime", "sat")
    try:
        model = wtpsplit.SaT(folder, tokenizer_name_or_path=folder, ort_providers=["CPUExecutionProvider"])
        list(model.split(["One. Two."], threshold=threshold))  # some of what a folder lacks shows only here
    except Exception as error:  # whatever the packages raise
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(
            f"corpus.sentences.weights = {folder} cannot be used ({type(error).__name__}: {reason}); give {SAT_FOLDER}"
        ) from error

    def split(texts: Sequence[str]) -> Iterator[Pieces]:
        for text, pieces in zip(texts, model.split(list(texts), threshold=threshold), strict=True):
            yield _with_gaps(text, pieces), 0

    return split


def _with_gaps(text: str, pieces: Iterable[str]) -> list[str]:
    """The pieces with the white space restored that was dropped between them, so that they make up the text."""
    starts, position = [], 0
    for piece in pieces:
        start = text.find(piece, position)
        if start < 0 or text[position:start].strip():
            raise UserError(f"corpus.sentences.splitter = sat: its sentences leave out text before {piece[:40]!r}")
        starts.append(start)
        position = start + len(piece)
    if text[position:].strip():
        raise UserError(f"corpus.sentences.splitter = sat: its sentences leave out {text[position:][:40]!r}")
    return [text[start:end] for start, end in itertools.pairwise([0, *starts[1:], len(text)])]
