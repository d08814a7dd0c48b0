import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.corpus import Batch, Tokenizer
from tandem.export.weights import load_exported
from tandem.recipe import UserError

NAMES = ["llama", "llama_tied", "qwen3", "qwen3_tied", "mistral", "mistral_tied", "gpt2", "gpt2_tied"]


@pytest.fixture
def llama(foreign, tmp_path):
    return shutil.copytree(foreign["llama"][0], tmp_path / "llama")


@pytest.fixture
def gpt2(foreign, tmp_path):
    return shutil.copytree(foreign["gpt2"][0], tmp_path / "gpt2")


def rewrite(path, **changes):
    described = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in described.items() if value != "absent"}))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, foreign, tokenizer):
    folder, model = foreign[name]
    network, its_tokenizer = load_exported(folder)
    V = network.vocabulary
    assert its_tokenizer.hash == tokenizer.hash
    assert (V, network.context, network.config.tied) == (tokenizer.vocabulary, 64, name.endswith("tied"))
    ids = torch.randint(0, V, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(ids).logits[..., :V]
        found = network.read(Batch(ids, ids, torch.zeros_like(ids))) @ network.head.T
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 1e-4
    assert wanted.std() > 0.1


def test_weights_in_several_files_and_of_half_the_precision_are_read(llama):
    whole, _ = load_exported(llama)
    weights = {name: value.bfloat16() for name, value in load_file(llama / "model.safetensors").items()}
    (llama / "model.safetensors").unlink()
    place = {name: f"model-{1 + n % 2}-of-2.safetensors" for n, name in enumerate(weights)}
    for file in set(place.values()):
        save_file({name: value for name, value in weights.items() if place[name] == file}, llama / file)
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    network, _ = load_exported(llama)
    for name, value in network.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-2, atol=1e-2)
    (llama / "model-2-of-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-2-of-2\.safetensors: no such file"):
        load_exported(llama)
    (llama / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"index\.json: damaged"):
        load_exported(llama)


def test_settings_of_files_before_transformers_5_are_read(llama):
    network, _ = load_exported(llama)
    rewrite(llama / "config.json", rope_parameters="absent", rope_theta=500.0, rope_scaling=None, head_dim="absent")
    assert load_exported(llama)[0].config == network.config
    assert network.config.rope_base == 500.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            "architectures = .*Qwen2.*only LlamaForCausalLM, .*GPT2LMHeadModel can be read",
        ),
        ({"architectures": "absent"}, "architectures = None"),
        ({"architectures": [{}]}, "architectures = .*only Llama"),
        ({"architectures": ["TandemForCausalLM"], "recipe": {}}, "start.run=RUN takes the weights"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "rope_type = llama3"),
        ({"rope_parameters": "absent", "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = linear"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}},
            "rope_parameters of = full_attention: all layers have the same",
        ),
        ({"rope_parameters": {"factor": 2.0}}, "factor = 2.0: rotary positions are not scaled"),
        ({"rope_scaling": "linear"}, "rope_scaling = linear: must be a mapping"),
        ({"layer_types": 3}, "layer_types = 3: must be a list"),
        ({"layer_types": [{}]}, "layer_types = .*layers read all tokens"),
        ({"max_position_embeddings": True}, "max_position_embeddings = True: must be a whole number"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0: must be a whole number, at least 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"attention_bias": True, "mlp_bias": True}, "(?s)attention_bias = True.*\n.*mlp_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True: layers read all tokens"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .*sliding"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu: the MLP has silu or swish"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"vocab_size": "absent"}, "vocab_size = None: must be"),
        ({"num_key_value_heads": 3}, r"config\.json: .*key_heads 3 does not divide heads 4"),
        ({"hidden_size": "wide"}, r"config\.json: hidden_size = 'wide'"),
        (
            {"intermediate_size": 64},
            r"weights are not those of config\.json: .*gate_proj.weight is \(48, 32\) .* not \(64, 32\)",
        ),
        ({"num_hidden_layers": 3}, "missing.*model.layers.2|model.layers.2.*missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.* unknown"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "model.layers.0.self_attn.q_norm"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window is missing"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window = 0: .* greater than"),
        (
            {"tie_word_embeddings": True},
            "lm_head.weight is not model.embed_tokens.weight: write tie_word_embeddings: false",
        ),
    ],
)
def test_what_the_decoder_can_not_be_is_refused(changes, words, llama):
    rewrite(llama / "config.json", **changes)
    with pytest.raises(UserError, match=words):
        load_exported(llama)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True: all layers scale"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False: scores are divided"),
        ({"activation_function": "relu"}, "activation_function = relu: the MLP has gelu_new or .* or gelu"),
        ({"activation_function": "silu"}, "activation_function = silu: the MLP has gelu_new"),
        ({"add_cross_attention": True}, "add_cross_attention = True: there is no second text"),
        ({"n_embd": "absent"}, "n_embd is missing"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon = 'small'"),
        ({"n_head": 3}, "width 32 is not a multiple of heads 3"),
        ({"n_positions": "absent"}, "n_positions = None: must be a whole number"),
        ({"n_positions": 32}, r"transformer.wpe.weight is \(64, 32\) in .*, not \(32, 32\)"),
        ({"n_inner": None}, r"transformer.h.0.mlp.c_fc.weight is \(32, 48\) in .*, not \(32, 128\)"),
        ({"n_layer": 3}, "transformer.h.2.ln_1.weight, .* missing"),
        ({"n_layer": 1}, "transformer.h.1.* unknown"),
        ({"tie_word_embeddings": "absent"}, "ties the head .* lm_head.weight is not transformer.wte.weight: write"),
    ],
)
def test_what_the_decoder_can_not_be_of_gpt2_is_refused(changes, words, gpt2):
    rewrite(gpt2 / "config.json", **changes)
    with pytest.raises(UserError, match=words):
        load_exported(gpt2)


def test_a_gpt2_is_read_as_its_first_files_were_written(foreign, gpt2):
    """Without a prefix and a head, with buffers, and with settings that were yet to come."""
    weights = load_file(gpt2 / "model.safetensors")
    del weights["lm_head.weight"]
    bare = {name.removeprefix("transformer."): value for name, value in weights.items()}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril() for layer in range(2)}
    bare |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    save_file(bare, gpt2 / "model.safetensors")
    later = "tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "activation_function"
    rewrite(gpt2 / "config.json", **dict.fromkeys(later, "absent"))
    network, _ = load_exported(gpt2)
    same, _ = load_exported(foreign["gpt2"][0])
    assert network.config == same.config.model_copy(update={"tied": True}) and network.config.mlp == "gelu_tanh"
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in network.state_dict().items())
    rewrite(gpt2 / "config.json", activation_function="gelu")
    assert load_exported(gpt2)[0].config.mlp == "gelu"
    save_file(bare | {"transformer.ln_f.bias": bare["ln_f.bias"].clone()}, gpt2 / "model.safetensors")
    with pytest.raises(UserError, match=r"missing; .* unknown"):
        load_exported(gpt2)


def test_a_window_is_that_of_mistral(foreign):
    """The logits above are those of transformers: 5 tokens with a token itself."""
    assert [load_exported(foreign[name][0])[0].config.window for name in ("mistral", "mistral_tied")] == [5, None]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.embed_tokens", lambda x: x[:100].clone(), r"is \(100, 32\) in torch.float32, not \(\d+, 32\)"),
        ("lm_head", lambda x: x[:100].clone(), r"is \(100, 32\)"),
        (
            "model.layers.0.self_attn.k_proj",
            lambda x: x[:, 1:].clone(),
            r"is \(16, 31\) in torch.float32, not \(16, 32\)",
        ),
        ("model.layers.0.self_attn.q_proj", lambda x: x[0, 0].clone(), r"is \(\) in"),
        ("model.layers.1.mlp.up_proj", lambda x: x.to(torch.int8), "is .* in torch.int8, not .* in floats"),
    ],
)
def test_damaged_tensors_are_named(name, change, words, llama):
    weights, name = load_file(llama / "model.safetensors"), f"{name}.weight"
    weights[name] = change(weights[name])
    save_file(weights, llama / "model.safetensors")
    with pytest.raises(UserError, match=rf"weights are not those of config\.json: {name} {words}"):
        load_exported(llama)


def test_only_what_is_missing_is_named_where_a_weight_is(llama):
    weights, name = load_file(llama / "model.safetensors"), "model.layers.0.self_attn.k_proj.weight"
    del weights[name]
    save_file(weights, llama / "model.safetensors")
    with pytest.raises(UserError, match=rf"weights are not those of config\.json: {name} missing$"):
        load_exported(llama)


def test_a_tokenizer_of_another_model_is_refused(llama):
    Tokenizer.train(["a cat, a dog, a mouse; the house of the mouse " * 20], 400).to_file(llama / "tokenizer.json")
    rewrite(llama / "config.json", vocab_size=259)
    with pytest.raises(UserError, match=r"tokenizer\.json: .* its document end .* the model's table has 259"):
        load_exported(llama)


def test_a_document_end_that_is_not_known_by_name_is_refused(llama):
    path = llama / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<done>"))
    rewrite(llama / "config.json", eos_token_id=7)
    with pytest.raises(UserError, match=r"none of its tokens is called .*eos_token_id = 7.*to <\|endoftext\|>"):
        load_exported(llama)
    rewrite(llama / "config.json", eos_token_id=None)
    assert load_exported(llama)[1].is_end_added


def test_a_document_end_that_is_not_the_one_of_the_model_is_refused(llama):
    path = llama / "tokenizer.json"
    described = json.loads(path.read_text())
    ids = described["model"]["vocab"]
    ids["</s>"] = ids.pop("x")
    path.write_text(json.dumps(described))
    for end in ids["</s>"], [9, ids["</s>"]]:
        rewrite(llama / "config.json", eos_token_id=end)
        with pytest.raises(
            UserError, match=r"holds <\|endoftext\|>, but the model ends its texts with </s> .*: rename"
        ):
            load_exported(llama)
    rewrite(llama / "config.json", eos_token_id=[ids["</s>"], described["added_tokens"][0]["id"]])
    assert load_exported(llama)[1].end == "<|endoftext|>"


def test_rows_that_no_text_needs_do_not_come_along(foreign, tokenizer):
    network, _ = load_exported(foreign["llama"][0])
    rows = network.table.weight
    assert len(rows) == 320 and network.head.shape[0] == tokenizer.vocabulary < 300
