"""Width transfer reaches every network: how it is drawn, and its logits.

Logits are those of sessions; the contract holds scores and losses to these.
"""

import pytest
import torch

from tandem.nn.init import HIDDEN, roles
from tandem.recipe import registered

TINY = [
    pytest.param(cls, config.model_copy(update={"base_width": None}), id=f"{name}-{setting}")
    for name, cls in registered("network").items()
    for setting, config in cls.tiny().items()
]


def logits(network, config):
    made = type(network)(config, network.vocabulary, network.context)
    made.load_state_dict(network.state_dict())
    session = made.session(1)
    return torch.cat([session.prefill([[3, 1, 4, 1, 5]]), session.step(torch.tensor([9]))])


@pytest.mark.parametrize(("cls", "config"), TINY)
def test_logits_shrink_by_the_root_of_the_ratio(cls, config):
    network = cls(config, 30, 16, generator=torch.Generator().manual_seed(0))
    plain = logits(network, config)
    quarter, same = (config.model_copy(update={"base_width": config.width // ratio}) for ratio in (4, 1))
    torch.testing.assert_close(2 * logits(network, quarter), plain, rtol=0, atol=2e-5)
    assert torch.equal(logits(network, same), plain)


@pytest.mark.parametrize(("cls", "config"), TINY)
def test_hidden_matrices_are_drawn_smaller_and_nothing_else(cls, config):
    config = config.model_copy(update={"init": "normal", "base_width": None})
    drawn = {}
    for base in (None, config.width // 4):
        generator = torch.Generator().manual_seed(0)
        network = cls(config.model_copy(update={"base_width": base}), 30, 16, generator=generator)
        drawn[base] = dict(network.named_parameters())
    role = roles(network)
    for name, plain in drawn[None].items():
        expected = plain / 2 if role[name] in HIDDEN else plain
        torch.testing.assert_close(drawn[config.width // 4][name], expected, rtol=1e-6, atol=0, msg=name)
