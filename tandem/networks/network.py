"""The contract of a network: one file, its own Config, and these methods.

A network embeds tokens and maps embeddings to the hidden states that predict tokens. It does not know the
objective, which may pass it other embeddings and takes the loss at the head.

    x = network.embed(tokens)                      B T -> B T C
    hidden, extra = network(x, batch)              B T C -> B T C, and named extra loss sums
    loss, sums = network.nll(hidden, targets)      the head, in chunks: all logits never exist at once

Besides these: `read` and `score` (evaluation), `session` (generation), `cost`, the blocks to compile, shard and
recompute.
`tandem.testing` tests every registered network against the contract; docs/adding_a_method.md walks through one.

Shapes: B rows, T tokens, C width, V ids that a text can contain, S targets of a position.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.corpus import Batch, PackedRows, ScoringBatch, Store, Tokenizer, scoring_rows
from tandem.networks.cost import Cost
from tandem.nn.block import compile_blocks
from tandem.nn.head import nll_sums, token_nll
from tandem.nn.init import Embedding, itself, roles
from tandem.nn.moe import Routing, mixture_terms
from tandem.nn.spans import Span
from tandem.recipe import UserError

Ids = Sequence[int] | np.ndarray | Tensor
"""A text: whole numbers in one dimension."""


class Session(Protocol):
    """Generation by one network: `rows` texts side by side, each continued independently.

    Logits are inference tensors: they take no gradient, and `clone` comes before a change in place. A session that
    closes sentences by force counts them by row, in `closed_by_force` (B,); others have no such attribute.
    """

    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        """Reads one prompt a row, of any lengths from 1; logits (B, V) of what follows, float32.

        Raises: ValueError where the session has read something before: prompts begin a session.
        """
        ...

    def step(self, tokens: Tensor) -> Tensor:
        """Appends tokens (B,), or several a row (B, n); logits (B, V) of what follows.

        Raises: ValueError for tokens of any other shape, and without a prompt where an encoder has to read one.
        """
        ...

    def fork(self, rows: Tensor | None = None) -> "Session":
        """An independent continuation of the same texts, or of `rows` (N,) of them, in that order, repeats included."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of the state held for the tokens so far."""
        ...


def ids_of(text: Ids) -> list[int]:
    """Raises: TypeError for anything but whole numbers."""
    return list(map(index, text.tolist() if isinstance(text, np.ndarray | Tensor) else text))


def opening(prompts: Sequence[Ids], rows: int, begun: bool) -> list[list[int]]:
    """The prompts of a session, as lists.

    Raises: ValueError where the session has `begun`, or unless each of `rows` has a prompt of at least one token.
    """
    if begun:
        raise ValueError("this session has read its prompts: step() goes on, a new session begins again")
    texts = [ids_of(prompt) for prompt in prompts]
    if len(texts) != rows or not all(texts):
        raise ValueError(f"a session of {rows} rows takes as many prompts, each of at least one token")
    return texts


def columns_of(tokens: Tensor, rows: int) -> Tensor:
    """What a step appends, (B,) or (B, n), as (B, n). Raises: ValueError for any other shape."""
    if tokens.ndim not in (1, 2) or len(tokens) != rows or not tokens.numel():
        shape = tuple(tokens.shape)
        raise ValueError(f"a session of {rows} rows takes tokens of shape ({rows},) or ({rows}, n), not {shape}")
    return tokens.reshape(rows, -1)


def aligned(texts: list[list[int]], in_front: bool = True) -> tuple[Tensor, Tensor]:
    """Texts as a batch (B, T), padded in front or at their ends, and the padding of each, (B,)."""
    longest = max(map(len, texts))
    padding = [[0] * (longest - len(text)) for text in texts]
    rows = [pad + text if in_front else text + pad for pad, text in zip(padding, texts, strict=True)]
    return torch.tensor(rows, dtype=torch.long), torch.tensor([len(pad) for pad in padding])


def padded(vocabulary: int, sentinels: int = 0) -> int:
    """Rows of the token table: two spare ids for sentence boundaries, sentinels, then up to a multiple of 64."""
    return -(-(vocabulary + 2 + sentinels) // 64) * 64


class Network(nn.Module):
    """Base of all networks. `vocabulary` counts the ids a text can contain; no other id has a probability.

    A network takes a last argument `generator`, from which its weights are drawn; None: PyTorch's own generator.
    """

    Config: ClassVar[Any]
    tokens_only: ClassVar[str] = ""
    """Why an objective may pass it only embeddings of single tokens; empty: it may pass others."""
    reads_sentences: ClassVar[bool] = False
    """Whether it reads a store's sentences."""
    reads_whole: ClassVar[bool] = False
    """Whether it scores a document whole, however long; others score in windows of the context."""
    suffixes_only: ClassVar[str] = ""
    """Why it predicts only the end of a text, given what lies before (`Batch.blocks`); empty: it predicts all of it."""
    unwrapped: ClassVar[str] = ""
    """Why no correction can stand before it (networks/context_ready.py); empty: one does, or could."""
    divides: ClassVar[bool] = False
    """Whether its output for a text depends on where a session's prompt ends."""
    free: ClassVar[tuple[str, ...]] = ()
    """Settings that shape no weight: in them it may differ from the network that it starts from, and a trained one may
    be read with others."""
    table: Embedding
    """Embeddings of token ids; a network that wraps another has none of its own."""
    stack: nn.ModuleList
    """Blocks in a row; other networks say which are their `blocks`."""
    rows_vary: ClassVar[bool] = False
    """Whether its blocks read rows of any length in training: one compiled graph then serves all lengths."""

    def __init__(self, config: Any, vocabulary: int, context: int):
        super().__init__()
        self.config, self.vocabulary, self.context = config, vocabulary, context
        self.recompute = False
        self.segmentation: Any = None
        """The Segmentation by which its run cut texts, where it reads sentences; None: the default."""
        self.routings: list[Routing] = []
        """Routing in the current pass, by mixture of experts."""

    @classmethod
    def unwritten(cls, config: Any, vocabulary: int, context: int) -> Self:
        """The network on the CPU before its weights are loaded: it draws none, and holds what memory held."""
        return cls.outlined(config, vocabulary, context).to_empty(device="cpu")

    @classmethod
    def outlined(cls, config: Any, vocabulary: int, context: int) -> Self:
        """The network's shapes alone, which take no memory: enough to count parameters and costs."""
        with torch.device("meta"):
            return cls(config, vocabulary, context)

    @classmethod
    def tiny(cls) -> dict[str, Any]:
        """Settings by name, a few thousand parameters each, at which the contract is tested."""
        raise NotImplementedError(f"{cls.__name__} has no tiny settings for the contract: define its `tiny`")

    @classmethod
    def degenerate(cls, config: Any) -> tuple[Any, Any, Callable[[str], str | None]]:
        """(settings near `config` at which this is the plain decoder, that decoder's settings, own parameter
        name -> the decoder's, None where it has none)."""
        raise NotImplementedError

    def view(self, store: Store, seed: int, rows: int, context: int) -> Any:
        """How it reads a store in training, `rows` x `context` tokens of text a step."""
        return PackedRows(store, seed, rows, context)

    def scoring(
        self, store: Store, context: int, rows: int, documents: Iterable[int] | None = None, whole: bool = True
    ) -> Iterator[ScoringBatch]:
        """How it reads documents to score them; `score` has the shape of `document` and `index`. Without `whole`, a
        network that `reads_whole` reads windows, too."""
        return scoring_rows(store, context, rows, documents)

    def prompt(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """The prompt that a session reads for a text."""
        return tokenizer.encode(text).tolist()

    @property
    def ids(self) -> int:
        """Ids that generation may draw: those of texts and, where a network draws them, sentence ends."""
        return self.vocabulary

    @property
    def longest(self) -> int | None:
        """Most tokens that a generated text can have, prompt included; None: any number."""
        return None

    @property
    def blocks(self) -> nn.ModuleList:
        """The units to compile, shard and recompute: `stack`, where a network has one."""
        if getattr(self, "stack", None) is None:  # an AttributeError would be told as one of `blocks`
            raise NotImplementedError(f"{type(self).__name__} has no blocks: keep them as `stack`, or define `blocks`")
        return self.stack

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) ids to (B, T, C)."""
        return self.table(tokens)

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings (B, T, C) to hidden states (B, T, C) and extra loss terms, each a sum."""
        raise NotImplementedError

    @property
    def head(self) -> Tensor:
        """(V, C): the rows of the output matrix that take part in the softmax."""
        return self.output_weight[: self.vocabulary]

    @property
    def output_weight(self) -> Tensor:
        """The output matrix, spare rows included: that of `output`, where a network has one, else the token table."""
        output = getattr(self, "output", None)
        return self.table.weight if output is None else itself(output).weight

    def session(self, rows: int) -> Session:
        raise NotImplementedError

    def cost(self) -> Cost:
        raise NotImplementedError

    def cost_of(self, key: int) -> Cost:
        """The cost of training in the step of this key, where it is random; `cost` then has the mean."""
        return self.cost()

    @classmethod
    def drawing(cls, config: Any, starts: list[int]) -> list[tuple[str, Span, int]]:
        """(title, span, number of keys) of every pattern, for a row whose documents begin at `starts`."""
        raise NotImplementedError

    @property
    def shards(self) -> Sequence[nn.Module]:
        """The units whose weights, where these are sharded over processes, are gathered when they are called; all other
        weights are gathered for the whole pass."""
        return list(self.blocks)

    def as_plain(self, batch: Batch) -> Batch:
        """What the plain decoder reads in place of a batch, where this network's settings make it that decoder."""
        return batch

    @property
    def terms(self) -> dict[str, float]:
        """Weights of the extra loss terms by name; a term of weight 0 is only recorded."""
        moe = getattr(self.config, "moe", None)
        return {"balance": moe.balance, "load_max": 0.0, "load_min": 0.0} if moe else {}

    def extra(self, batch: Batch) -> dict[str, Tensor]:
        """Sums of the extra terms of the pass just made over `batch`."""
        routings, self.routings = self.routings, []  # a new list: recomputation appends to the old one again
        means = mixture_terms(routings) if routings else {}
        return {name: batch.starts.numel() * mean for name, mean in means.items()}

    def count(self, batch: Batch) -> dict[str, int]:
        """What the sum of each extra term is divided by: positions, unless a network says otherwise."""
        return {name: batch.starts.numel() for name in self.terms}

    def add_extra(
        self, loss: Tensor, sums: dict[str, Tensor], extra: dict[str, Tensor], counts: dict[str, int]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A batch's loss and sums with the extra terms of its forward; `counts` are totals of the step."""
        assert extra.keys() == self.terms.keys(), f"terms {list(self.terms)}, but the forward gave {list(extra)}"
        for name, weight in self.terms.items():
            if weight:
                loss = loss + weight / max(1, counts[name]) * extra[name]
            sums = sums | {name: extra[name].detach()}
        return loss, sums

    def asked(self, hidden: Tensor, batch: Any, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """A batch's share of the step's mean next-token loss, and its sums by name; `counts` are totals of the step."""
        loss, sums = self.nll(hidden, batch.targets)
        return loss / max(1, counts["nll"]), {"nll": sums[0]}

    def nll(
        self,
        hidden: Tensor,
        targets: Tensor,
        coefficients: Tensor | None = None,
        any_of: bool = False,
        head: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weighted loss with its gradient, and plain sums by slot, of targets (B, T) or (B, T, S); see nn/head.

        `head`: replaces the network's.
        """
        rows = hidden.flatten(0, 1).to(compute_dtype(hidden))
        per_row = coefficients.flatten(0, 1) if coefficients is not None and coefficients.ndim > 1 else coefficients
        matrix = self.head if head is None else head
        return nll_sums(rows, matrix, targets.flatten(0, 1), coefficients=per_row, any_of=any_of)

    def read(self, batch: Batch, x: Tensor | None = None) -> Tensor:
        """Hidden states (B, T, C) from which scores are made; `x` replaces the tokens' embeddings."""
        hidden, _ = self(self.embed(batch.tokens) if x is None else x, batch)
        return hidden

    def score(self, batch: Batch, x: Tensor | None = None, **how: Any) -> Tensor:
        """-log p of every target, nats, (B, T), 0 at IGNORE; `read` makes the hidden states, given `how`."""
        hidden = self.read(batch, x, **how)
        return token_nll(hidden.flatten(0, 1), self.head, batch.targets.flatten()).view_as(batch.targets)

    def compile(self, backend: str = "inductor") -> Self:
        """Compiles the blocks for training and for fixed sessions; scoring and other sessions stay eager."""
        compile_blocks(self.blocks, backend, self.rows_vary)
        return self

    @staticmethod
    def touched(hidden: Tensor, idle: Iterable[nn.Module]) -> Tensor:
        """`hidden`, unchanged; modules that a pass did not use get a gradient of zero: other processes wait for one,
        and an optimiser keeps a state of every parameter, in its checkpoints too."""
        if not torch.is_grad_enabled():
            return hidden
        return sum((parameter.sum() * 0.0 for module in idle for parameter in module.parameters()), start=hidden)

    def run_block(self, block: nn.Module, x: Tensor, reader: Any, *more: Any) -> Tensor:
        """block(x, reader, ...), `recomputed`."""
        # A bound method, not the list itself: FSDP passes on copies of lists
        routed = getattr(self.config, "moe", None) and torch.is_grad_enabled()
        tell: dict[str, Any] = {"tell": self.routings.append} if routed else {}
        masks = getattr(reader, "masks", None)
        if masks and masks.key is not None:
            return self.recomputed(masks.run, block, masks.turn, x, reader, *more, **tell)
        return self.recomputed(block, x, reader, *more, **tell)

    def recomputed(self, function: Callable[..., Any], *given: Any, **told: Any) -> Any:
        """function(*given), keeping only its arguments for the backward when `recompute` is on."""
        if self.recompute and torch.is_grad_enabled():  # random draws inside are keyed (nn/dropout.py)
            return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False, **told)
        return function(*given, **told)

    def start_from(self, other: "Network") -> None:
        """Takes over the weights of a trained network.

        Raises: UserError where settings other than the `free` ones differ, so that the function would change.
        """
        here, there = ({"kind": type(n).__name__, "context": n.context, **n.config.model_dump()} for n in (self, other))
        same = {"init", *self.free} | ({"context"} if self.longest is None else set())
        different = [key for key in here | there if key not in same and here.get(key) != there.get(key)]
        if different:
            lines = [f"  {key}: {there.get(key, 'absent')} there, {here.get(key, 'absent')} here" for key in different]
            raise UserError("\n".join(["start.run: this network cannot take over the weights of that one:", *lines]))
        self.load_state_dict(other.state_dict())

    def parameters_by_role(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        named = dict(self.named_parameters())
        for name, role in roles(self).items():
            counts[role] = counts.get(role, 0) + named[name].numel()
        return counts


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products run on x: autocast's where it is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
