"""A probe asks a trained network a question of its own, beside the ruler.

    @register("probe", "copying")
    class Copying:
        class Config(Settings):
            words: int = 100

        def __init__(self, config):
            self.words = config.words

        def __call__(self, network, tokenizer, device) -> Findings:
            return Findings({"recalled": 0.93})

It is found by its name: `tandem evaluate RUN --probe copying probe.words=50`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from tandem.corpus import Tokenizer
from tandem.networks.network import Network


@dataclass(frozen=True)
class Findings:
    """What a probe found.

    record: plain values, kept as JSON.
    tables: by title the rows, each a value by column.
    plots: by name what draws it as a PNG at a path.
    """

    record: dict[str, Any]
    tables: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    plots: Mapping[str, Callable[[Path], object]] = field(default_factory=dict)


class Probe(Protocol):
    """Built from its Config; called with a network in eval mode, on `device`, and without gradients."""

    def __init__(self, config: Any) -> None: ...

    def __call__(self, network: Network, tokenizer: Tokenizer, device: torch.device) -> Findings: ...
