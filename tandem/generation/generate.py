"""Texts from any network, through its session: a batch of prompts of any lengths, token by token.

    generators = row_generators(seed=1, rows=2)
    for row, token in generate(network, [[5, 2, 9], [7]], generators, sampler=sampler, max_tokens=20, stop=eos):
        ...                                     # (0, 4), (1, 8), (0, 2), (1, eos), (0, 11), ...

Every row draws from its own generator, so a batch gives what its prompts give one by one with the same generators.
Everything runs as the weights are stored, in float32, which is also the fastest for one row on a CPU: a cached step in
bfloat16 takes twice as long there.

An empty text starts with the document end. No network is ever asked what follows it (a document starts with no
context), so what it begins with is arbitrary; give it a word where that matters.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Generator

from tandem.corpus import Tokenizer
from tandem.generation.sampling import Sampler, row_generators
from tandem.networks.network import Network
from tandem.recipe import UserError


def generate(
    network: Network,
    prompts: Sequence[Sequence[int]],
    generators: Sequence[Generator],
    *,
    sampler: Sampler,
    max_tokens: int,
    stop: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Yields (row, token) as tokens are drawn; a row ends with `stop`, which is yielded, or after `max_tokens`.

    Boundaries that a network draws are read by it and never yielded.

    Raises: UserError, before anything runs, for an empty prompt, an id outside the vocabulary, and a length that is
        less than 1 or more than the network has positions for.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens = {max_tokens}: ask for at least 1")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {row} has no tokens; start it with the document end")
        if outside := [token for token in prompt if not 0 <= token < len(network.head)]:
            raise UserError(f"prompt {row} has id {outside[0]}; the network knows 0 to {len(network.head) - 1}")
        if network.longest is not None and len(prompt) + max_tokens > network.longest:
            raise UserError(
                f"prompt {row} has {len(prompt)} tokens and {max_tokens} more are asked, but this network has learned "
                f"positions for {network.longest} in all: shorten the prompt or ask for fewer"
            )
    return _tokens(network, [list(prompt) for prompt in prompts], generators, sampler, max_tokens, stop)


def _tokens(
    network: Network,
    prompts: list[list[int]],
    generators: Sequence[Generator],
    sampler: Sampler,
    max_tokens: int,
    stop: int | None,
) -> Iterator[tuple[int, int]]:
    session, left, going = network.session(len(prompts)), [max_tokens] * len(prompts), list(range(len(prompts)))
    logits = session.prefill(prompts)
    for _ in range(2 * max_tokens):  # a boundary is drawn, too, and is no text: at most one for each token
        tokens = sampler.choose(logits, generators)
        drawn = tokens.tolist()
        for row in going:
            if drawn[row] < network.vocabulary:
                left[row] -= 1
                yield row, drawn[row]
        going = [row for row in going if drawn[row] != stop and left[row]]
        if not going:
            return
        logits = session.step(tokens)  # rows that have stopped go on unseen: the batch keeps its shape


def generate_text(
    network: Network,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    sampler: Sampler,
    max_tokens: int,
    seed: int = 0,
    on_text: Callable[[int, str], object] = lambda row, text: None,
) -> list[str]:
    """What follows each prompt, up to the document end; `on_text(row, piece)` is called as whole characters appear.

    Row r draws from a stream keyed by (seed, r).

    Raises: UserError as `generate` does, and for prompts that are not text.
    """
    for row, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise UserError(f"prompt {row} is {type(prompt).__name__}, not text")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UserError(f"prompt {row} is not text: it holds bytes that are not UTF-8")
    starts = [network.prompt(tokenizer, prompt) or [tokenizer.eos] for prompt in prompts]
    streams, texts = [TextStream(tokenizer) for _ in prompts], ["" for _ in prompts]

    def emit(row: int, piece: str) -> None:
        if piece:
            texts[row] += piece
            on_text(row, piece)

    generators = row_generators(seed, len(starts))
    for row, token in generate(network, starts, generators, sampler=sampler, max_tokens=max_tokens, stop=tokenizer.eos):
        emit(row, streams[row].push(token))
    for row, stream in enumerate(streams):
        emit(row, stream.rest())
    return texts


class TextStream:
    """Tokens to text, piece by piece: a character that spans tokens appears with its last one.

    New tokens are decoded behind those of the last piece, because a decoder may treat the first token of a text in
    its own way (drop its space); what the last piece alone gives is cut off again.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.shown: list[int] = []
        self.held: list[int] = []

    def push(self, token: int) -> str:
        """Text that is complete with this token; empty while a character is not."""
        self.held.append(token)
        piece = self._piece()
        # The replacement character: bytes that are not, or not yet, a character.
        return "" if piece.endswith("\ufffd") else self._show(piece)

    def rest(self) -> str:
        """What is still held, characters never completed included."""
        return self._show(self._piece())

    def _piece(self) -> str:
        return self.tokenizer.decode(self.shown + self.held)[len(self.tokenizer.decode(self.shown)) :]

    def _show(self, piece: str) -> str:
        if piece:
            self.shown, self.held = self.held, []
        return piece
