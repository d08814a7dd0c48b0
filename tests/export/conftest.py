"""Tiny decoders that transformers made, and a tokenizer."""

import pytest
import torch

from tandem.corpus import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat, naïve café 東京 " * 20], 300)


@pytest.fixture(scope="session")
def foreign(tokenizer, tmp_path_factory):
    """Folder and model by name; their tables have more rows than the tokenizer has ids."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.1}
    own = {
        "llama": ("Llama", {"rope_theta": 500.0, "rms_norm_eps": 1e-3}),
        "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": False}),
        "qwen3_tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
        "mistral": ("Mistral", {"sliding_window": 5}),
        "mistral_tied": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
        "gpt2": ("GPT2", {"n_inner": 48, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}),
        "gpt2_tied": ("GPT2", {}),
    }
    made = {}
    for name, (family, settings) in own.items():
        torch.manual_seed(0)
        given = {"vocab_size": 320} | small if family == "GPT2" else shape | heads
        config = getattr(transformers, f"{family}Config")(**given | settings)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # norms, too: all of them 1 would hide a wrong place
                parameter.mul_(4) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        tokenizer.to_file(folder / "tokenizer.json")
        made[name] = folder, model
    return made
