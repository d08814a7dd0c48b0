"""Reads the files of a model folder, with one clear message if one is missing, broken or unsuitable."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tandem.corpus import Tokenizer
from tandem.recipe import UserError

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
INDEX = "model.safetensors.index.json"
"""For weights in several files: the file of each tensor, by name."""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises: UserError if there is none, or if it is not a JSON object."""
    return _object(existing(folder / CONFIG))


def count_in(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise UserError(f"{path}: {key} = {value}: must be a whole number, at least 1")
    return value


def read_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(existing(folder / TOKENIZER))


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json without the step that puts tokens around a text, which Tandem never uses; a step that only
    trims offsets stays."""
    path = folder / TOKENIZER
    tokenizer.to_file(path)
    described = _object(path)
    step = described["post_processor"] or {}
    trims = [part for part in step.get("processors", [step]) if part.get("type") == "ByteLevel"]
    written = described | {"post_processor": trims[0] if trims else None}
    if written != described:
        path.write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Tensors by name, from one file or from all that an index names."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        try:
            names = sorted({str(name) for name in _object(folder / INDEX)["weight_map"].values()})
        except (KeyError, AttributeError) as error:
            raise UserError(f"{folder / INDEX}: damaged: no weight_map") from error
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            weights |= load_file(existing(folder / name))
        except SafetensorError as error:
            raise UserError(f"{folder / name}: damaged, or no safetensors: {error}") from error
    return weights


def existing(path: Path) -> Path:
    """The path. Raises: UserError if there is no such file; OSError if this user may not read it."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; the folder of a model has {WEIGHTS}, {CONFIG} and {TOKENIZER}")
    path.open("rb").close()  # of a file that this user may not read, safetensors says that there is none
    return path


def _object(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: damaged, or not JSON: {error}") from error
    if not isinstance(read, dict):
        raise UserError(f"{path}: not a mapping of settings")
    return read
