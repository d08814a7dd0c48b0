"""On a CUDA device, networks say and learn what they do on a CPU, from rows longer than a block of FlexAttention."""

from dataclasses import replace

import pytest
import torch

from tandem.objectives.next_token import NextToken
from tandem.testing import cases as tiny
from tandem.testing.cases import Case, cases, document

ROWS = [[150, 100, 90], [340], [20, 320]]
"""Lengths of documents: no two rows have the same blocks of 128."""
WIDER = {"width": 64, "heads": 4, "passes": 3, "score_passes": 3, "cap": 150}
"""Heads of 16 channels, which FlexAttention can have, and sentences and passes that are not many."""
EACH = {case.network: case for case in reversed(cases())}.values()


def found(case: Case, device: str) -> list[torch.Tensor]:
    """Loss, nll of every target, and gradients."""
    network, objective = case.build().float().to(device), NextToken(NextToken.Config())
    texts = [[document(n, 10 * r + d) for d, n in enumerate(row)] for r, row in enumerate(ROWS)]
    batch = replace(case.pack(texts), key=1)
    loss, _ = objective.loss(network, batch.to(torch.device(device)), objective.count(network, batch))
    loss.backward()
    with torch.no_grad():
        nll = network.score(batch.to(torch.device(device)))
    grads = [x.grad for x in network.parameters() if x.grad is not None]
    return [x.detach().cpu() for x in (loss, nll, *grads)]


def assert_alike(case: Case, device: str) -> None:
    # 3e-2: FlexAttention rounds float32 to TF32. Rows that read the blocks of another are off by 7e-2 and more.
    for n, (a, e) in enumerate(zip(found(case, device), found(case, "cpu"), strict=True)):
        assert (a - e).norm() <= 3e-2 * e.norm() + 1e-6, f"result {n}: {(a - e).norm():.1e} of {e.norm():.1e}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("case", EACH, ids=str)
def test_cuda_networks_are_those_of_the_cpu(case, monkeypatch):
    monkeypatch.setattr(tiny, "CONTEXT", sum(ROWS[0]))
    own = case.config.model_dump(exclude_unset=True)
    wider = {key: value for key, value in WIDER.items() if key in case.network.Config.model_fields}
    assert_alike(replace(case, config=case.network.Config(**own | wider)), "cuda")
