"""What generation costs is measured on the network's own session."""

import torch

from tandem.generation.speed import measure_decoding
from tandem.networks.context_ready import ContextReady
from tandem.networks.decoder import Decoder


def test_passes_of_a_prompt_are_told():
    for cls, passes in ((Decoder, None), (ContextReady, 3)):
        given = {"prefill": 3} if passes else {}
        network = cls(cls.Config(width=32, heads=2, depth=1, **given), 61, 32, torch.Generator().manual_seed(0))
        assert measure_decoding(network, [5, 2, 9, 7], tokens=1, repeats=1).prefill_passes == passes


def test_it_reads_the_prompt_then_as_many_tokens_as_asked_and_counts_the_cache_between():
    network = Decoder(Decoder.Config(width=32, heads=2, depth=2), 61, 32, torch.Generator().manual_seed(0))
    read, opened = [], network.session

    def session(rows):
        made = opened(rows)
        step = made.step
        made.step = lambda tokens: read.append(tokens.numel()) or step(tokens)
        return made

    network.session = session
    found = measure_decoding(network, [5, 2, 9, 7], tokens=3, repeats=2)
    assert read == [4, 1, 1, 1] * 3  # one more that warms up
    assert found.prompt == 4 and found.prefill_seconds > 0 and found.tokens_per_second > 0
    assert found.cache_bytes == 4 * network.cost().cache(4)
