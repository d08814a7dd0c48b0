"""Generation by a double decoder: the context is read once, and then only the generation stack works.

    session.prefill([prompt])       context: all but the last token; that one opens the block
    session.step(tokens)            the generation stack alone
    session.commit()                what was written becomes context; the next token opens a block
    session.extend(tokens)          commits, reads more context, and opens a block with the last of them
    session.fork()                  another continuation; what was read is not read again
    session.fix(capacity)           from here on one token a row at a time, in memory that never moves (captured.py)

Each layer of the generation stack has one cache: keys and values of the latents, then those of own tokens. As only one
block is open, a query reads one run of columns. Logits are those of the partition with these boundaries.

    keep          held for the context, numbers a token              so that it can be
    generation    2 L_g G D                                          written from
    latents       and C                                              handed to another session (`context`, `reload`)
    extendable    and 2 L_c G D, keys and values of the context      extended, committed to
                  stack

With `swap`, a device, the active stack is on it and the other on the host; the table and the head stay on the device.

Shapes: B rows, T tokens, C width, G key heads, D head width, L_c and L_g blocks of the stacks, N columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tandem.networks.captured import FixedSteps
from tandem.networks.network import Ids, aligned, columns_of, opening
from tandem.nn.attention import Plan, Source, attend, plan_attention
from tandem.nn.cache import Cache, rows_of_state
from tandem.nn.rope import Rotation
from tandem.nn.spans import Span, causal

if TYPE_CHECKING:
    from tandem.networks.double_decoder import DoubleDecoder, Stack

Keep = Literal["generation", "latents", "extendable"]
APART = 64
"""Most columns of its own with which a fork still reads the shared ones in place, without copying them."""


@dataclass(frozen=True)
class Context:
    """What the context stack has computed from a text: latents (B, N, C), padding columns in front (B,), and, where the
    context may grow, the keys and values of every block of the context stack."""

    latents: Tensor
    pads: Tensor
    caches: tuple[Cache, ...] | None = None

    @property
    def bytes(self) -> int:
        return self.latents.nbytes + sum(cache.bytes for cache in self.caches or ())


class CachedStack(FixedSteps):
    """One stack with a cache for each block: columns are appended, and each reads from the start of its text.

    `shared` are the first columns, of the stack that was forked, by block (2, B, G, P, D): they are read in place, and
    copied in front of the own columns once there are more than APART of these.
    """

    def __init__(self, network: "DoubleDecoder", stack: "Stack", pads: Tensor):
        self.network, self.stack, self.pads = network, stack, pads
        self.caches = [Cache() for _ in stack.blocks]
        self.shared: list[Tensor] = []

    @property
    def num_shared(self) -> int:
        """P, shared columns."""
        return self.shared[0].shape[3] if self.shared else 0

    def run(self, x: Tensor) -> Tensor:
        """The next columns (B, n, C) through all blocks and the norm."""
        x = x.to(self.stack.device)
        if self.clock is None:
            self._turn(x)
        else:
            self.rotation = self.network.rotation(self.clock, x.shape[1], x)
        return self.stack(x, self, lambda block, x, reader: block(x, reader))

    def _turn(self, x: Tensor) -> None:
        """Moves on to the columns of x: their positions, and what they read."""
        n = x.shape[1]
        if len(self.caches[0]) + n > APART:
            self.join()
        P = self.num_shared
        first = P + len(self.caches[0])
        self.rotation = self.network.rotation(first, n, x)
        self.span = causal(self.pads[:, None].expand(-1, n), positions=torch.arange(first, first + n))
        spans, keys = [self.span], [first + n]
        if P:
            lo, hi = self.span.lo, self.span.hi
            spans = [Span(lo.clamp_max(P), hi.clamp_max(P)), Span((lo - P).clamp_min(0), hi - P)]
            keys = [P, first + n - P]
        self.plan = plan_attention(spans, keys, device=x.device)

    def fix(self, capacity: int) -> None:
        """As `DecoderSession.fix`."""
        self.join()
        self.columns = len(self.caches[0])
        self._stand_still(capacity)

    def _fixed_plan(self) -> Plan:
        newest, kv = torch.tensor([self.columns - 1]), self.caches[0].kv
        span = causal(self.pads[:, None], positions=newest)
        return plan_attention([span], [kv.shape[3]], device=kv.device, backend="triton")

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held = [*self.shared[layer : layer + 1], self.caches[layer].append(k, v)]
        sources = [Source(kv[0], kv[1], span) for kv, span in zip(held, self.plan.spans, strict=True)]
        return attend(q, sources, plan=self.plan)

    def join(self) -> None:
        """Puts a copy of the shared columns in front of the own ones."""
        for layer, kv in enumerate(self.shared):
            own, joined = self.caches[layer].held, Cache()
            joined.append(kv[0], kv[1])
            if own is not None:
                joined.append(own[0], own[1])
            self.caches[layer] = joined
        self.shared = []

    def fork(self, rows: Tensor | None = None) -> "CachedStack":
        other = type(self)(self.network, self.stack, rows_of_state(self.pads, rows))
        if self.shared:
            other.caches = [cache.fork(rows) for cache in self.caches]
        held = self.shared or [cache.held for cache in self.caches if cache.held is not None]
        other.shared = [rows_of_state(kv, rows, dim=1) for kv in held]
        return other

    @property
    def bytes(self) -> int:
        """Bytes of all columns, shared ones included."""
        return sum(kv.nbytes for kv in self.shared) + sum(cache.bytes for cache in self.caches)


class GenerationCaches(CachedStack):
    """The first `boundary` columns are latents, the others own tokens; `sink` are keys and values (B, G, 1, D) of the
    latent at the boundary, by block, for texts that begin there and may read it."""

    boundary = 0
    sink: tuple[tuple[Tensor, Tensor], ...] = ()

    def put(self, latents: Tensor) -> None:
        """Appends latents (B, n, C) as the next columns, in place of the own tokens."""
        rotation = self.network.rotation(self.boundary, latents.shape[1], latents)
        self.shared = [kv[:, :, :, : self.boundary] for kv in self.shared if self.boundary]
        entries = self.boundary - self.num_shared
        self.caches = [cache.fork(entries=entries) for cache in self.caches]
        for (k, v), cache in zip(self._keys_of(latents, rotation), self.caches, strict=True):
            cache.append(k, v)
        self.boundary, self.sink = self.boundary + latents.shape[1], ()

    def put_sink(self, latent: Tensor) -> None:
        """Keeps the latent (B, 1, C) of the column at the boundary."""
        self.sink = tuple(self._keys_of(latent, self.network.rotation(self.boundary, 1, latent)))

    def _keys_of(self, latents: Tensor, rotation: Rotation) -> list[tuple[Tensor, Tensor]]:
        return [block.keys_of(latents, rotation) for block in self.stack.blocks]  # type: ignore[operator]

    def run(self, x: Tensor) -> Tensor:
        if self.divides:
            self.join()
        return super().run(x)

    @property
    def opens_a_text(self) -> bool:
        """Whether the next column opens the block, and in some row the text."""
        if self.clock is not None:  # a fixed block is open
            return False
        columns = self.num_shared + len(self.caches[0])
        return columns == self.boundary and bool((self.pads == self.boundary).any())

    @property
    def divides(self) -> bool:
        """Whether own tokens and latents are read as two sources."""
        return bool(self.sink) or self.network.config.mixing != "softmax"

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block = self.stack.blocks[layer]
        if not self.divides:
            return super().__call__(layer, q, k, v)
        (k, own_k), (v, own_v) = (x.tensor_split([self.boundary], dim=2) for x in self.caches[layer].append(k, v))
        if self.sink:
            k, v = (torch.cat(pair, dim=2) for pair in zip((k, v), self.sink[layer], strict=True))
        first, n = self.pads[:, None].expand(-1, q.shape[2]), self.boundary
        reads_sink = (first == n) & bool(self.sink)
        latents = Span(first, torch.where(reads_sink, n + 1, n))
        own = Span((first - n).clamp_min(0), self.span.hi - n)
        return block.read(q, Source(own_k, own_v, own), Source(k, v, latents))  # type: ignore[operator]

    def fork(self, rows: Tensor | None = None) -> "GenerationCaches":
        other = super().fork(rows)
        assert isinstance(other, GenerationCaches)
        other.boundary = self.boundary
        other.sink = tuple((rows_of_state(k, rows), rows_of_state(v, rows)) for k, v in self.sink)
        return other

    @property
    def bytes(self) -> int:
        return super().bytes + sum(x.nbytes for pair in self.sink for x in pair)


class DoubleDecoderSession:
    """Both stacks' caches. Prompts are aligned at their ends: row b begins at column pads[b]."""

    def __init__(self, network: "DoubleDecoder", rows: int, keep: Keep = "generation", swap: str | None = None):
        self.network, self.rows, self.swap = network, rows, swap
        self.keep: Keep = keep
        self._begin(torch.zeros(rows, dtype=torch.long))

    def _begin(self, pads: Tensor) -> None:
        self.context_caches = self._stack(pads)
        self.generation = GenerationCaches(self.network, self.network.generation_stack, pads)
        self.latents: Tensor | None = None
        self.own: list[Tensor] = []
        """Tokens (B, n) since the boundary."""

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        """Reads one prompt a row, of any lengths from 1; logits (B, V) of what follows, float32."""
        tokens, pads = aligned(opening(prompts, self.rows, self.generation.bytes > 0))
        self._begin(pads)
        return self._read(tokens)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Appends tokens (B,), or several a row (B, n), to the block; logits (B, V) of what follows."""
        tokens = columns_of(tokens, self.rows)
        if self.keep == "extendable":
            self.own.append(tokens)
        if self.network.config.sink and self.generation.opens_a_text:
            self._read_sink(tokens[:, :1])
        hidden = self.generation.run(self._embed(tokens))[:, -1]
        return (hidden @ self.network.head.T).float()

    def fix(self, capacity: int) -> None:
        """As `DecoderSession.fix`; the open block is never committed.

        Raises: ValueError where a step reads two sources, or keeps its tokens.
        """
        if self.keep == "extendable":
            raise ValueError("keep 'extendable': the host keeps the tokens of every step; such a session is not fixed")
        if self.generation.divides:
            raise ValueError(
                "with a sink, or mixing other than softmax, a step reads two sources; such a session is not fixed"
            )
        self.generation.fix(capacity)
        self.ready, self.state = self.generation.ready, self.generation.state

    @torch.inference_mode()
    def extend(self, tokens: Tensor) -> Tensor:
        """Commits, then reads tokens (B, n), all but the last as context; logits (B, V) of what follows."""
        columns = columns_of(tokens, self.rows)
        self.commit()
        return self._read(columns)

    @torch.inference_mode()
    def commit(self) -> None:
        """Turns the own tokens into context: the next token opens a block."""
        if self.keep != "extendable":
            raise ValueError(
                f"keep {self.keep!r}: this session's context cannot grow; take session(rows, keep='extendable'), or "
                "prefill the whole text"
            )
        if self.own:
            self._read_context(torch.cat(self.own, dim=1))
            self.own = []

    def context(self) -> Context:
        """What has been read up to the boundary, for `reload` in another session with as many rows."""
        if self.latents is None or self.keep == "generation":
            raise ValueError(f"keep {self.keep!r}: no latents are held; take keep='latents', and prefill 2 tokens")
        self.context_caches.join()
        caches = tuple(cache.fork() for cache in self.context_caches.caches)
        return Context(self.latents, self.generation.pads, caches if self.keep == "extendable" else None)

    @torch.inference_mode()
    def reload(self, context: Context) -> "DoubleDecoderSession":
        """Returns to where `context` was taken, before the first token of a block; costs 4 L_g G D C FLOPs a token."""
        caches = context.caches if self.keep == "extendable" else ()
        if caches is None:
            raise ValueError("keep 'extendable': this context cannot grow; take it from a session that is extendable")
        if len(context.pads) != self.rows:
            raise ValueError(f"a session of {self.rows} rows takes no context of {len(context.pads)}")
        self._begin(context.pads)
        if caches:
            self.context_caches.caches = [cache.fork() for cache in caches]
        self._work(self.network.generation_stack)
        latents = context.latents.to(self.network.generation_stack.device)
        self.latents = None if self.keep == "generation" else latents
        self.generation.put(latents)
        return self

    def fork(self, rows: Tensor | None = None) -> "DoubleDecoderSession":
        """As `Session.fork`; with all rows, latents and the columns read so far are shared."""
        other = DoubleDecoderSession(self.network, self.rows if rows is None else len(rows), self.keep, self.swap)
        other.context_caches, other.generation = self.context_caches.fork(rows), self.generation.fork(rows)
        other.latents = None if self.latents is None else rows_of_state(self.latents, rows)
        other.own = [rows_of_state(tokens, rows) for tokens in self.own]
        return other

    @property
    def bytes(self) -> int:
        """Bytes of keys, values and latents; tokens are not counted."""
        latents = 0 if self.latents is None else self.latents.nbytes
        return self.generation.bytes + self.context_caches.bytes + latents

    # ---- the context ------------------------------------------------------------------------------------------------

    def _read(self, tokens: Tensor) -> Tensor:
        """Reads all but the last column as context; the last opens a block."""
        if tokens.shape[1] > 1:
            self._read_context(tokens[:, :-1])
        self._work(self.network.generation_stack)
        return self.step(tokens[:, -1:])

    def _read_context(self, tokens: Tensor) -> None:
        grows = self.keep == "extendable"
        latents = self._latents(tokens, self.context_caches if grows else self._stack(self.generation.pads))
        self.generation.put(latents)
        if self.keep != "generation":
            self.latents = latents if self.latents is None else torch.cat((self.latents, latents), dim=1)

    def _read_sink(self, tokens: Tensor) -> None:
        """Makes the latent of a text's first token, which reads itself alone; it does not become context yet."""
        self.generation.put_sink(self._latents(tokens, self._stack(torch.zeros_like(self.generation.pads))))

    def _latents(self, tokens: Tensor, caches: CachedStack) -> Tensor:
        """Latents of the next tokens of the context stack, handed over to the generation stack, whose turn it is."""
        self._work(self.network.context_stack)
        latents = caches.run(self._embed(tokens))
        self._work(self.network.generation_stack)
        return latents.to(self.network.generation_stack.device)

    def _stack(self, pads: Tensor) -> CachedStack:
        return CachedStack(self.network, self.network.context_stack, pads)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.network.embed(tokens.to(self.network.table.weight.device))

    def _work(self, stack: "Stack") -> None:
        """Moves a stack, the table and the head to the device `swap`, and the other stack to the host."""
        if self.swap is None:
            return
        with torch.inference_mode(False):  # weights made in it could not be trained again
            for other in (self.network.context_stack, self.network.generation_stack):
                if other is not stack:
                    other.to("cpu")
            for part in (stack, self.network.table, self.network.output):
                if part is not None:
                    part.to(self.swap)
