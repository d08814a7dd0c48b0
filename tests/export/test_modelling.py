"""The model that is exported, as it stands here: in a process with Tandem, where it is quick to ask."""

import math

import pytest
import torch

from tandem.recipe import registered
from tandem.testing.cases import document, pack, shipped

pytest.importorskip("transformers")

from transformers import DynamicCache, PreTrainedTokenizerFast, Trainer

from tandem.export.modelling import CACHE, TandemConfig, TandemForCausalLM

DIVIDING = ["double_decoder", "encoder_decoder", "prefix_decoder"]
IDS = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 3]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def model_of(name, tokenizer):
    cls, vocabulary = registered("network")[name], tokenizer.vocabulary
    settings = next(iter(cls.tiny().values()))
    written = {"name": name, **settings.model_dump()}
    model = TandemForCausalLM(
        TandemConfig(network=written, vocabulary=vocabulary, context=40, eos_token_id=0, pad_token_id=0)
    )
    model.network = cls(settings, vocabulary, 40, torch.Generator().manual_seed(0))
    return model.eval()


@pytest.fixture(scope="module")
def decoder(tokenizer):
    return model_of("decoder", tokenizer)


def test_texts_go_on_to_a_stop_string(decoder, tokenizer, tmp_path):
    tokenizer.to_file(tmp_path / "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    free = decoder.generate(IDS[:1], max_new_tokens=6, do_sample=False)[0]
    stop = theirs.decode(free[5:6])
    found = decoder.generate(IDS[:1], max_new_tokens=6, do_sample=False, stop_strings=[stop], tokenizer=theirs)[0]
    assert len(found) < len(free) and theirs.decode(found).endswith(stop)


def test_an_answer_is_a_tuple_where_that_is_asked(decoder):
    with torch.no_grad():
        logits = decoder(IDS).logits
        assert torch.equal(decoder(IDS, return_dict=False)[0], logits)
        loss, again, cache = decoder(IDS, use_cache=True, labels=IDS, return_dict=False)
    assert loss.ndim == 0 and torch.equal(again, logits) and cache.get_seq_length() == 4


def test_generate_goes_on_from_the_cache_that_it_returned(decoder):
    asked = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    first = decoder.generate(IDS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    ids = torch.cat((first.sequences, IDS), dim=1)
    mask = torch.cat((MASK, torch.ones_like(IDS), torch.ones_like(IDS)), dim=1)
    wanted = decoder.generate(ids, attention_mask=mask, **asked)
    assert torch.equal(decoder.generate(ids, attention_mask=mask, **{CACHE: first[CACHE]}, **asked), wanted)


@torch.no_grad()
def test_a_loss_asks_no_token_of_padding_and_parts_add_up(decoder):
    flipped = IDS.clone()
    flipped[1] = IDS[1].roll(2)
    alone = [decoder(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in (IDS[:1], IDS[1:, 2:])]
    for ids, mask in (IDS, MASK), (flipped, MASK.flip(1)):
        labels = ids.masked_fill(mask == 0, -100)
        assert torch.allclose(decoder(ids, mask, labels=labels).loss, sum(alone) / 4)  # three targets, and one
        parts = [decoder(ids[[b]], mask[[b]], labels=labels[[b]], num_items_in_batch=4).loss for b in range(2)]
        assert decoder.accepts_loss_kwargs and torch.allclose(sum(parts), sum(alone) / 4)  # as Trainer accumulates


def test_trainer_decays_no_norm_of_a_block(decoder):
    decayed = Trainer.get_decay_parameter_names(None, decoder)  # it needs no self
    assert decayed == [name for name, parameter in decoder.named_parameters() if parameter.ndim > 1]


@torch.no_grad()
def test_a_mask_hides_nothing_that_a_cache_has_read(decoder):
    begun = decoder(IDS, MASK, use_cache=True, logits_to_keep=1)
    begun.logits[:, :, 0] = 0.0  # as loops of one's own do
    longer = torch.cat((MASK, torch.ones_like(MASK)), dim=1)
    for place in (0, 2), (1, 0), (1, 5):
        other = longer.clone()
        other[place] = 1 - other[place]
        with pytest.raises(ValueError, match="attention_mask: differs from that of the first call"):
            decoder(IDS, other, past_key_values=begun.past_key_values)
    begun.past_key_values.reorder_cache(torch.tensor([1, 0]))
    whole = decoder(IDS.flip(0), longer.flip(0), past_key_values=begun.past_key_values).logits
    again = decoder(IDS, MASK, use_cache=True).past_key_values
    assert torch.equal(decoder(IDS, torch.ones_like(IDS), cache=again).logits, whole.flip(0))
    with pytest.raises(ValueError, match=r"(past_key_values|cache): has to come from a call of this model"):
        decoder(IDS, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache, past_key_values: two names of one thing"):
        decoder(IDS, past_key_values=again, cache=again)


KEPT = {0: slice(None), 1: slice(-1, None), 2: slice(-2, None), 9: slice(None), (0, 3): [0, 3]}


@pytest.mark.parametrize("keep", KEPT)
def test_logits_are_kept_of_so_many_last_tokens_or_of_those_at_indices(keep, decoder):
    longer = torch.cat((MASK, torch.ones_like(MASK)), dim=1)

    @torch.no_grad()
    def asked(keep):
        read = decoder(IDS, MASK, logits_to_keep=keep)
        begun = decoder(IDS, MASK, use_cache=True, logits_to_keep=keep)
        gone_on = decoder(IDS, longer, past_key_values=begun.past_key_values, logits_to_keep=keep)
        return read.logits, begun.logits, gone_on.logits

    given = torch.tensor(keep) if isinstance(keep, tuple) else keep
    for found, whole in zip(asked(given), asked(0), strict=True):
        assert torch.allclose(found, whole[:, KEPT[keep]], atol=1e-5)


@pytest.mark.parametrize("name", shipped())
def test_the_embeddings_of_tokens_are_found(name, tokenizer):
    model = model_of(name, tokenizer)
    table = model.get_input_embeddings()
    assert torch.equal(table(IDS), model.network.embed(IDS)) and table.weight.shape[0] >= tokenizer.vocabulary


@pytest.mark.parametrize("name", shipped())
def test_a_new_model_knows_nothing(name):
    """Its weights are drawn as in training; at PyTorch's own deviations its logits lie far apart."""
    cls = registered("network")[name]
    written = {"name": name, **cls.Config(width=64, heads=4).model_dump()}
    torch.manual_seed(0)
    model = TandemForCausalLM._from_config(TandemConfig(network=written, vocabulary=300, context=40))
    logits = model(IDS, MASK, use_cache=True, logits_to_keep=1).logits
    assert -logits.log_softmax(-1).mean().item() < math.log(300) + 0.1


@pytest.mark.parametrize("name", DIVIDING)
def test_a_loop_that_keeps_the_cache_draws_what_generate_draws(name, tokenizer):
    model = model_of(name, tokenizer)
    wanted = model.generate(IDS, attention_mask=MASK, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    with torch.no_grad():
        out = model(IDS, MASK, use_cache=True, logits_to_keep=1)
        drawn, mask = [], MASK
        for _ in range(5):
            logits = out.logits[:, -1].clone()
            logits[:, 0] = -torch.inf  # `min_new_tokens`
            drawn.append(logits.argmax(-1))
            mask = torch.cat((mask, torch.ones(2, 1, dtype=mask.dtype)), dim=1)
            out = model(drawn[-1][:, None], mask, past_key_values=out.past_key_values, use_cache=True)
    assert torch.stack(drawn, dim=1).tolist() == wanted[:, 4:].tolist()


def test_training_draws_the_blocks_of_a_double_decoder_anew(tokenizer):
    model, ids = model_of("double_decoder", tokenizer), torch.tensor([document(30, 1)])
    losses = lambda: {model(ids, labels=ids).loss.item() for _ in range(4)}
    assert len(losses()) == 1
    model.train()
    torch.manual_seed(0)
    drawn = losses()
    assert len(drawn) == 4
    torch.manual_seed(0)
    assert losses() == drawn
    with torch.no_grad():
        assert len(losses()) == 1


@pytest.mark.parametrize("name", DIVIDING)
def test_a_cache_beside_logits_of_another_reading_is_refused(name, tokenizer):
    model = model_of(name, tokenizer)
    for how in {}, {"logits_to_keep": 2}, {"logits_to_keep": torch.tensor([3])}, {"labels": IDS}:
        with pytest.raises(ValueError, match=r"logits_to_keep: .* logits_to_keep=1"):
            model(IDS, MASK, use_cache=True, **how)


@pytest.mark.parametrize("name", DIVIDING)
def test_prompts_are_not_read_as_texts_are_scored(name, tokenizer):
    model = model_of(name, tokenizer)
    for how in {}, {"num_beams": 2}:
        with pytest.raises(ValueError, match=r"use_cache: .* use_cache=True"):
            model.generate(IDS, attention_mask=MASK, max_new_tokens=2, use_cache=False, **how)
    if name == "encoder_decoder":  # which has no logits of a whole text
        for how in {}, {"use_cache": False}, {"labels": IDS}:
            with pytest.raises(ValueError, match=r"input_ids: .* use_cache=True"):
                model(IDS, MASK, **how)
    else:
        assert model(IDS, MASK, use_cache=False).logits.shape[:2] == IDS.shape
        assert model(IDS, MASK, use_cache=False, logits_to_keep=3).logits.shape[:2] == (2, 3)


def test_what_other_models_take_is_refused_unless_it_is_nothing(decoder):
    with torch.no_grad():
        given = {"inputs_embeds": None, "output_attentions": False, "position_ids": None}
        assert torch.equal(decoder(IDS, **given).logits, decoder(IDS).logits)
    with pytest.raises(ValueError, match="output_hidden_states, inputs_embeds: this model takes none"):
        decoder(IDS, output_hidden_states=True, inputs_embeds=torch.zeros(1), position_ids=None)
    with pytest.raises(ValueError, match=r"of which input_ids has 1: give the cache .* use_cache=True"):
        decoder(IDS[:, -1:], MASK)
    with pytest.raises(ValueError, match="the 285 ids of its tokenizer"):
        decoder.resize_token_embeddings(310)


def test_padding_takes_no_learned_position(tokenizer):
    settings = registered("network")["decoder"].tiny()["gpt2"]
    written = {"name": "decoder", **settings.model_dump()}
    model = TandemForCausalLM(TandemConfig(network=written, vocabulary=tokenizer.vocabulary, context=4)).eval()
    ids, mask = torch.nn.functional.pad(IDS, (3, 2)), torch.nn.functional.pad(MASK, (3, 2))
    with torch.no_grad():
        assert torch.equal(model(ids, mask).logits[:, 3:-2], model(IDS, MASK).logits)
        with pytest.raises(ValueError, match="5 tokens a row; this network has learned positions for 4"):
            model(torch.nn.functional.pad(IDS, (1, 0)))


@pytest.mark.parametrize("name", ["decoder", "context_ready"])
def test_blocks_are_recomputed_where_transformers_asks_for_checkpoints(name, tokenizer, monkeypatch):
    model, calls = model_of(name, tokenizer).train(), []
    for block in model.network.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(0))

    def gradients():
        calls.clear()
        model(IDS, MASK, labels=IDS).loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return found, len(calls)

    (plain, once), _ = gradients(), model.gradient_checkpointing_enable()
    again, twice = gradients()
    assert twice > once and all(map(torch.equal, plain, again))
    model.gradient_checkpointing_disable()
    assert gradients()[1] == once


def test_a_head_of_its_own_is_told(tokenizer):
    tied, own = (registered("network")["decoder"].tiny()[name] for name in ("house", "qwen"))
    models = [TandemForCausalLM(TandemConfig(network={"name": "decoder", **s.model_dump()}, vocabulary=300, context=40))
              for s in (tied, own)]  # fmt: skip
    assert [model.get_output_embeddings() for model in models] == [None, models[1].network.output]


@pytest.mark.parametrize("name", ["sps", "double_decoder"])
def test_a_wrapper_around_a_matrix_that_is_read_in_parts_is_refused(name, tokenizer):
    network = model_of(name, tokenizer).network
    block = network.blocks[-1]
    block.qkv = torch.nn.Sequential(block.qkv)
    with pytest.raises(TypeError, match="Sequential in place of a Linear whose weight this network reads itself"):
        network.read(pack([[document(9, 1)]]))
