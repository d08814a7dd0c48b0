"""Loads decoders that others trained, Llama and Qwen3, from folders as `transformers` writes them.

    decoder, tokenizer = load_foreign(Path("Qwen3-0.6B"))

Both are Tandem's decoder with other settings: rotary pairs by halves, the same SwiGLU and RMSNorm, for Qwen3 norms of
queries and keys. Only the stacking of matrices differs.

    q_proj, k_proj, v_proj  ->  qkv            gate_proj, up_proj  ->  mlp.up

What the decoder does not support (scaled rotary positions, sliding windows, biases, quantised weights) is refused by
name. Only the tokenizer's ids have a probability; rows of the table beyond these stand for no text and are left out.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from tandem.corpus import Tokenizer
from tandem.corpus.tokenizer import DOCUMENT_ENDS
from tandem.export.files import CONFIG, TOKENIZER, count_in, read_config, read_tokenizer, read_weights
from tandem.networks.decoder import Decoder
from tandem.networks.network import padded
from tandem.recipe import UserError

ARCHITECTURES: dict[str, dict[str, Any]] = {"LlamaForCausalLM": {}, "Qwen3ForCausalLM": {"qk_norm": True}}
"""Name in config.json -> settings that it implies."""


def load_foreign(folder: Path) -> tuple[Decoder, Tokenizer]:
    """The decoder, on the CPU in float32, and its tokenizer.

    Raises: UserError naming the file that is missing or broken, or every setting that the decoder does not support.
    """
    described = read_config(folder)
    config = _settings(described, folder / CONFIG)
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
    rows, context = (count_in(described, key, folder / CONFIG) for key in ("vocab_size", "max_position_embeddings"))
    if tokenizer.vocabulary > rows:
        raise UserError(
            f"{folder / TOKENIZER}: {tokenizer.vocabulary:,} ids, its document end {tokenizer.end} included, but the "
            f"model's table has {rows:,}: not the tokenizer of this model"
        )
    network = Decoder.unwritten(config, tokenizer.vocabulary, context)
    _fill(network, read_weights(folder), folder, rows)
    return network, tokenizer


def _settings(described: dict[str, Any], path: Path) -> Decoder.Config:
    """The decoder's settings. Raises: UserError with a line for each that it does not support."""
    if refused := list(_refused(described)):
        raise UserError("\n".join(f"{path}: {reason}" for reason in refused))
    (architecture,) = described["architectures"]
    try:
        return Decoder.Config(
            width=described["hidden_size"],
            heads=described["num_attention_heads"],
            key_heads=described.get("num_key_value_heads") or described["num_attention_heads"],
            head_width=described.get("head_dim") or described["hidden_size"] // described["num_attention_heads"],
            depth=described["num_hidden_layers"],
            mlp_width=described["intermediate_size"],
            norm_eps=float(described["rms_norm_eps"]),
            positions="halves",
            rope_base=float(_rotary(described).get("rope_theta", 10_000)),
            tied=bool(described.get("tie_word_embeddings", False)),
            **ARCHITECTURES[architecture],
        )
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = f"{first['loc'][0]} = {first['input']!r}: " if first["loc"] else ""
        raise UserError(f"{path}: {key}{first['msg']}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: not the settings of a decoder: {error}") from error


def _refused(described: dict[str, Any]) -> Iterator[str]:
    """Reasons why the decoder cannot have these settings."""
    names = described.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        cure = "; of a model that Tandem exported, start.run=RUN takes the weights" if "recipe" in described else ""
        yield f"architectures = {names}: only {' and '.join(ARCHITECTURES)} can be read{cure}"
        return
    for key, kind in (("rope_scaling", dict), ("rope_parameters", dict), ("layer_types", list)):
        if not isinstance(value := described.get(key) or kind(), kind):
            yield f"{key} = {value}: must be a {'mapping' if kind is dict else 'list'}"
            return
    rotary = _rotary(described)
    kind = rotary.get("rope_type", rotary.get("type"))
    by_layer = [key for key, value in rotary.items() if isinstance(value, dict)]
    turned = rotary.get("partial_rotary_factor", described.get("partial_rotary_factor"))
    wide, scaled = "layers read all tokens of a document", "rotary positions are not scaled here"
    biased = "this decoder has biases everywhere or nowhere"
    checks: list[tuple[str, Any, bool, str]] = [
        ("rope_type", kind, kind in (None, "default"), scaled),
        ("rope_parameters of", ", ".join(by_layer), not by_layer, "all layers have the same rotary positions"),
        ("rope_scaling's factor", factor := rotary.get("factor", 1), factor in (None, 1), scaled),
        ("partial_rotary_factor", turned, turned in (None, 1), "every channel of a head turns"),
        ("hidden_act", act := described.get("hidden_act", "silu"), act in ("silu", "swish"), "the MLP is swiglu"),
        ("layer_types", layers := described.get("layer_types") or [], all(x == "full_attention" for x in layers), wide),
    ]
    unknown = {"use_sliding_window": wide, "attention_bias": biased, "mlp_bias": biased}
    unknown["quantization_config"] = "weights have to be numbers, not codes"
    checks += [(key, described.get(key), not described.get(key), why) for key, why in unknown.items()]
    yield from (f"{key} = {value}: {why}" for key, value, is_fine, why in checks if not is_fine)


def _rotary(described: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings, of files written before and after transformers 5."""
    base = {"rope_theta": described["rope_theta"]} if "rope_theta" in described else {}
    return base | (described.get("rope_scaling") or {}) | (described.get("rope_parameters") or {})


def _fill(network: Decoder, weights: dict[str, Tensor], folder: Path, rows: int) -> None:
    """Puts `weights` into the network; every one of them must be used, and finite."""
    if network.config.tied and (head := weights.pop("lm_head.weight", None)) is not None:
        table = weights.get("model.embed_tokens.weight", head)
        if not torch.equal(head, table):
            raise UserError(
                f"{folder}: {CONFIG} has tie_word_embeddings, yet lm_head.weight is not model.embed_tokens.weight: "
                "write tie_word_embeddings: false there, if the head is its own"
            )
    if odd := [name for name, weight in weights.items() if not weight.float().isfinite().all()]:
        told = f"{', '.join(odd[:3])}: not all of its numbers are finite"
        raise UserError(f"{folder}: {told}; these weights are damaged, or those of a training that failed")
    state, missing = {}, []
    for name, theirs in _places(network):
        module: Any = network.get_submodule(name.removesuffix(".weight"))
        is_table, (*here, width) = name in ("table.weight", "output.weight"), module.weight.shape
        lengths = [rows] if is_table else getattr(module, "parts", here)
        shapes = [(length, width) for length in lengths] or [(width,)]
        found = []
        for their, shape in zip(theirs, shapes, strict=True):
            if (weight := weights.pop(their, None)) is None:
                missing.append(their)
            elif weight.shape != shape or not weight.is_floating_point():
                told = f"{their} is {tuple(weight.shape)} in {weight.dtype}, not {shape} in floats"
                raise UserError(f"{folder}: weights are not those of {CONFIG}: {told}")
            else:
                found.append(weight.float())
        if not missing:
            state[name] = torch.cat(found)
            if is_table:  # filled up with rows of zeros, or cut
                state[name] = torch.nn.functional.pad(state[name], (0, 0, 0, padded(network.vocabulary) - rows))
    left = [name for name in weights if not name.endswith("rotary_emb.inv_freq")]
    if missing or left:
        told = [f"{', '.join(names[:3])} {what}" for what, names in (("missing", missing), ("unknown", left)) if names]
        raise UserError(f"{folder}: weights are not those of {CONFIG}: {'; '.join(told)}")
    network.load_state_dict(state)


def _places(network: Decoder) -> Iterator[tuple[str, list[str]]]:
    """Yields (name of a parameter here, names of the tensors there that are stacked in it)."""
    yield "table.weight", ["model.embed_tokens.weight"]
    for layer in range(network.config.depth):
        own: Callable[[str], str] = f"stack.{layer}.{{}}.weight".format
        their: Callable[[str], str] = f"model.layers.{layer}.{{}}.weight".format
        yield own("attention_norm"), [their("input_layernorm")]
        yield own("qkv"), [their(f"self_attn.{part}_proj") for part in "qkv"]
        if network.config.qk_norm:
            yield own("q_norm"), [their("self_attn.q_norm")]
            yield own("k_norm"), [their("self_attn.k_norm")]
        yield own("output"), [their("self_attn.o_proj")]
        yield own("mlp_norm"), [their("post_attention_layernorm")]
        yield own("mlp.up"), [their("mlp.gate_proj"), their("mlp.up_proj")]
        yield own("mlp.down"), [their("mlp.down_proj")]
    yield "norm.weight", ["model.norm.weight"]
    if not network.config.tied:
        yield "output.weight", ["lm_head.weight"]
