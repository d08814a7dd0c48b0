"""A Tandem network as a model of `transformers`: logits, and `generate` with the network's own session as its cache.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model(input_ids, attention_mask).logits                        (B, T, V) float32
    model.generate(**tokenizer(["Once", "The"], padding=True, return_tensors="pt"), num_beams=4)

A row is one text, with padding on one side or both. This module is written for export (export/bundle.py): in the folder
of a model it stands beside the source of the network, and Tandem need not be installed.

Shapes: B rows, T tokens, C width, V ids of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from tandem.corpus import IGNORE, Batch
from tandem.networks.network import Session
from tandem.recipe import registered

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What transformers calls the cache of an output: `past_key_values` before 5.24."""

LAST = slice(-1, None)
"""The columns whose logits `generate` asks for."""


class TandemConfig(PretrainedConfig):
    """`network`: name and settings, all of them; `vocabulary` and `context`: what it was trained with."""

    model_type = "tandem"
    has_no_defaults_at_init = True
    attribute_map = {"vocab_size": "vocabulary"}  # the name that beam search uses


class SessionCache:
    """A session of the network, where `generate` expects a cache; `begun`: the mask (B, T) of what it began with."""

    is_compileable = False
    is_linear = (False,)
    """No layer is linear attention: `generate` cuts off what a cache that it is given has read."""

    def __init__(self, session: Session, begun: Tensor):
        self.session, self.begun, self.columns = session, begun, begun.shape[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of a row so far, padding included."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b continues from what row beam_idx[b] has read."""
        self.session, self.begun = self.session.fork(beam_idx), self.begun[beam_idx]


class TandemForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TandemConfig
    base_model_prefix = "network"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _is_stateful = True
    """A session cannot take back what it has read, as assisted generation would need."""

    def __init__(self, config: Any):
        super().__init__(config)
        settings = dict(config.network)
        cls: Any = registered("network")[settings.pop("name")]
        self.network = cls(cls.Config(**settings), config.vocabulary, config.context)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: modules draw their own weights as they are built."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> torch.nn.Module:
        """The table of token embeddings."""
        return getattr(self.network, "wrapped", self.network).table

    def get_output_embeddings(self) -> torch.nn.Module | None:
        """The head, where it is not the table."""
        return getattr(getattr(self.network, "wrapped", self.network), "output", None)

    def resize_token_embeddings(self, *given: Any, **settings: Any) -> Any:
        """Raises: ValueError: a network knows its vocabulary from the start."""
        raise ValueError(f"resize_token_embeddings: this network has the {self.config.vocabulary} ids of its tokenizer")

    def _set_gradient_checkpointing(self, enable: bool = True, *given: Any, **settings: Any) -> None:
        """Recomputes blocks in the backward, as `training.recompute` does."""
        for module in (self.network, getattr(self.network, "wrapped", self.network)):
            module.recompute = enable

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: SessionCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        tokenizer: Any = None,
        cache: SessionCache | None = None,
        **given: None,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V) of what follows each token, 0 at padding; a tuple with `return_dict=False`.

        Args:
            attention_mask: (B, T), 1 at text and 0 at padding; for rows that continue, of all tokens so far.
            logits_to_keep: gives logits of only this many last tokens, 0 for all, or of these columns (N,).
            labels: (B, T), the tokens again, -100 where there is no target: then `loss` is nats per token, over
                the ids of the vocabulary alone.
            num_items_in_batch: targets of all parts of a step, by which `loss` is divided in place of its own: so
                `Trainer` accumulates the step of one batch.
            tokenizer: unused; `generate` passes on the one with which it finds `stop_strings`.
            cache: that of an earlier call with `use_cache`; it continues with `input_ids`, in place.
                `past_key_values`: the same, by its name before transformers 5.24.
            given: what other models take (`inputs_embeds`, `output_hidden_states`, ...), as None or False.
        Raises: ValueError for a mask with holes, and for more tokens than the network has positions for. A network
            that reads a prompt in another way than a text also raises it for a prompt's own logits beside its cache,
            and for `generate` without a cache; one that can only continue a prompt, for the logits of a text.
        """
        if asked := [name for name, value in given.items() if value is not None and value is not False]:
            raise ValueError(f"{', '.join(asked)}: this model takes none; it has tokens, masks, labels and a cache")
        if cache is not None and past_key_values is not None:
            raise ValueError("cache, past_key_values: two names of one thing; give one of them")
        cache = past_key_values if cache is None else cache
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if cache is None and self.network.divides:
            self._check_reading(use_cache, kept)
        if cache is None and not use_cache:
            logits = self._read(input_ids, _mask(input_ids, attention_mask), kept)
        elif cache is None:
            cache, logits = self._begin(input_ids, _mask(input_ids, attention_mask), kept)
        else:
            logits = self._go_on(cache, input_ids, attention_mask, kept)
        loss = None
        if labels is not None:
            asked = labels[:, 1:]
            if attention_mask is not None:  # nothing predicts the first token after padding
                asked = asked.masked_fill(attention_mask[:, -labels.shape[1] : -1] == 0, IGNORE)
            nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), asked.flatten(), ignore_index=IGNORE, reduction="sum")
            loss = nats / ((asked != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})  # type: ignore[arg-type]

    def _check_reading(self, use_cache: bool | None, kept: slice | Tensor) -> None:
        """A prompt begins a cache, and has only the logits of what follows it; any other input is a text."""
        if use_cache and kept != LAST:
            raise ValueError(
                "logits_to_keep: with a cache this network reads input_ids as a prompt, and has logits of what follows "
                "it alone: ask for logits_to_keep=1, or for those of a text with use_cache=False"
            )
        if use_cache is False and kept == LAST:
            raise ValueError(
                "use_cache: this network reads a prompt in another way than a text, and without a cache there is no "
                "prompt: generate with use_cache=True"
            )
        if self.network.suffixes_only and not use_cache:
            raise ValueError(
                "input_ids: this network has logits of what follows a prompt alone, none of a text and so no loss of "
                "labels: ask for use_cache=True with logits_to_keep=1, and train it under Tandem"
            )

    def _read(self, tokens: Tensor, mask: Tensor, kept: slice | Tensor) -> Tensor:
        """Reads all texts at once, moved to the start of their rows and back, so no text sees what is after it."""
        T, n, longest = tokens.shape[1], int(mask.sum(1).max()), self.network.longest
        if longest is not None and longest < n:
            raise ValueError(f"input_ids: {n} tokens a row; this network has learned positions for {longest}")
        first, columns = mask.int().argmax(1, keepdim=True), torch.arange(T, device=tokens.device)
        moved = tokens.gather(1, (columns[:n] + first).clamp_max(T - 1))
        # As in training under Tandem, a key draws what is random in it: dropout, the blocks of a double decoder
        key = int(torch.randint(1 << 62, ())) if self.training and torch.is_grad_enabled() else None
        hidden = self.network.read(Batch(moved, moved, torch.zeros_like(moved, device="cpu"), key=key))
        back = (columns - first).clamp(0, n - 1)[:, kept]
        hidden = hidden.gather(1, back[..., None].expand(-1, -1, hidden.shape[-1]))
        return self._probable(hidden @ self.network.head.T).masked_fill(~mask[:, kept, None], 0)

    def _begin(self, tokens: Tensor, mask: Tensor, kept: slice | Tensor) -> tuple[SessionCache, Tensor]:
        cache = SessionCache(self.network.session(len(tokens)), mask)
        texts = [row[shown].tolist() for row, shown in zip(tokens, mask, strict=True)]
        logits = self._probable(cache.session.prefill(texts))[:, None].clone()  # a session's may not be written to
        return cache, logits if kept == LAST else self._read(tokens, mask, kept)

    def _go_on(self, cache: SessionCache, tokens: Tensor, mask: Tensor | None, kept: slice | Tensor) -> Tensor:
        if not hasattr(cache, "session"):
            raise ValueError(f"{CACHE}: has to come from a call of this model with use_cache=True")
        columns = cache.columns + tokens.shape[1]
        if mask is not None:
            read = F.pad(cache.begun, (0, columns - cache.begun.shape[1]), value=True)[:, -mask.shape[1] :]
            if not torch.equal(mask.bool(), read):
                raise ValueError(
                    "attention_mask: differs from that of the first call, or has padding after it: a session has read "
                    "what it has read"
                )
        cache.columns = columns
        pieces = (tokens,) if kept == LAST else tokens.split(1, dim=1)
        logits = torch.stack([self._probable(cache.session.step(piece)) for piece in pieces], dim=1)
        return logits[:, kept]

    def _probable(self, logits: Tensor) -> Tensor:
        """Logits of the ids of the vocabulary: spare rows of a table are no text."""
        return logits[..., : self.config.vocabulary].float()


def _mask(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """(B, T) bool: True where a row's one text is."""
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    shown = mask.bool()
    begins = shown & ~F.pad(shown, (1, 0))[:, :-1]
    if shown.shape[1] > tokens.shape[1]:
        raise ValueError(
            f"attention_mask: for {shown.shape[1]} tokens a row, of which input_ids has {tokens.shape[1]}: give the "
            "cache of the call with those before, which makes one with use_cache=True"
        )
    if shown.shape != tokens.shape or (begins.sum(1) != 1).any():
        raise ValueError("attention_mask: a row has to be one text, with padding before or after it")
    return shown
