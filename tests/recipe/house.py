"""A small house for recipes: two networks, three objectives, and sections with every kind of option."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, model_validator

from tandem.recipe import Settings, register, settings


@pytest.fixture(autouse=True)
def house(monkeypatch, tmp_path):
    """A small registry of its own, and an empty working directory."""
    monkeypatch.setattr(settings, "_registry", {})
    monkeypatch.setattr(settings, "_default_names", {})
    monkeypatch.chdir(tmp_path)

    class Rope(Settings):
        base: float = Field(10_000.0, gt=0)
        width: int | None = None

    @register("network", "decoder")
    class Decoder:
        """The plain decoder.

        It reads everything before it.
        """

        class Config(Settings):
            depth: int = Field(2, ge=1)
            """Number of blocks."""
            heads: int = Field(4, ge=1)
            width: int = Field(64, ge=1)
            head_width: int | None = None
            rope: Rope | None = Rope()

            def derive(self):
                return {"head_width": self.width // self.heads}

            @model_validator(mode="after")
            def _divides(self):
                if self.width % self.heads:
                    raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
                return self

    @register("network", "sps")
    class SPS:
        class Config(Settings):
            depth: int = Field(2, ge=1)
            window: int | None = Field(64, ge=0)

    @register("objective", "next_token", default=True)
    class NextToken:
        class Config(Settings):
            weight: float = Field(1.0, ge=0, le=1)

    @register("objective", "superposition")
    class Superposition:
        class Config(Settings):
            bag: int = 8

    @register("objective", "span_corruption")
    class SpanCorruption:
        class Config(Settings):
            pass

        @classmethod
        def check(cls, recipe):
            if not hasattr(recipe.choice("network"), "encode"):
                yield "objective.name", "no network here has an encoder"
            if recipe.network.depth > 8:
                yield "network.depth", "at most 8 with span_corruption"

    class Source(Settings):
        path: Path
        share: float = Field(1.0, gt=0)

    @register("corpus")
    class Corpus:
        class Config(Settings):
            texts: tuple[str, ...]
            sources: tuple[Source, ...] = ()
            shares: dict[str, float] = {}
            backend: Literal["memory", "disk"] = "disk"

        @classmethod
        def check(cls, recipe):
            if recipe.corpus.backend == "disk" and recipe.seed == 7:
                yield "corpus.backend", "a disk has no seed 7"

    @register("batch")
    class Batch:
        class Config(Settings):
            context: int = Field(256, ge=2)
            tokens: int | None = None
            rows: int | dict[str, int] = 1
            compile: bool = False

    return tmp_path
