"""The correction of context-ready networks: the small network F in front of the blocks, and its settings.

    c_t = F(norm(h_(t-1) + e_t))        h_(t-1): the last block's output at the previous token, 0 at a document's start

F is an MLP of GELU, 4 C inner channels and biases. Source: The Context-Ready Transformer (arXiv 2606.27538).
Shapes: B rows, T tokens, C width.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tandem.nn.block import mlp_work
from tandem.nn.mlp import MLP
from tandem.recipe import Settings

Passes = Literal["stream"] | Annotated[int, Field(ge=1)]
"""A number of passes, or as many as it takes to equal streaming."""


class CorrectionConfig(Settings):
    """The options of a context-ready network beyond those of the network it wraps."""

    correction: Literal["add", "token_blind", "concat", "block_head", "tied"] = "add"
    """c_t from h (of the previous token) and e (its own): add: F(norm(h + e)); token_blind: F(norm(h)), 0 at the first
    token; concat: F of norm(h) beside e; block_head: what the blocks added to the previous token, without F; tied: as
    add, with the last block's MLP for F."""
    correction_init: Literal["standard", "zero"] = "standard"
    """zero: the last matrix of F is 0, so that the network starts as the one it wraps, for any number of passes."""
    passes: int = Field(5, ge=1)
    """K, the most passes over a row in training."""
    passes_min: int | None = Field(2, ge=1)
    """K is drawn for every step, uniformly from here to `passes`, both included; null: always `passes`."""
    unroll: Literal["passes", "bptt"] = "passes"
    """passes: K in parallel. bptt: position by position, gradients through the whole recurrence."""
    score_passes: Passes = "stream"
    """Passes in scoring and generation: as many as it takes to equal streaming (stream), which generates in one; or a
    number K, which is another model, and generates in K, with as many caches."""
    prefill: Literal["converge", "stream"] | Annotated[int, Field(ge=1)] = "converge"
    """How a session reads its prompt: in passes until converged (converge), token by token (stream), or in so many; of
    K passes (score_passes), in those (converge) or token by token (stream)."""
    tolerance: float = Field(1e-5, ge=0)
    """Change of a correction, in any channel, below which it has converged; at least 2 eps of the blocks' input."""

    def derive(self) -> dict[str, Any]:
        if self.passes_min is not None and self.passes_min > self.passes and self.unroll == "passes":
            told = f"passes_min {self.passes_min} is more than passes {self.passes}"
            raise ValueError(f"{told}; lower passes_min, or take passes_min: null")
        if self.score_passes != "stream" and isinstance(self.prefill, int):
            told = f"prefill {self.prefill}: with score_passes {self.score_passes}, prompts are read in so many passes"
            raise ValueError(f"{told}; take prefill: converge, or score_passes: stream")
        if self.correction_init == "zero" and not self.has_own_network:
            raise ValueError(f"correction {self.correction} has no matrix of its own to set to zero")
        return super().derive()

    @property
    def has_own_network(self) -> bool:
        return self.correction in ("add", "token_blind", "concat")


def plus(e: Tensor, c: Tensor | None) -> Tensor:
    """e + c, where c = None stands for 0."""
    return e if c is None else e + c


class Correction(nn.Module):
    """c from h, the last block's output at the previous position, and e, the embedding: both (B, T, C)."""

    def __init__(self, config: Any):
        super().__init__()
        c, C = config, config.width
        self.config, self.kind = config, c.correction  # initialisation reads the settings
        self.norm = nn.Identity() if c.correction == "block_head" else nn.LayerNorm(C, eps=c.norm_eps)
        inputs = 2 * C if c.correction == "concat" else C
        self.F = MLP("gelu", C, 4 * C, bias=True, inputs=inputs) if c.has_own_network else None

    def forward(self, h: Tensor, e: Tensor, first: Tensor, last_mlp: nn.Module) -> Tensor:
        """`first` (B, T, 1): where a document starts, so that nothing is carried over."""
        F, h = self.F or last_mlp, h.masked_fill(first, 0)
        if self.kind == "block_head":
            return h
        if self.kind == "token_blind":
            return F(self.norm(h)).masked_fill(first, 0)
        return F(torch.cat((self.norm(h), e), dim=-1) if self.kind == "concat" else self.norm(h + e))

    def zero(self) -> None:
        """Makes c 0, yet able to learn: with both matrices of F at 0, no gradient would ever reach the first."""
        assert self.F is not None
        nn.init.zeros_(self.F.down.weight)
        nn.init.zeros_(self.F.down.bias)

    def work(self) -> int:
        """Multiply-adds for one token."""
        if self.kind == "block_head":
            return 0
        return mlp_work(self.config) if self.F is None else self.F.up.weight.numel() + self.F.down.weight.numel()
