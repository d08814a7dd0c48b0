"""Tokenizers: text to ids and back, one class for all kinds.

Whatever its origin (trained here, GPT-2's two files, any `tokenizer.json`, plain bytes), a tokenizer answers the same
four questions: the ids of a text, the bytes of text that each covers (for bits per byte), the number of ids
that a text can contain, and the id that ends a document. Only the corpus writes the document end: a text that
spells "<|endoftext|>" is a text like any other.

    "Hi é"  ->  ids  [39, 72, 32, 195, 169]   bytes of text  [1, 1, 1, 1, 1]    ("bytes": document end 256, V 257)

Byte-level tokenizers cut the UTF-8 bytes of the text, so bytes per token are a table by id; for others they follow
from character offsets, at about a tenth of the speed.
Letters: V ids, N tokens.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import os
import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.corpus.boundaries import characters
from tandem.disk import write_durably
from tandem.recipe import UserError

DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names under which tokenizers keep their document end; the first is added to a tokenizer that has none of them."""

PROBED = string.digits + string.ascii_letters + string.punctuation + "\N{LATIN SMALL LETTER E WITH ACUTE}"
"""Characters that show what a normaliser does to case, accents, digits and punctuation."""

MARKS = " \N{LOWER ONE EIGHTH BLOCK}"
"""What normalisers write where a word begins."""

PIECE = 1 << 18
"""Characters. A longer document is encoded in pieces: the library takes over 100 bytes per token while it works."""
AT_ONCE = 1 << 22
"""Characters encoded at a time: what the library returns for them takes as much memory until it has become arrays."""

_CUT = re.compile(r"(?<=[^\W_])\n")
"""Between a letter or digit and a line break, where most byte-level pre-tokenizers also cut. If one does not, and has a
token that spans this place, documents stay whole: cutting must not change any token."""


class Tokenizer:
    """Turns texts into ids, and ids into texts.

    Attributes:
        end: the token that ends a document; no text contains it.
        eos: its id.
        ends: all names of DOCUMENT_ENDS that it has, with their ids; `end` is the first.
        is_end_added: whether the tokenizer had none of its own.
        vocabulary: V, the number of ids that a document can contain, `eos` included.
    """

    def __init__(self, inner: tokenizers.Tokenizer):
        inner.no_padding()
        inner.no_truncation()
        if isinstance(inner.model, models.BPE):
            inner.model.dropout = None  # it would draw the tokens of a text at random, anew each time
        ids = inner.get_vocab(with_added_tokens=True)
        if not ids:
            raise UserError("corpus.tokenizer: its vocabulary is empty; take another, or bpe, which is trained here")
        self.ends = {name: ids[name] for name in DOCUMENT_ENDS if name in ids}
        end = next(iter(self.ends), DOCUMENT_ENDS[0])
        inner.add_special_tokens([end])  # an existing one keeps its id
        inner.encode_special_tokens = True  # special tokens spelled out in a text are text
        self._inner = inner
        self.end, self.is_end_added = end, end not in ids
        self.eos: int = inner.token_to_id(end)  # type: ignore[assignment] - it was just added
        self.vocabulary = 1 + max(self.eos, *ids.values())
        if self.is_end_added and self.eos in ids.values():
            raise UserError(f"corpus.tokenizer: ids have holes, so the document end would share id {self.eos}")

    def encode(self, text: str) -> np.ndarray:
        """The ids of one text, (N,) uint32, without document end."""
        return self.encode_batch([text])[0][0]

    def encode_batch(self, texts: Sequence[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Encodes texts on all cores, without holding the interpreter lock.

        Returns: for each text its ids (N,) uint32, without document end, and the bytes of text that each covers (N,),
            which add up to the UTF-8 length of the text.
        Raises: UserError if a text encodes to the document end (possible with a word-level vocabulary), a byte-level
            tokenizer drops some of it, or one without an unknown token meets a character that it does not know.
        """
        if self._bytes_by_id is None:
            try:
                encodings = self._strict.encode_batch(texts, add_special_tokens=False)
            except Exception as error:  # the library raises no narrower class
                cure = "train it with an unknown token, or take one that reads every text, such as bpe"
                raise UserError(f"corpus.tokenizer cannot read {self._unread(texts)!r}: {error}; {cure}") from error
            ids = [np.array(e.ids, np.uint32) for e in encodings]
            sizes = [_bytes_by_offset(t, e.offsets) for t, e in zip(texts, encodings, strict=True)]
        else:
            pieces = [list(_pieces(text)) if self._ends_lines else [text] for text in texts]
            rest = self._ids_of(list(itertools.chain(*pieces)))
            ids = [np.concatenate([next(rest) for _ in p]) for p in pieces]
            sizes = [self._bytes_by_id[i] for i in ids]
            for text, size in zip(texts, sizes, strict=True):
                if (kept := size.sum()) != (length := len(text.encode())):
                    raise UserError(
                        f"corpus.tokenizer drops text, e.g. of {text[:40]!r}: its tokens stand for {kept} of {length} "
                        "bytes; train it with the whole ByteLevel alphabet and nothing that removes text, or take bpe"
                    )
        if any((i == self.eos).any() for i in ids):
            raise UserError(
                f"corpus.tokenizer: a text spells {self._inner.id_to_token(self.eos)!r}, which this tokenizer reads "
                "as its document end; take the text out or choose a byte-level tokenizer"
            )
        return ids, sizes

    def _ids_of(self, pieces: list[str]) -> Iterator[np.ndarray]:
        """The ids of each piece; those of about AT_ONCE characters are found at a time, on all cores."""
        before = itertools.accumulate(map(len, pieces), initial=0)
        for _, group in itertools.groupby(zip(before, pieces, strict=False), lambda each: each[0] // AT_ONCE):
            texts = [piece for _, piece in group]
            for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoding.ids, np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; the document end and other special tokens are left out."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def require_within(self, vocabulary: int) -> None:
        """Raises: UserError where a text can have ids that a network of `vocabulary` ids does not know."""
        if self.vocabulary > vocabulary:
            raise UserError(
                f"the tokenizer has {self.vocabulary:,} ids, the network {vocabulary:,}: take that of its training"
            )

    @functools.cached_property
    def _strict(self) -> tokenizers.Tokenizer:
        """The same, but a BPE without an unknown token, which would drop what it does not know, raises an error."""
        if not isinstance(self._inner.model, models.BPE) or self._inner.model.unk_token is not None:
            return self._inner
        inner = copy.deepcopy(self._inner)
        inner.encode_special_tokens = True  # is not copied
        inner.model.unk_token = "none given"  # no token of its vocabulary
        return inner

    def _unread(self, texts: Sequence[str]) -> str:
        """What keeps it from reading texts: a character, of models of words a word; else where the texts begin."""
        unit = r"\S+|\s" if isinstance(self._inner.model, models.WordLevel | models.WordPiece) else r"(?s)."
        for part in dict.fromkeys(part for text in texts for part in re.findall(unit, text)):
            try:
                self._strict.encode(part, add_special_tokens=False)
            except Exception:
                return part[:40]
        return texts[0][:40]

    @functools.cached_property
    def unknown(self) -> int | None:
        """The id that stands for any text that the tokenizer does not know; None: it has none."""
        model = json.loads(self._inner.to_str())["model"]
        name = model.get("unk_token")
        return model.get("unk_id") if name is None else self._inner.token_to_id(name)

    @functools.cached_property
    def altered(self) -> str:
        """Which of PROBED its normaliser changes or drops, and whether white space is lost: what is then predicted is
        less than the text."""
        normalised = self._inner.normalizer.normalize_str if self._inner.normalizer else str
        read = {c: unicodedata.normalize("NFC", normalised(c)).strip(MARKS) for c in PROBED}
        changed = "".join(c for c in PROBED if read[c] != c and read[c].isascii())  # what is not is written in bytes
        split = self._inner.pre_tokenizer.pre_tokenize_str if self._inner.pre_tokenizer else lambda text: [(text, ())]
        one, more = ([piece for piece, _ in split(normalised(text))] for text in ("a b", "a \n b"))
        return " and ".join(filter(None, [changed, "white space" if one == more else ""]))

    @property
    def is_lossless(self) -> bool:
        """Whether `decode` restores the text of a whole document, byte for byte: a file may lack the decoder."""
        return self._bytes_by_id is not None and isinstance(self._inner.decoder, decoders.ByteLevel)

    @functools.cached_property
    def _bytes_by_id(self) -> np.ndarray | None:
        """Bytes of text per id, (V,) uint16, if the tokenizer cuts bytes as they are; else None."""
        described = json.loads(self._inner.to_str())
        splitter = described["pre_tokenizer"] or {}
        steps = splitter.get("pretokenizers", [splitter])
        is_byte_level = (
            any(step.get("type") == "ByteLevel" for step in steps)
            and not any(step.get("add_prefix_space") for step in steps)
            and described["normalizer"] is None
            and all(token["special"] for token in described["added_tokens"])
        )
        if not is_byte_level:
            return None
        table = np.zeros(self.vocabulary, np.uint16)
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            table[i] = len(token)  # a byte-level token is written with one character per byte
        return table

    @functools.cached_property
    def _ends_lines(self) -> bool:
        """Whether no token of a byte-level tokenizer spans the places at which `_pieces` cuts."""
        if all("Ċ" not in token[1:] for token in self._inner.get_vocab(with_added_tokens=False)):
            return True
        found = self._inner.pre_tokenizer.pre_tokenize_str("a\n1\né\n")
        return {1, 3, 5} <= {start for _, (start, _) in found}

    def to_file(self, path: str | Path) -> None:
        write_durably(Path(path), self._inner.to_str().encode())

    @property
    def hash(self) -> str:
        """Hash of everything that decides the ids; equal to that of the file that `to_file` writes."""
        return content_hash(self._inner.to_str().encode())

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """From a `tokenizer.json` of the tokenizers library."""
        with _reading(Path(path)):
            inner = tokenizers.Tokenizer.from_file(str(path))
        return cls(inner)

    @classmethod
    def from_gpt2(cls, folder: str | Path) -> "Tokenizer":
        """From GPT-2's `encoder.json` and `vocab.bpe`."""
        folder = Path(folder)
        with _reading(folder):
            model = models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
        return cls(_byte_level(model))

    @classmethod
    def of_bytes(cls) -> "Tokenizer":
        """The 256 bytes, each its own id, and the document end."""
        written = set(pre_tokenizers.ByteLevel.alphabet())  # printable bytes stand for themselves, others from 256 on
        others = itertools.count(256)
        vocabulary = {chr(b) if chr(b) in written else chr(next(others)): b for b in range(256)}
        return cls(_byte_level(models.BPE(vocab=vocabulary, merges=[]), use_regex=False))

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> "Tokenizer":
        """A byte-level BPE, the document end its last id. Same texts, same tokenizer.

        vocabulary: the most ids it may have; at least 257, for every byte and the document end.
        """
        if vocabulary < 257:
            raise ValueError(f"vocabulary = {vocabulary}: at least 257, for every byte and the document end")
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary - 1,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a recipe names: "bytes", a `tokenizer.json`, or a folder with one or with GPT-2's files."""
    path = Path(os.path.expanduser(name))
    if name == "bytes":
        return Tokenizer.of_bytes()
    if path.is_file():
        return Tokenizer.from_file(path)
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_file(path / "tokenizer.json")
    if (path / "encoder.json").is_file() and (path / "vocab.bpe").is_file():
        return Tokenizer.from_gpt2(path)
    cure = 'allowed are "bpe", "bytes" and such a path'
    if (path / "vocab.json").is_file():
        cure = "vocab.json does not say how text is cut into words: transformers makes tokenizer.json of it, by "
        cure += "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    raise UserError(
        f'corpus.tokenizer = "{name}": no such file, nor a folder with tokenizer.json or with encoder.json and '
        f"vocab.bpe; {cure}"
    )


def content_hash(*contents: bytes | memoryview) -> str:
    """32 hexadecimal digits that change with any of the contents."""
    digest = hashlib.blake2b(digest_size=16)
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def _byte_level(model: models.BPE, use_regex: bool = True) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    return inner


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises no narrower class
        raise UserError(f'corpus.tokenizer = "{path}": cannot be read as a tokenizer ({error})') from error


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE and (cut := _CUT.search(text, start + PIECE)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _bytes_by_offset(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Each token owns the text from the end of those before it to its own end; the last one owns the rest."""
    ends = np.array([end for _, end in offsets], np.int64)
    ends[-1:] = len(text)
    _, begins = characters(text)
    return np.diff(begins[np.maximum.accumulate(ends)], prepend=0)
