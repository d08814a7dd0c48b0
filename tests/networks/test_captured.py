"""Sessions in memory that stays: which refuse it, which blocks they compile, and as graphs on CUDA."""

import pytest
import torch

from tandem.networks.boundary_decoder import BoundaryDecoder
from tandem.networks.captured import CapturedSession
from tandem.networks.context_ready import ContextReady
from tandem.networks.decoder import Decoder
from tandem.networks.double_decoder import DoubleDecoder
from tandem.networks.sps import SPS

pytest.importorskip("triton", reason="fixed sessions read through the decoding kernel")

PROMPTS = [[5, 2, 9, 7], [3, 1]]
SMALL = {"width": 32, "heads": 2}
NETWORKS = {
    "decoder": (Decoder, {"depth": 1, "key_heads": 1}),
    "windowed": (Decoder, {"depth": 1, "window": 3}),
    "sps": (SPS, {"depth": 2, "window": 2}),
    "side_read": (SPS, {"depth": 2, "window": 0}),
    "two_x_memory": (SPS, {"depth": 2, "window": None}),
    "reverse_sps": (SPS, {"depth": 2, "window": 2, "persistent": "predictions", "read": "inputs"}),
    "context_ready": (ContextReady, {"depth": 1, "passes_min": None}),
    "three_passes": (ContextReady, {"depth": 1, "passes_min": None, "score_passes": 3}),
    "double_decoder": (DoubleDecoder, {"context_layers": 1, "generation_layers": 1}),
    "with_a_sink": (DoubleDecoder, {"context_layers": 1, "generation_layers": 1, "sink": True}),
}
REFUSED = {"gist": (BoundaryDecoder, {"depth": 1, "sentences": "gist"})}


def network(name, device="cpu", **settings):
    cls, own = (NETWORKS | REFUSED)[name]
    return cls(cls.Config(**SMALL | own | settings), 50, 64, torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize(
    ("name", "settings", "keep", "says"),
    [
        ("decoder", {"positions": "learned"}, {}, "learned positions"),
        ("decoder", {"moe": {"experts": 4, "active": 2}, "mlp_width": 24, "tied": False}, {}, "a mixture"),
        ("gist", {}, {}, "ends of sentences"),
        ("double_decoder", {}, {"keep": "extendable"}, "the host keeps the tokens"),
        ("double_decoder", {"mixing": "biased"}, {}, "two sources"),
    ],
)
def test_what_can_not_be_fixed_says_why(name, settings, keep, says):
    session = network(name, **settings).session(2, **keep)
    session.prefill(PROMPTS)
    with pytest.raises(ValueError, match=says):
        session.fix(16)


@pytest.mark.parametrize("name", NETWORKS)
def test_compiled_blocks_serve_no_session_but_a_fixed_one(name, monkeypatch):
    called, compiled = [], lambda part, **_: lambda *given: called.append(part) or part(*given)
    monkeypatch.setattr(torch, "compile", compiled)
    session = network(name).compile().session(2)
    tokens = session.step(session.prefill(PROMPTS).argmax(-1)).argmax(-1)
    assert not called  # work in many shapes
    session.fix(capacity=16)
    session.ready()
    session.step(tokens)
    assert called


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_a_capture_is_refused():
    with pytest.raises(ValueError, match="captured on CUDA only"):
        CapturedSession(network("decoder").session(2), capacity=16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in NETWORKS), ("sps", True)])
def test_cuda_graphs_say_what_a_session_says(name, compiled):
    built = network(name, "cuda", width=64)
    built = built.compile() if compiled else built
    plain, captured = built.session(2), CapturedSession(built.session(2), capacity=40)
    tokens = plain.prefill(PROMPTS).argmax(-1)
    captured.prefill(PROMPTS)
    for _ in range(30):
        expected = plain.step(tokens)
        torch.testing.assert_close(captured.step(tokens), expected, rtol=1e-3, atol=1e-3)
        tokens = expected.argmax(-1)
    for _ in range(6):
        captured.step(tokens)
    for wrong in (tokens[:1], tokens[:, None]):
        with pytest.raises(ValueError, match=r"tokens of shape \(2,\), not"):
            captured.step(wrong)
    with pytest.raises(ValueError, match="all 40 places"):
        captured.step(tokens)
