"""The built-in corpus: the English inside the Python that Tandem stands on.

A first run should need no data and no network, and yet read like language. Every installation of Tandem carries
megabytes of technical English: the docstrings of the standard library and of the packages that Tandem requires, and
the Python reference behind `help()`. They are parsed with `ast`, never imported, and filtered to paragraphs of
sentences:

    def add(x, y):
        '''Add the two terms element by element. ->  Add the two terms element by element.

        Parameters                                (names, types, examples, directives, code: dropped)
        ----------
        x : array_like
            The first of the two terms.           ->  The first of the two terms.

        Notes
        -----
        The output has the :term:`dtype` that     ->  The output has the dtype that both promote to.
        both promote to.'''

One module is one document, its paragraphs in source order; a paragraph met before, in any module, is dropped.
Text and order depend on the installed versions only.
Cost: 20 s on one core for 7 MB, nearly all of it parsing.
"""

import ast
import functools
import gc
import importlib.metadata
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

REQUIREMENTS = ("torch", "numpy", "pydantic", "pyyaml", "typer", "rich", "tokenizers", "safetensors")
"""What Tandem requires, for a checkout that is run without having been installed."""

SKIPPED = {"test", "tests", "testing", "_vendor", "_bundled", "site-packages", "dist-packages", "encodings"} | {
    *("idlelib", "lib2to3", "turtledemo"),
}
"""Folders whose docstrings say little, or say what others say."""

MIN_STRINGS = 400
"""Bytes of triple-quoted text below which a module is not parsed."""
MIN_DOCUMENT = 200
"""Characters of prose below which a module gives no document."""

_TRIPLE_QUOTED = re.compile(rb"(\"\"\"|''')(.*?)\1", re.DOTALL)


class Builtin:
    """The built-in corpus as a source (sources.py); sizes count bytes of source code."""

    name = "builtin"
    shards = 1
    state = ""

    def __init__(self) -> None:
        self.distributions = required_distributions()
        self._documents: list[tuple[str, int]] = []

    @property
    def identity(self) -> str:
        """The installed versions, and this file, which decides what is taken from them."""
        versions = sorted(f"{d.metadata['Name']} {d.version}" for d in self.distributions)
        return f"{Path(__file__).read_text('utf-8')} Python {sys.version.split()[0]} {versions}"

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.modules)

    @functools.cached_property
    def modules(self) -> list[Path]:
        """The standard library first, then all else, by names that do not depend on where they are installed."""
        library = Path(sysconfig.get_path("stdlib"))
        found = {(0, path.relative_to(library)): path for path in library.rglob("*.py")}
        for distribution in self.distributions:
            for file in distribution.files or []:
                if file.suffix == ".py":
                    found[1, Path(file)] = Path(str(distribution.locate_file(file)))
        return [found[key] for key in sorted(found) if not SKIPPED & set(key[1].parts) and found[key].is_file()]

    def check(self) -> None:
        """There is nothing that it could miss."""

    def read(self, shard: int = 0) -> Iterator[tuple[str, int]]:
        """Yields (document, bytes of source code read so far). The second time it has them all."""
        if self._documents:
            yield from self._documents
            return
        documents, seen, done = [], set(), 0
        for path in self.modules:
            done += path.stat().st_size
            fresh = [p for d in docstrings(path) for p in paragraphs(d) if not (p in seen or seen.add(p))]
            text = "\n\n".join(fresh)
            if len(text) >= MIN_DOCUMENT:
                documents.append((text, done))
                yield text, done
        self._documents = documents


def required_distributions() -> list[importlib.metadata.Distribution]:
    """Tandem's requirements and theirs in turn, extras left out, as far as they are installed here."""
    try:
        todo = importlib.metadata.requires("tandem-lm") or []
    except importlib.metadata.PackageNotFoundError:
        todo = list(REQUIREMENTS)
    found: dict[str, importlib.metadata.Distribution] = {}
    while todo:
        requirement = todo.pop()
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key not in found and not re.search(r";.*\bextra\b", requirement):
            try:
                found[key] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # required on another platform or Python only
            todo += found[key].requires or []
    return list(found.values())


def docstrings(path: Path) -> list[str]:
    """The documentation in a module, in source order: docstrings, `add_docstr(f, "...")`, the topics of `help()`."""
    source = path.read_bytes()
    is_topics = path.parts[-2:] == ("pydoc_data", "topics.py")
    if not is_topics and sum(len(m[2]) for m in _TRIPLE_QUOTED.finditer(source)) < MIN_STRINGS:
        return []
    collects = gc.isenabled()
    gc.disable()  # a tree has no cycles, and looking for them takes twice as long as parsing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            return [text for text in _documentation(ast.parse(source), is_topics) if isinstance(text, str)]
    except (SyntaxError, ValueError):
        return []  # a template, or code for another Python
    finally:
        if collects:
            gc.enable()


def _documentation(node: ast.AST, is_topics: bool) -> Iterator[object]:
    match node:
        case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            yield ast.get_docstring(node, clean=False)
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args)) if "doc" in name:
            yield from (arg.value for arg in args if isinstance(arg, ast.Constant))
        case ast.Assign(value=ast.Dict(values=topics)) if is_topics:
            yield from (topic.value for topic in topics if isinstance(topic, ast.Constant))
    for child in getattr(node, "body", []):
        if isinstance(child, ast.stmt):
            yield from _documentation(child, is_topics)


# ---- from a docstring to paragraphs

_TABLE = (  # sections that describe names one by one: the names go, what is said of them stays
    r"(?:(?:other|keyword|constructor|side) )?(?:param(?:eter)?s?|arguments?|args|kwargs|returns?|yields?|raises|"
    r"receives|warns|attributes?|keys|inputs?|outputs?|properties|fields|effects?|options)(?: \(.*\))?"
)
_DROPPED = r"(?:see also|references?|examples?|methods?|shapes?|usage|signature|todo|tests?|authors?|literature)"
_UNDERLINE = r"\1([-=~^\"*#+`'._])\2{2,}[ ]*\n"
_UP_TO_THE_NEXT = rf"((?:(?!\1\S.*\n{_UNDERLINE}).*\n)*)"
_INDENTED = r"((?:\1 +\S.*\n|[ ]*\n)*)"  # what belongs to a line of indentation \1


def _without_names(section: re.Match[str]) -> str:
    """Lines of a numpy section as deep as its heading are names and types."""
    return "\n" + re.sub(rf"^{section[1]}\S.*\n", "\n", section[3], flags=re.MULTILINE)


def _without_labels(section: re.Match[str]) -> str:
    """Items below `Args:` begin with `name (type): `."""
    return "\n" + re.sub(r"^[ ]+[*`]*\w[\w.`*]*(?: \([^\n]*?\))?: *", "\n", section[2], flags=re.MULTILINE)


_BLOCKS = [(re.compile(pattern, re.MULTILINE | re.IGNORECASE), replaced) for pattern, replaced in (
    (rf"^([ ]*){_DROPPED}\n{_UNDERLINE}{_UP_TO_THE_NEXT}", "\n"),
    (rf"^([ ]*){_TABLE}\n{_UNDERLINE}{_UP_TO_THE_NEXT}", _without_names),
    (rf"^([ ]*)\S.*\n{_UNDERLINE}", "\n"),                                       # other headings
    (rf"^([ ]*)(?:\*\*)?{_DROPPED}(?:\*\*)?::?(?:\*\*)?[ ]*\n{_INDENTED}", "\n"),
    (rf"^([ ]*)(?:\*\*)?{_TABLE}(?:\*\*)?::?(?:\*\*)?[ ]*\n{_INDENTED}", _without_labels),
    (r"^[ ]*(?::\w[^:`\n]*:(?!`)|@\w+\b)", "\n"),                                # :param x: ...
    (rf"^([ ]*)\.\.(?! ?(?:note|warning|important|tip|hint)::)(?:[ ].*)?\n{_INDENTED}", "\n"),  # comments, directives
    (r"^[ ]*\.\. ?\w+::", "\n"),                                                 # but for those whose body is prose
    (r"::[ ]*\n(?=\n([ ]+))(?:\1.*\n|[ ]*\n)*", ":\n\n"),                        # literal blocks
    (r"^[ ]*(?:>>>?|\$|In \[\d+\]).*\n(?:[ ]*\S.*\n)*", "\n"),                    # sessions, up to the blank line
    (r"^[ ]*(?:[-*+\u2022]|\(?(?:\d{1,2}|[a-z])[.)])[ ]+(?=\S)", "\n"),            # bullets: each item by itself
)]  # fmt: skip

_INLINE = [(re.compile(pattern), replaced) for pattern, replaced in (
    (r":[\w:+-]+:(?=`)", ""),                                                     # :class:`Name` -> `Name`
    (r"`~[\w.]*\.(\w+)`", r"\1"),                                                # `~package.Name` -> Name
    (r"`([^`<]+?)\s*<[^`>]*>`_*", r"\1"),                                        # `text <link>`_ -> text
    (r"``?([^`]+)``?_*|\|(\w+)\||\$([^$]+)\$", r"\1\2\3"),                      # ``code``, |name|, $math$
    (r"\[([^\]]+)\]\([^)]*\)", r"\1"),                                           # [text](link) -> text
    (r"(\[[\w, ]+\])_", r"\1"),                                                   # [1]_ -> [1]
    (r"(?<![\w*])\*\*?([^*\s](?:[^*]*[^*\s])?)\*\*?(?![\w*])", r"\1"),           # *emphasis*, **bold**
)]  # fmt: skip
_MARKUP = re.compile(r"[`*$|\]]")
_UNFINISHED = re.compile(r"(?<=[.!?]) [^.!?]*[^.!?)\"']$")

_WORD = re.compile(r"[\"'(]*[A-Za-z](?:[\w'’-]|[./](?=\w))*(?:\(\))?[)\"']*[.,;:!?]*[)\"']*$|\d[\d.,]*$|--?$")
_PLAIN = re.compile(r"[\"'(]*[A-Za-z][a-z]*(?:['’-][a-z]+)*[)\"']*[.,;:!?]*[)\"']*$")
_FUNCTION_WORDS = frozenset(
    "the a an of to is are was and or in that this these be it its for with as by if not no from on at can will may "  # noqa: SIM905
    "which when each all one has have does do than into they you we such".split()
)


def paragraphs(docstring: str) -> Iterator[str]:
    """The paragraphs of English prose in a docstring, unwrapped, their markup removed."""
    text = inspect.cleandoc(docstring).expandtabs() + "\n\n"
    for pattern, replaced in _BLOCKS if "\n" in docstring else ():
        text = pattern.sub(replaced, text)
    for block in re.split(r"\n\s*\n", text):
        for pattern, replaced in _INLINE if _MARKUP.search(block) else ():
            block = pattern.sub(replaced, block)
        block = " ".join(block.split())
        block = _UNFINISHED.sub("", block)
        if is_prose(block):
            yield block


def is_prose(text: str) -> bool:
    """Whole sentences: a capital first, a full stop last, plain words nearly throughout, function words among them."""
    words = text.split()
    if len(words) < 5 or "\\" in text or not re.match(r"[\"'(]?[A-Z]", text) or not re.search(r"[.!?][)\"']*$", text):
        return False
    share = lambda accepted: sum(map(bool, map(accepted, words))) / len(words)
    return (
        share(_WORD.match) >= 0.9
        and share(_PLAIN.match) >= 0.75
        and share(lambda word: word.lower() in _FUNCTION_WORDS) >= 0.1
    )
