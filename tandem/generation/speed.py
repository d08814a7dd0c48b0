"""What generation costs: a trained network continues one text greedily and is timed.

Times are those of this machine now, so compare them only with times from the same machine; bytes are exact.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.networks.network import Network


@dataclass(frozen=True)
class Decoding:
    """What generation costs with the trained network: one text at a time, after `prompt` tokens of held-out text."""

    prompt: int
    """Its tokens of text; sentence ends, where the network reads them, come on top."""
    prefill_seconds: float
    tokens_per_second: float
    cache_bytes: int
    """Held after the prompt."""
    prefill_passes: int | None = None
    """Passes over the prompt, for networks that read it in passes."""


def measure_decoding(network: Network, prompt: Sequence[int], tokens: int, repeats: int = 3) -> Decoding:
    """The fastest of `repeats` runs after a warm-up: reading `prompt`, then generating `tokens` one by one.

    The fastest, because whatever else runs on the machine can only slow it down.
    """
    timed = [_measure(network, list(prompt), tokens) for _ in range(repeats + 1)][1:]
    return Decoding(
        prompt=sum(token < network.vocabulary for token in prompt),
        prefill_seconds=min(prefill for prefill, *_ in timed),
        tokens_per_second=tokens / min(steps for _, steps, *_ in timed),
        cache_bytes=timed[0][2],
        prefill_passes=timed[0][3],
    )


def _measure(network: Network, prompt: list[int], tokens: int) -> tuple[float, float, int, int | None]:
    """Seconds to read the prompt, seconds for the tokens after it, bytes held between, passes of the prompt."""
    session, began = network.session(1), time.perf_counter()
    token = session.prefill([prompt]).argmax(-1).cpu()  # on the host it is finished, not only queued
    read, held = time.perf_counter(), session.bytes
    for _ in range(tokens):
        token = session.step(token).argmax(-1).cpu()
    return read - began, time.perf_counter() - read, held, getattr(session, "passes", None)
