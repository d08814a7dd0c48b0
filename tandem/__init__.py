"""Tandem: pretraining language models in ways that split one job in two.

Two streams, two decoders, two phases, two levels, two networks: five published methods and their baselines
on one backbone, one data order, one budget and one ruler. Start with `tandem show`, or in Python:

    result = tandem.pretrain(tandem.load("decoder/tiny", ["budget=1e6 tokens"]), "runs/mine")
    network, tokenizer = tandem.open_model("runs/mine")

The names below are found when they are first used, so that `import tandem` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.comparison.pretrain import pretrain as pretrain
    from tandem.comparison.texts import scored as scored
    from tandem.comparison.trained import open_model as open_model
    from tandem.comparison.trained import open_trained as open_trained
    from tandem.generation.generate import generate_text as generate_text
    from tandem.generation.generate import stream_text as stream_text
    from tandem.generation.sampling import Sampler as Sampler
    from tandem.recipe import UserError as UserError
    from tandem.recipe import load as load
    from tandem.recipe import register as register

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "Sampler": "tandem.generation.sampling",
    "UserError": "tandem.recipe",
    "generate_text": "tandem.generation.generate",
    "load": "tandem.recipe",
    "open_model": "tandem.comparison.trained",
    "open_trained": "tandem.comparison.trained",
    "pretrain": "tandem.comparison.pretrain",
    "register": "tandem.recipe",
    "scored": "tandem.comparison.texts",
    "stream_text": "tandem.generation.generate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
