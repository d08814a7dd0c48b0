"""Recipes are found by name, classes by what they registered as, and both are described in words."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field
from written import BODY, recipe

from tandem.recipe import (
    Settings,
    UserError,
    configure,
    counted,
    describe,
    explain,
    load,
    overview,
    recipes,
    register,
    registered,
    require,
)


def test_a_recipe_is_found_by_name_first_in_the_working_directory():
    shipped = recipes()
    assert "decoder/tiny" in shipped
    recipe(BODY + "seed: 5\n", path="recipes/decoder/tiny.yaml")
    assert recipes()["decoder/tiny"] == Path("recipes/decoder/tiny.yaml") != shipped["decoder/tiny"]
    assert load("decoder/tiny").seed == 5
    assert str(load("decoder/tiny").origins["seed"]) == "recipes/decoder/tiny.yaml:6"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("decoder/tinny", "decoder/tiny"),
        ("tiny", r"\w+/tiny"),
        ("recipes/decoder/tiny", "decoder/tiny"),
        ("mine", "mine.yaml"),
        ("runs/first/", "runs/first/recipe.yaml"),
    ],
)
def test_an_unknown_recipe_names_the_nearest(name, near, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").touch()
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/recipe.yaml").touch()
    with pytest.raises(UserError, match=f'"{name}": no such recipe; did you mean {near}\\?'):
        load(name)


def test_one_section_alone_can_be_configured():
    assert configure("network", "sps", ["network.window=3"]).window == 3
    assert configure("batch", overrides=["batch.context=3"]).context == 3
    with pytest.raises(UserError) as caught:
        configure("network", "sps", ["network.windw=3", "batch.context=3"])
    assert str(caught.value).splitlines() == [
        "override  batch: no such key; without a recipe there is only network",
        "override  network.windw = 3: no such key; did you mean network.window? sps takes depth, window",
    ]


def test_options_give_another_class_those_that_it_shares():
    class Block(Settings):
        width: int | None = None
        bias: bool = False

    class Stack(Block):
        depth: int = 1

        def derive(self):
            return {"width": 8 * self.depth}

    assert Stack(depth=3, bias=True).shared_with(Block) == {"width": 24, "bias": True}
    with pytest.raises(AttributeError, match="depth"):
        Block().shared_with(Stack)


def test_a_name_is_taken_once_and_needs_options():
    with pytest.raises(TypeError, match=r"network sps is .*SPS already"):

        @register("network", "sps")
        class Other:
            class Config(Settings):
                pass

    with pytest.raises(TypeError, match="inner `class Config"):

        @register("network", "new")
        class New:
            pass

    assert list(registered("network")) == ["decoder", "sps"]
    assert list(registered("corpus")) == ["corpus"]
    assert registered("log") == {}


def test_a_missing_extra_names_the_line_that_installs_it(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"pip install 'tandem-lm\[plots\]'"):
        require("no_such_module_here", "plots")
    assert require("math", "plots").pi > 3
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module_here.py").write_text("import no_such_module_here")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_here"):  # its own error, not ours
        require("broken_module_here", "plots")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "a whole number or null"),
        (tuple[int, float], "a list of a whole number, then a number"),
        (list[str] | str, "a list, each item text or text"),
        (Literal["a", 3], "one of a, 3"),
        (Literal["a", 3] | None, "a, 3 or null"),
        (dict[str, Path], "a mapping, each value a path"),
        (Annotated[float, Field(gt=0, lt=1)] | str, "a number > 0 and < 1 or text"),
    ],
)
def test_a_type_is_described_in_words(annotation, words):
    assert describe(annotation) == words


def test_the_catalogue_tells_what_there_is():
    recipe("# Small.\n" + BODY, path="recipes/decoder/tiny.yaml")

    def lines(text):
        return [" ".join(line.split()) for line in text.splitlines()]

    everything = lines(overview())
    assert {"decoder The plain decoder.", "next_token (default)", "decoder/tiny Small.", "batch"} <= set(everything)
    decoder = lines(explain("decoder"))
    assert "It reads everything before it." in decoder
    depth = decoder.index("network.depth = 2 a whole number >= 1")
    assert decoder[depth + 1] == "Number of blocks."
    assert "network.rope.base = 10000.0 a number > 0" in decoder
    assert "corpus.texts required: a list, each item text" in lines(explain("corpus"))
    assert "corpus.sources.share = 1.0 a number > 0" in lines(explain("corpus"))
    assert lines(explain("network"))[1:] == ["decoder The plain decoder.", "sps"]
    assert "network.depth 9 override" in lines(explain("decoder/tiny", ["network.depth=9"]))


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("decodr", [], "decodr: nothing has this name; did you mean decoder? `tandem show` lists what there is"),
        ("decoder", ["seed=3"], "decoder seed=3: only a recipe takes overrides"),
    ],
)
def test_the_catalogue_refuses_what_it_does_not_know(name, overrides, line):
    with pytest.raises(UserError) as caught:
        explain(name, overrides)
    assert str(caught.value) == line


def test_one_thing_is_not_told_as_several():
    assert [counted(n, "documents") for n in (0, 1, 1200)] == ["0 documents", "1 document", "1,200 documents"]
