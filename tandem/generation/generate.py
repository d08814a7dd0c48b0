"""Texts from any network, through its session: a batch of prompts of any lengths, token by token.

    generators = row_generators(seed=1, rows=2)
    for row, token in generate(network, [[5, 2, 9], [7]], generators, sampler=sampler, max_tokens=20, stop=eos):
        ...                                     # (0, 4), (1, 8), (0, 2), (1, eos), (0, 11), ...

Every row draws from its own generator, so a batch gives what its prompts give one by one with the same generators.
Everything runs in float32, as the weights are stored. This is also the fastest for one row on a CPU: a cached step in
bfloat16 takes twice as long there.

An empty text starts as the network's `prompt` starts one, by [BOS] where sentences do, or with the document end. No
network is trained on what follows that (a document starts with no context), so the beginning of such a text is
arbitrary; give it a word where that matters.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Generator

from tandem.corpus import Tokenizer
from tandem.generation.sampling import Sampler, row_generators
from tandem.networks.network import Ids, Network, Session, ids_of
from tandem.recipe import UserError


def generate(
    network: Network,
    prompts: Sequence[Ids],
    generators: Sequence[Generator],
    *,
    sampler: Sampler,
    max_tokens: int,
    stop: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Yields (row, token) as tokens are drawn; a row ends with `stop`, which is yielded, or after `max_tokens`.

    Sentence boundaries that a network draws are read by it, but never yielded.

    Raises: UserError, before anything runs, for an empty prompt, an id outside the vocabulary, and a length that is
        less than 1 or more than the network has positions for.
    """
    texts = [ids_of(prompt) for prompt in prompts]
    _check(network, texts, max_tokens)
    return _tokens(network, network.session(len(texts)), texts, generators, sampler, max_tokens, stop)


def _check(network: Network, prompts: list[list[int]], max_tokens: int) -> None:
    if max_tokens < 1:
        raise UserError(f"max_tokens = {max_tokens}: ask for at least 1")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} has no tokens; start it with the document end")
        if outside := [token for token in prompt if not 0 <= token < network.ids]:
            raise UserError(f"prompt {number} has id {outside[0]}; the network knows 0 to {network.ids - 1}")
        if network.longest is not None and len(prompt) + max_tokens - 1 > network.longest:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens and {max_tokens} more are asked, of which all but the last "
                f"are read; this network has learned positions for {network.longest}: shorten it or ask for fewer"
            )


def _tokens(
    network: Network,
    session: Session,
    prompts: list[list[int]],
    generators: Sequence[Generator],
    sampler: Sampler,
    max_tokens: int,
    stop: int | None,
) -> Iterator[tuple[int, int]]:
    left, going = [max_tokens] * len(prompts), list(range(len(prompts)))
    boundaries, since = network.ids - network.vocabulary, torch.zeros(len(prompts), dtype=torch.long)
    logits = session.prefill(prompts)
    for _ in range((1 + boundaries) * max_tokens):
        logits = logits[:, : network.ids]  # the table's other rows are no text
        if boundaries:  # at most this many between two tokens, or a row might never end
            logits = logits.clone()
            logits[(since >= boundaries).to(logits.device), network.vocabulary :] = -torch.inf
        tokens = sampler.choose(logits, generators)
        drawn = tokens.tolist()
        since = torch.where(tokens.cpu() < network.vocabulary, 0, since + 1)
        for row in going:
            if drawn[row] < network.vocabulary:
                left[row] -= 1
                yield row, drawn[row]
        going = [row for row in going if drawn[row] != stop and left[row]]
        if not going:
            return
        logits = session.step(tokens)  # stopped rows keep running unseen: the batch keeps its shape


class Piece(NamedTuple):
    """Text that has just become complete in one row, and the state of the row."""

    row: int
    text: str
    tokens: int
    """Tokens drawn so far, the document end included."""
    end: Literal["", "document", "length"]
    """Why the row ends here: with its document, or because `max_tokens` is reached; "": it goes on."""
    closed_by_force: int | None = None
    """Sentences of the row, prompt included, that were closed without their end; None: its network closes none."""


def stream_text(
    network: Network,
    tokenizer: Tokenizer,
    prompts: Iterable[str],
    *,
    sampler: Sampler,
    max_tokens: int,
    seed: int = 0,
    rows: int | None = None,
) -> Iterator[Piece]:
    """Yields what follows each prompt, up to the document end, piece by piece as whole characters appear.

    Row r draws from a stream keyed by (seed, r). `rows` prompts are served at a time, in their order (default: all);
    this does not change the texts. The last piece of each row, and no other, has an `end`.

    Raises: UserError as `generate` does, for prompts that are not text and `rows` below 1, before anything runs.
    """
    if rows is not None and rows < 1:
        raise UserError(f"rows = {rows}: serve at least 1 prompt at a time")
    starts = starts_of(network, tokenizer, prompts, max_tokens)
    generators = row_generators(seed, len(starts))
    size = rows or max(1, len(starts))
    return itertools.chain.from_iterable(
        _pieces(network, tokenizer, starts[first : first + size], first, generators, sampler, max_tokens)
        for first in range(0, len(starts), size)
    )


def starts_of(network: Network, tokenizer: Tokenizer, prompts: Iterable[str], max_tokens: int) -> list[list[int]]:
    """The ids that a network reads for each prompt. Raises: UserError as `stream_text` does."""
    if isinstance(prompts, str):
        raise UserError(f"prompts is one text: pass a list, [{prompts[:20]!r}]")
    texts = [*prompts]
    for number, prompt in enumerate(texts, 1):
        if not isinstance(prompt, str):
            raise UserError(f"prompt {number} is {type(prompt).__name__}, not text")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UserError(f"prompt {number} is not text: it holds bytes that are not UTF-8")
    starts = [network.prompt(tokenizer, prompt) or [tokenizer.eos] for prompt in texts]
    _check(network, starts, max_tokens)
    return starts


def _pieces(
    network: Network,
    tokenizer: Tokenizer,
    starts: list[list[int]],
    first: int,
    generators: Sequence[Generator],
    sampler: Sampler,
    max_tokens: int,
) -> Iterator[Piece]:
    """The pieces of the prompts from number `first` on, which are served together."""
    texts = ([token for token in start if token < tokenizer.vocabulary and token != tokenizer.eos] for start in starts)
    streams, counts = [TextStream(tokenizer, _end(tokenizer, text)) for text in texts], [0 for _ in starts]
    session, own = network.session(len(starts)), generators[first : first + len(starts)]
    drawn = _tokens(network, session, starts, own, sampler, max_tokens, tokenizer.eos)
    for row, token in drawn:
        counts[row] += 1
        end = "document" if token == tokenizer.eos else "length" if counts[row] == max_tokens else ""
        text = streams[row].push(token) + (streams[row].rest() if end else "")
        if text or end:
            forced = getattr(session, "closed_by_force", None)
            yield Piece(first + row, text, counts[row], end, None if forced is None else int(forced[row]))


def _end(tokenizer: Tokenizer, text: list[int]) -> list[int]:
    """The last tokens of a text that are whole characters: a decoder may read bytes together with those that follow,
    and what is no text (an unknown token) as nothing, which hides that a text has begun."""
    ends = (text[-n:] for n in range(1, 5))
    return next((end for end in ends if tokenizer.decode(end)[-1:] not in ("", "\ufffd")), text[-1:])


def generate_text(
    network: Network,
    tokenizer: Tokenizer,
    prompts: Iterable[str],
    *,
    sampler: Sampler,
    max_tokens: int,
    seed: int = 0,
) -> list[str]:
    """What follows each prompt, whole; otherwise as `stream_text`."""
    texts: dict[int, str] = defaultdict(str)
    for piece in stream_text(network, tokenizer, prompts, sampler=sampler, max_tokens=max_tokens, seed=seed):
        texts[piece.row] += piece.text
    return [texts[row] for row in range(len(texts))]


class TextStream:
    """Tokens to text, piece by piece: a character that spans tokens appears with its last one.

    New tokens are decoded after those of the last piece, because a decoder may treat the first token of a text
    specially (drop its space); the text of the last piece is then cut off again. The first tokens are decoded after
    `shown`, the last tokens of the text before them.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self.shown = list(shown)
        self.held: list[int] = []

    def push(self, token: int) -> str:
        """Text completed by this token; empty while a character is incomplete."""
        self.held.append(token)
        piece = self._piece()
        # The replacement character: bytes that are not, or not yet, a character.
        return "" if piece.endswith("\ufffd") else self._show(piece)

    def rest(self) -> str:
        """The text that is still held, incomplete characters included."""
        return self._show(self._piece())

    def _piece(self) -> str:
        return self.tokenizer.decode(self.shown + self.held)[len(self.tokenizer.decode(self.shown)) :]

    def _show(self, piece: str) -> str:
        if piece:
            self.shown, self.held = self.held, []
        return piece
