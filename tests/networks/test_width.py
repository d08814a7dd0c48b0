"""Width transfer reaches every network: how it is drawn, and its logits.

Logits are those of sessions; the contract holds scores and losses to these.
"""

import pytest
import torch

from tandem.recipe import registered

TINY = [
    pytest.param(cls, config.model_copy(update={"base_width": None}), id=f"{name}-{setting}")
    for name, cls in registered("network").items()
    for setting, config in cls.tiny().items()
]


def logits(network, config):
    made = type(network)(config, network.vocabulary, network.context)
    made.load_state_dict(network.state_dict())
    session = made.eval().session(1)
    return torch.cat([session.prefill([[3, 1, 4, 1, 5]]), session.step(torch.tensor([9]))])


@pytest.mark.parametrize(("cls", "config"), TINY)
def test_logits_shrink_by_the_root_of_the_ratio(cls, config):
    network = cls(config, 30, 16, generator=torch.Generator().manual_seed(0))
    plain = logits(network, config)
    quarter, same = (config.model_copy(update={"base_width": config.width // ratio}) for ratio in (4, 1))
    torch.testing.assert_close(2 * logits(network, quarter), plain, rtol=0, atol=2e-5)
    assert torch.equal(logits(network, same), plain)
