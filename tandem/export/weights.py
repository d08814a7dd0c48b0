"""A network in a folder: safetensors, and everything needed to use it without its run.

    model.safetensors     parameters by name, as they are; what is tied or computed is not stored
    config.json           network and its settings, vocabulary, context, version, the recipe it was trained by
    tokenizer.json        of the tokenizers library
    ...                   what `transformers` needs to use it without Tandem (hugging_face.py)

    export(network, tokenizer, recipe, folder)
    network, tokenizer = load_exported(folder)

The loaded network is the exported one, bit for bit, in float32, in which training keeps the weights.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file

from tandem import __version__
from tandem.corpus import Segmentation, Tokenizer
from tandem.export import hugging_face
from tandem.export.files import CONFIG, WEIGHTS, count_in, read_config, read_tokenizer, read_weights, write_tokenizer
from tandem.export.foreign import load_foreign
from tandem.networks.network import Network
from tandem.recipe import UserError, registered


def export(network: Network, tokenizer: Tokenizer, recipe: dict[str, Any], folder: str | Path) -> None:
    """Writes all files; `recipe` is the resolved one, kept for the record.

    Raises: UserError where the network cannot be exported, or the tokenizer is not its own.
    """
    folder = Path(folder)
    if reason := hugging_face.refusal(type(network)):
        raise UserError(reason)
    tokenizer.require_within(network.vocabulary)
    try:
        save_network(network, folder, recipe=recipe, **hugging_face.keys(network, tokenizer))
        write_tokenizer(tokenizer, folder)
        hugging_face.write(network, tokenizer, folder)
    except OSError as error:
        error.filename = error.filename or str(folder)  # that of a full disk has none
        raise


def load_exported(folder: str | Path) -> tuple[Network, Tokenizer]:
    """The network, on the CPU, and its tokenizer; also for decoders that were not trained here (foreign.py).

    Raises: UserError naming the file that is missing, broken or of a network that is not registered.
    """
    folder = Path(folder)
    if "network" not in read_config(folder):
        return load_foreign(folder)
    return load_network(folder), read_tokenizer(folder)


def save_network(network: Network, folder: Path, **record: Any) -> None:
    """Writes weights and config.json; `record` is added to the latter.

    Raises: UserError if the network is not registered, or the weights cannot be written.
    """
    name = next((name for name, cls in registered("network").items() if cls is type(network)), None)
    if name is None:
        raise UserError(f"{type(network).__name__} is not registered, and an exported network is found by its name")
    config = {
        "tandem": __version__,
        "network": {"name": name, **network.config.model_dump(mode="json")},
        "vocabulary": network.vocabulary,
        "context": network.context,
    }
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.contiguous() for name, value in network.state_dict().items()}
    try:
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        (folder / WEIGHTS).unlink(missing_ok=True)
        raise UserError(f"{folder / WEIGHTS}: cannot be written ({error}); the same command writes it again") from error
    (folder / CONFIG).write_text(json.dumps(config | record, indent=2) + "\n", encoding="utf-8")
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors writes a file that others may not read


def load_network(folder: Path) -> Network:
    """The network that `save_network` wrote, on the CPU."""
    config = read_config(folder)
    network, weights = _described(config, folder / CONFIG), read_weights(folder)
    if network.reads_sentences:
        network.segmentation = _segmentation(config, folder / CONFIG)
    try:
        # Saved again by transformers, they have the prefix of the model that contains the network
        network.load_state_dict({name.removeprefix("network."): value for name, value in weights.items()})
    except RuntimeError as error:
        raise UserError(
            f"{folder / WEIGHTS}: damaged, or not of the network in {CONFIG} or in this version of Tandem: {error}"
        ) from error
    return network


def _segmentation(config: dict[str, Any], path: Path) -> Segmentation | None:
    """How the run cut its texts into sentences. Raises: UserError if what cut them is not available here."""
    given = config.get("recipe", {}).get("corpus", {}).get("sentences")
    try:
        return given and Segmentation.model_validate(given)
    except ValidationError as error:
        raise UserError(f"{path}: recipe.corpus.sentences: {error.errors()[0]['msg']}") from error


def _described(config: dict[str, Any], path: Path) -> Network:
    """The network that config.json describes, before its weights are loaded."""
    counts = [count_in(config, key, path) for key in ("vocabulary", "context")]
    try:
        settings = dict(config["network"])
        cls: Any = registered("network")[settings.pop("name")]
        return cls.unwritten(cls.Config.model_validate_json(json.dumps(settings)), *counts)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: tells of no network that tandem {__version__} knows: {error!r}") from error
