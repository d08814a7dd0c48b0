"""Loads decoders that others trained, Llama, Mistral, Qwen3 and GPT-2, from folders as `transformers` writes them.

    decoder, tokenizer = load_foreign(Path("Qwen3-0.6B"))

All are Tandem's decoder with other settings. The first three have rotary pairs by halves, the same SwiGLU and RMSNorm,
Mistral a window, Qwen3 norms of queries and keys; GPT-2 has learned positions, LayerNorm, GELU and biases. Only the
stacking of matrices differs, and that GPT-2's are stored transposed.

    q_proj, k_proj, v_proj  ->  qkv            gate_proj, up_proj  ->  mlp.up

What the decoder does not support (scaled rotary positions, windows of some layers, biases of some matrices, quantised
weights) is refused by name. Only the tokenizer's ids have a probability; rows of the table beyond these stand for no
text and are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from tandem.corpus import Tokenizer
from tandem.corpus.tokenizer import DOCUMENT_ENDS
from tandem.export.files import CONFIG, TOKENIZER, count_in, read_config, read_tokenizer, read_weights
from tandem.networks.decoder import Decoder
from tandem.recipe import UserError


@dataclass(frozen=True)
class Architecture:
    """A decoder in the words of `transformers`: keys of config.json, and names of tensors without .weight or .bias."""

    keys: dict[str, str]
    """Setting here, or `context` -> its key, which must be there."""
    optional: dict[str, str]
    """The same, of keys that may be missing or null."""
    activation: str
    """Key of the MLP's activation."""
    mlps: dict[str, str]
    """Activation -> the MLP here; a missing key means the first."""
    settings: dict[str, Any]
    """Settings that no key tells, or none that is there."""
    prefix: str
    """Before all names but the head's; in some files before none."""
    tensors: dict[str, str]
    """Module here, outside blocks and without the head -> its tensor there."""
    blocks: str
    """Before the number of a block."""
    of_block: dict[str, str]
    """Module of a block here -> its tensors there, in the order in which they are stacked here."""
    computed: tuple[str, ...]
    """Ends of the names of tensors that follow from settings and are not read."""
    is_turned: bool = False
    """Whether the matrices of blocks are stored as (inputs, outputs)."""

    def names(self, parameter: str, prefix: str) -> list[str]:
        """Names of the tensors that are stacked in a parameter of the decoder."""
        module, _, kind = parameter.rpartition(".")
        if module == "output":
            return [f"lm_head.{kind}"]
        if module in self.tensors:
            return [f"{prefix}{self.tensors[module]}.{kind}"]
        _, layer, part = module.split(".", 2)
        return [f"{prefix}{self.blocks}.{layer}.{their}.{kind}" for their in self.of_block[part].split()]


LLAMA = Architecture(
    keys={
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "depth": "num_hidden_layers",
        "mlp_width": "intermediate_size",
        "norm_eps": "rms_norm_eps",
        "context": "max_position_embeddings",
    },
    optional={"key_heads": "num_key_value_heads", "head_width": "head_dim", "tied": "tie_word_embeddings"},
    activation="hidden_act",
    mlps={"silu": "swiglu", "swish": "swiglu"},
    settings={"positions": "halves", "tied": False},
    prefix="model.",
    tensors={"table": "embed_tokens", "norm": "norm"},
    blocks="layers",
    of_block={
        "attention_norm": "input_layernorm",
        "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.gate_proj mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
    computed=("rotary_emb.inv_freq",),
)
GPT2 = Architecture(
    keys={
        "width": "n_embd",
        "heads": "n_head",
        "depth": "n_layer",
        "norm_eps": "layer_norm_epsilon",
        "context": "n_positions",
    },
    optional={"mlp_width": "n_inner", "tied": "tie_word_embeddings"},
    activation="activation_function",
    mlps={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
    settings={"positions": "learned", "norm": "layer", "bias": True, "tied": True},
    prefix="transformer.",
    tensors={"table": "wte", "places": "wpe", "norm": "ln_f"},
    blocks="h",
    of_block={
        "attention_norm": "ln_1",
        "qkv": "attn.c_attn",
        "output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    computed=(".attn.bias", ".attn.masked_bias"),
    is_turned=True,
)
ARCHITECTURES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": replace(LLAMA, keys=LLAMA.keys | {"window": "sliding_window"}),
    "Qwen3ForCausalLM": replace(LLAMA, settings=LLAMA.settings | {"qk_norm": True}),
    "GPT2LMHeadModel": GPT2,
}
"""By name in config.json."""


def load_foreign(folder: Path) -> tuple[Decoder, Tokenizer]:
    """The decoder, on the CPU in float32, and its tokenizer.

    Raises: UserError naming the file that is missing or broken, or every setting that the decoder does not support.
    """
    described = read_config(folder)
    if refused := list(_refused(described)):
        raise UserError("\n".join(f"{folder / CONFIG}: {reason}" for reason in refused))
    architecture = ARCHITECTURES[described["architectures"][0]]
    config = _settings(architecture, described, folder / CONFIG)
    tokenizer = read_tokenizer(folder)
    end = described.get("eos_token_id")
    ends = [name for name, number in tokenizer.ends.items() if number in (end if isinstance(end, list) else [end])]
    if ends and tokenizer.end not in ends:
        raise UserError(
            f"{folder / TOKENIZER}: holds {tokenizer.end}, but the model ends its texts with {ends[0]} (eos_token_id = "
            f"{end}): rename {tokenizer.end}, which would be taken for the end"
        )
    if tokenizer.is_end_added and end is not None:
        raise UserError(
            f"{folder / TOKENIZER}: none of its tokens is called {', '.join(DOCUMENT_ENDS)}, but the model ends its "
            f"texts (eos_token_id = {end}): rename that token to {tokenizer.end}"
        )
    rows, context = (count_in(described, key, folder / CONFIG) for key in ("vocab_size", architecture.keys["context"]))
    if tokenizer.vocabulary > rows:
        raise UserError(
            f"{folder / TOKENIZER}: {tokenizer.vocabulary:,} ids, its document end {tokenizer.end} included, but the "
            f"model's table has {rows:,}: not the tokenizer of this model"
        )
    network = Decoder.unwritten(config, tokenizer.vocabulary, context)
    _fill(network, architecture, read_weights(folder), folder, rows)
    return network, tokenizer


def _refused(described: dict[str, Any]) -> Iterator[str]:
    """Reasons why the decoder cannot have these settings."""
    names: Any = described.get("architectures")
    if names not in [[name] for name in ARCHITECTURES]:
        cure = "; of a model that Tandem exported, start.run=RUN takes the weights" if "recipe" in described else ""
        yield f"architectures = {names}: only {', '.join(ARCHITECTURES)} can be read{cure}"
        return
    for key, kind in (("rope_scaling", dict), ("rope_parameters", dict), ("layer_types", list)):
        if not isinstance(value := described.get(key) or kind(), kind):
            yield f"{key} = {value}: must be a {'mapping' if kind is dict else 'list'}"
            return
    rotary, architecture = _rotary(described), ARCHITECTURES[names[0]]
    kind = rotary.get("rope_type", rotary.get("type"))
    by_layer = [key for key, value in rotary.items() if isinstance(value, dict)]
    turned = rotary.get("partial_rotary_factor", described.get("partial_rotary_factor"))
    act, scored = _activation(architecture, described), described.get("scale_attn_weights", True)
    wide = "layers read all tokens of a document, those of Mistral all of its sliding_window"
    scaled, biased = "rotary positions are not scaled here", "this decoder has biases everywhere or nowhere"
    checks: list[tuple[str, Any, bool, str]] = [
        ("rope_type", kind, kind in (None, "default"), scaled),
        ("rope_parameters of", ", ".join(by_layer), not by_layer, "all layers have the same rotary positions"),
        ("rope_scaling's factor", factor := rotary.get("factor", 1), factor in (None, 1), scaled),
        ("partial_rotary_factor", turned, turned in (None, 1), "every channel of a head turns"),
        (architecture.activation, act, act in list(architecture.mlps), f"the MLP has {' or '.join(architecture.mlps)}"),
        ("layer_types", layers := described.get("layer_types") or [], all(x == "full_attention" for x in layers), wide),
        ("scale_attn_weights", scored, bool(scored), "scores are divided by the root of the head's width"),
    ]
    unknown = {"use_sliding_window": wide, "attention_bias": biased, "mlp_bias": biased}
    unknown["scale_attn_by_inverse_layer_idx"] = "all layers scale their scores alike"
    unknown["add_cross_attention"] = "there is no second text to read"
    unknown["quantization_config"] = "weights have to be numbers, not codes"
    checks += [(key, described.get(key), not described.get(key), why) for key, why in unknown.items()]
    yield from (f"{key} = {value}: {why}" for key, value, is_fine, why in checks if not is_fine)


def _rotary(described: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, of files written before and after transformers 5."""
    base = {"rope_theta": described["rope_theta"]} if "rope_theta" in described else {}
    return base | (described.get("rope_scaling") or {}) | (described.get("rope_parameters") or {})


def _activation(architecture: Architecture, described: dict[str, Any]) -> Any:
    return described.get(architecture.activation, next(iter(architecture.mlps)))


def _settings(architecture: Architecture, described: dict[str, Any], path: Path) -> Decoder.Config:
    """The decoder's settings. Raises: UserError for what is missing, or no setting of a decoder."""
    try:
        given = {name: described[key] for name, key in architecture.keys.items() if name != "context"}
        given |= {name: described[key] for name, key in architecture.optional.items() if described.get(key) is not None}
        base = float(_rotary(described).get("rope_theta", 10_000))
        mlp = architecture.mlps[_activation(architecture, described)]
        return Decoder.Config.model_validate(architecture.settings | given | {"rope_base": base, "mlp": mlp})
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing") from error
    except ValidationError as error:
        first = error.errors()[0]
        names = architecture.keys | architecture.optional
        key = "".join(f"{names.get(str(name), name)} = {first['input']!r}: " for name in first["loc"])
        raise UserError(f"{path}: {key}{first['msg']}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: not the settings of a decoder: {error}") from error


def _fill(network: Decoder, architecture: Architecture, weights: dict[str, Tensor], folder: Path, rows: int) -> None:
    """Puts `weights` into the network; every one of them must be used, and finite."""
    weights = {name: weight for name, weight in weights.items() if not name.endswith(architecture.computed)}
    prefix = architecture.prefix if any(name.startswith(architecture.prefix) for name in weights) else ""
    if network.config.tied and (head := weights.pop("lm_head.weight", None)) is not None:
        (table,) = architecture.names("table.weight", prefix)
        if not torch.equal(head, weights.get(table, head)):
            raise UserError(
                f"{folder}: {CONFIG} ties the head to the table, yet lm_head.weight is not {table}: "
                "write tie_word_embeddings: false there, if the head is its own"
            )
    if odd := [name for name, weight in weights.items() if not weight.float().isfinite().all()]:
        told = f"{', '.join(odd[:3])}: not all of its numbers are finite"
        raise UserError(f"{folder}: {told}; these weights are damaged, or those of a training that failed")
    state, missing = {}, []
    for name, parameter in network.named_parameters():
        module: Any = network.get_submodule(name.rpartition(".")[0])
        theirs, (length, *width) = architecture.names(name, prefix), parameter.shape
        is_table = name in ("table.weight", "output.weight")
        is_turned = architecture.is_turned and name.startswith("stack.")
        lengths, found = [rows] if is_table else module.parts if len(theirs) > 1 else [length], []
        for their, part in zip(theirs, lengths, strict=True):
            shape = (*width, part) if is_turned else (part, *width)
            if (weight := weights.pop(their, None)) is None:
                missing.append(their)
            elif weight.shape != shape or not weight.is_floating_point():
                told = f"{their} is {tuple(weight.shape)} in {weight.dtype}, not {shape} in floats"
                raise UserError(f"{folder}: weights are not those of {CONFIG}: {told}")
            else:
                found.append(weight.float().t() if is_turned else weight.float())
        if not missing:
            state[name] = torch.cat(found)
            if is_table:  # filled up with rows of zeros, or cut
                state[name] = torch.nn.functional.pad(state[name], (0, 0, 0, length - rows))
    if missing or weights:
        both = ("missing", missing), ("unknown", list(weights))
        told = [f"{', '.join(names[:3])} {what}" for what, names in both if names]
        raise UserError(f"{folder}: weights are not those of {CONFIG}: {'; '.join(told)}")
    network.load_state_dict(state)
