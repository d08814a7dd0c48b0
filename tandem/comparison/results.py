"""What a study keeps of each of its runs: the data that running, testing and reporting share.

A run's folder holds its whole result, so a study that was interrupted, moved or run on several machines can be read
back from its folders. Apart from times and memory, the result of a run is a function of its recipe.

Shapes: D held-out documents.
"""

import io
import math
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.comparison.texts import lost_in_words
from tandem.evaluation.likelihood import Likelihood
from tandem.generation.speed import Decoding
from tandem.recipe import UserError
from tandem.training.folder import RunFolder, damaged, read_part

DOCUMENTS = "documents.npz"
"""File in a run's folder: the per-document arrays of its Result."""
SCORE_AGAIN = f"delete {DOCUMENTS} and result.json of this run and train it again: its last checkpoint is scored again"


class Point(NamedTuple):
    """Held-out likelihood after `step` steps and `seconds` of training. The nats of sentence ends are included for a
    network that is given them."""

    step: int
    tokens: int
    flops: float
    seconds: float
    nats_per_token: float
    note: str = ""
    """As in `Result`, after these steps."""


@dataclass(frozen=True)
class Result:
    """One finished run of a study. Arrays are by held-out document, the same documents in every run of a study."""

    arm: str
    seed: int
    lr: float
    """Peak learning rate."""
    trial: bool
    """Made to choose a learning rate: scored on the tuning split, never compared."""
    folder: Path
    steps: int
    tokens: int
    """Tokens of text read in training."""
    positions: int
    """Positions computed in training; fewer than `tokens` where a position reads a bag."""
    flops: float
    training_seconds: float
    evaluation_seconds: float
    parameters: dict[str, int]
    """By role."""
    documents: np.ndarray
    """(D,) indices in the store."""
    nats: np.ndarray
    """(D,) float64."""
    document_tokens: np.ndarray
    """(D,) scored tokens."""
    document_bytes: np.ndarray
    """(D,) bytes of the scored tokens' text."""
    end_nats: np.ndarray
    """(D,) nats of sentence ends, float64; 0 for a network that is not given them."""
    curve: list[Point]
    """By step, the end included, sentence ends paid for; over the documents that are scored during training
    (`evaluation.documents`). Points that are not finite are left out."""
    decoding: Decoding
    samples: list[tuple[str, str]]
    """(prompt, continuation)."""
    note: str
    """Why it is no language model at its end, though scored as one: what it has read instead; empty: it is one."""
    environment: list[dict[str, Any]]
    """Versions and machine of every process that trained it or steps that it has taken over, oldest first, with the
    planned device and precision."""
    text: tuple[str, ...] | None = None
    """Fingerprints of the tokens that it was trained and evaluated on; None: its folder does not record them."""
    in_windows: tuple[float, float] | None = None
    """Nats per token in windows, without sentence ends and with them; None: it does not read documents whole."""
    by_position: dict[int, float] = field(default_factory=dict)
    """Nats per token of tokens n to 2 n - 1 of the documents (0: the first), by n, without sentence ends; empty: not
    recorded."""
    lost: str = ""
    """What its tokenizer does not read of the held-out text, in words."""

    @property
    def nats_per_token(self) -> float:
        return float(self.nats.sum() / self.document_tokens.sum())

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum() / np.log(2) / self.document_bytes.sum())

    @property
    def paid_nats(self) -> np.ndarray:
        """(D,) nats of text and sentence ends."""
        return self.nats + self.end_nats

    @property
    def paid_per_token(self) -> float:
        """Nats of text and sentence ends per token of text."""
        return float(self.paid_nats.sum() / self.document_tokens.sum())

    def as_numbers(self) -> dict[str, Any]:
        """What a line of results.jsonl holds: sums over documents in place of the arrays, no texts."""
        kept = ("arm", "seed", "lr", "trial", "steps", "tokens", "positions", "flops", "training_seconds")
        return {
            **{key: getattr(self, key) for key in (*kept, "evaluation_seconds", "note")},
            "run": self.folder.name,
            "nats_per_token": self.nats_per_token,
            "nats_per_token_with_boundaries": self.paid_per_token,
            "bits_per_byte": self.bits_per_byte,
            "in_windows": self.in_windows,
            "by_position": self.by_position,
            "scored": {
                "documents": len(self.documents),
                "nats": float(self.nats.sum()),
                "end_nats": float(self.end_nats.sum()),
                "tokens": int(self.document_tokens.sum()),
                "bytes": int(self.document_bytes.sum()),
            },
            "parameters": self.parameters,
            "decoding": asdict(self.decoding),
            "curve": [point._asdict() for point in self.curve],
        }


def require_same_documents(results: Sequence[Result]) -> None:
    """Raises: UserError where one was scored on other documents than the first, or on the same documents in other
    tokens, and where the text changed between runs."""
    require_same_text(results)
    for result in results:
        for of in (lambda r: r.documents, lambda r: r.document_tokens):
            if not np.array_equal(of(result), of(results[0])):
                raise UserError(
                    f"{result.folder} and {results[0].folder} were scored on different documents; "
                    "delete one of these runs, and the study makes it again"
                )


def require_same_text(results: Iterable[Result]) -> None:
    """Raises: UserError where results that record their text were trained or evaluated on different tokens."""
    by_text: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        if result.text is not None:
            by_text.setdefault(result.text, []).append(str(result.folder))
    if len(by_text) > 1:
        raise UserError(
            "these runs are not of one text: it, or the tokenizer trained on it, changed between them; bring one of "
            "these texts back and delete the runs of the others, and the study makes them again"
            + "".join(f"\n  text {' and held out '.join(text)}: {', '.join(of)}" for text, of in by_text.items())
        )


def by_document(found: Likelihood) -> bytes:
    """The arrays of a Result as the file `DOCUMENTS`, which `read_result` reads."""
    file = io.BytesIO()
    np.savez(
        file,
        documents=found.order,
        nats=found.nats_by_document,
        document_tokens=found.tokens_by_document,
        document_bytes=found.bytes_by_document,
        end_nats=found.end_nats_by_document,
    )
    return file.getvalue()


def read_result(path: Path, arm: str, seed: int, lr: float, trial: bool) -> Result:
    """The result of the finished run in `path`."""
    folder = RunFolder.open(path)
    spent = {key: int | float for key in ("tokens", "positions", "flops", "training_seconds", "evaluation_seconds")}
    kinds = {"step": int, "note": str, "likelihood": dict, "decoding": dict, "parameters": dict, "samples": list}
    told = read_part(folder.result, **spent, **kinds)
    environment = read_part(folder.environment, list)
    if not all(isinstance(entry, dict) for entry in environment):
        raise damaged(folder.environment)
    curve = [
        Point(
            step=judged["step"],
            tokens=judged["training_tokens"],
            flops=judged["training_flops"],
            seconds=judged["training_seconds"],
            nats_per_token=nats.get("nats_per_token_with_boundaries", nats["nats_per_token"]),
            note=judged.get("note", ""),
        )
        for judged in folder.records("likelihood")
        for nats in [judged.get("of_curve", judged)]
    ]
    if not curve:
        raise UserError(f"{folder.metrics}: missing, or holds no likelihood; {SCORE_AGAIN}")
    try:
        with np.load(path / DOCUMENTS) as arrays:
            by_document = dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        raise UserError(f"{path / DOCUMENTS}: missing or damaged; {SCORE_AGAIN}") from None
    return Result(
        arm=arm,
        seed=seed,
        lr=lr,
        trial=trial,
        folder=path,
        steps=told["step"],
        **{key: told[key] for key in spent},
        parameters=told["parameters"],
        **by_document,
        curve=[point for point in curve if math.isfinite(point.nats_per_token)],
        decoding=Decoding(**told["decoding"]),
        samples=[(prompt, text) for prompt, text in told["samples"]],
        note=told["note"],
        environment=_with_trunks(environment),
        text=tuple(folder.text[:2]) if folder.text else None,
        in_windows=tuple(told["likelihood"].get("in_windows", {}).values()) or None,
        by_position={int(n): nats for n, nats in told["likelihood"].get("by_position", {}).items() if nats is not None},
        lost=lost_in_words(told["likelihood"]),
    )


def _with_trunks(environment: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a run's processes, each after those of the trunk whose steps it took over."""
    return [process for own in environment for process in (*_with_trunks(own.get("trunk_environment", ())), own)]
