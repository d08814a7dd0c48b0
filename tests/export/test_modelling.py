"""The model that is exported, as it stands here: in a process with Tandem, where it is quick to ask."""

import pytest
import torch

from tandem.recipe import registered

pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast

from tandem.export.modelling import TandemConfig, TandemForCausalLM

IDS = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 3]])


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
