"""Makes a model folder one that `transformers` can read without Tandem.

    modeling_tandem.py, tandem_*.py     the source of the network (export/bundle.py), as one model (export/modelling.py)
    tokenizer_config.json               for AutoTokenizer; with tokenizer.json, a fast tokenizer
    generation_config.json              where a text ends

and keys of config.json by which the Auto classes find these. Nothing here needs `transformers`.
"""

import functools
import json
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.corpus import Tokenizer
from tandem.export.bundle import bundle
from tandem.networks.network import Network

MODEL = "modeling_tandem"
TEMPLATE = "tandem.export.modelling"


def keys(network: Network, tokenizer: Tokenizer) -> dict[str, Any]:
    """Keys of config.json that the Auto classes, `generate` and lm-eval read."""
    return {
        "model_type": "tandem",
        "architectures": ["TandemForCausalLM"],
        "auto_map": {"AutoConfig": f"{MODEL}.TandemConfig", "AutoModelForCausalLM": f"{MODEL}.TandemForCausalLM"},
        "dtype": "float32",
        "vocab_size": network.vocabulary,
        "max_position_embeddings": network.context,
        "tie_word_embeddings": False,  # the network ties its own weights
        **_ends(tokenizer),
    }


def write(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes source, tokenizer_config.json and generation_config.json."""
    for name, source in model_source(type(network)).items():
        (folder / name).write_text(source, encoding="utf-8")
    end = tokenizer.end
    words: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": end, "eos_token": end, "pad_token": end},
        "padding_side": "left",
        "split_special_tokens": True,  # special tokens spelled out in a text are text
        "clean_up_tokenization_spaces": False,
    }
    if network.longest is not None:
        words["model_max_length"] = network.longest
    for name, record in ("tokenizer_config.json", words), ("generation_config.json", _ends(tokenizer)):
        (folder / name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def refusal(network: type) -> str:
    """Why a network cannot be exported; empty if it can."""
    try:
        model_source(network)
    except LookupError as error:
        return f"{network.__name__} cannot be exported: {error}"
    return ""


@functools.cache
def model_source(network: type) -> dict[str, str]:
    """The source files, by name, of a model with this network."""
    module, name = network.__module__, network.__name__
    files = bundle({TEMPLATE: {"TandemForCausalLM"}, module: {name}}, {TEMPLATE: MODEL})
    files[f"{MODEL}.py"] += f"\n\nfrom .{module.replace('.', '_')} import {name} as _  # noqa: E402 - registers it\n"
    said = f"# Of Tandem {__version__} (Apache-2.0), written when this model was exported.\n"
    return {name: said + source for name, source in files.items()}


def _ends(tokenizer: Tokenizer) -> dict[str, int]:
    """A text begins after the document end of the one before it, and ends with its own."""
    return {"bos_token_id": tokenizer.eos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.eos}
