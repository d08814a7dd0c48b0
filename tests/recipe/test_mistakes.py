"""All mistakes of a recipe are told at once, each in one line with its place, its value and what is allowed."""

import os
from pathlib import Path

import pytest
from written import BODY, complaint, recipe

from tandem.recipe import Settings, UserError, load, register
from tandem.recipe.resolve import saved

UNITS = 'write "5e9 tokens" (units: tokens, flops, seconds, minutes, hours, steps)'
TAKES = "a recipe takes seed, budget, extends, corpus, network, objective, batch"
DECODER = "decoder takes depth, heads, width, head_width, rope"

WRONG = {  # what: (written in the recipe, in place of what, the one line that tells it)
    "a misspelt key": (
        "  name: sps\n  windw: 64",
        "  name: decoder",
        "mine.yaml:4  network.windw = 64: no such key; did you mean network.window? sps takes depth, window",
    ),
    "a misspelt section": ("batsh: {}", None, f"mine.yaml:6  batsh = {{}}: no such key; did you mean batch? {TAKES}"),
    "a dotted key": (
        "network.rope.base: 5",
        None,
        f"mine.yaml:6  network.rope.base = 5: no such key; write network: {{rope: {{base: 5}}}}; {TAKES}",
    ),
    "a dotted key of a section": (
        "  name: decoder\n  rope.base: 5",
        "  name: decoder",
        f"mine.yaml:4  network.rope.base = 5: no such key; write rope: {{base: 5}}; {DECODER}",
    ),
    "a list for a key": (
        "batch: {[a, b]: 1}",
        None,
        "mine.yaml:6  batch.[a, b]: a key must be text, not a list or a mapping",
    ),
    "a key without its section": (
        "context: 8",
        None,
        f"mine.yaml:6  context = 8: no such key; did you mean batch.context? {TAKES}",
    ),
    "a key of another choice": (
        "  name: decoder\n  window: 4",
        "  name: decoder",
        f"mine.yaml:4  network.window = 4: no such key; sps has it; {DECODER}",
    ),
    "a key of another section": (
        "  name: decoder\n  weight: 1",
        "  name: decoder",
        f"mine.yaml:4  network.weight = 1: no such key; did you mean objective.weight? {DECODER}",
    ),
    "a misspelt choice": (
        "  name: decodr",
        "  name: decoder",
        'mine.yaml:3  network.name = "decodr": no such network; did you mean decoder? one of decoder, sps',
    ),
    "no choice": ("  {}", "  name: decoder", "mine.yaml:2  network.name: required; one of decoder, sps"),
    "a choice without its mapping": (
        "network: decoder\ncorpus:",
        "network:\n  name: decoder\ncorpus:",
        'mine.yaml:2  network = "decoder": must be a mapping of options; write network: {name: decoder}',
    ),
    "a type": (
        "batch: {context: many}",
        None,
        'mine.yaml:6  batch.context = "many": must be a whole number >= 2',
    ),
    "a fraction for a count": (
        "batch: {tokens: 0.5}",
        None,
        "mine.yaml:6  batch.tokens = 0.5: must be a whole number or null",
    ),
    "a boolean for a number": ("seed: true", None, "mine.yaml:6  seed = true: must be a whole number >= 0"),
    "a bound": ("batch: {context: 1}", None, "mine.yaml:6  batch.context = 1: must be a whole number >= 2"),
    "two bounds": (
        "objective: {weight: 2}",
        None,
        "mine.yaml:6  objective.weight = 2: must be a number >= 0 and <= 1",
    ),
    "infinity": (
        "objective: {weight: .inf}",
        None,
        'mine.yaml:6  objective.weight = ".inf": must be a number >= 0 and <= 1',
    ),
    "a number beyond the largest": (
        "  name: decoder\n  rope: {base: 1e999}",
        "  name: decoder",
        "mine.yaml:4  network.rope.base = Infinity: must be a number > 0",
    ),
    "a whole number that 64 bits do not hold": (
        "  name: sps\n  window: 9223372036854775808",
        "  name: decoder",
        "mine.yaml:4  network.window = 9223372036854775808: must be below 2^63",
    ),
    "a bound of what may be null": (
        "  name: sps\n  window: -1",
        "  name: decoder",
        "mine.yaml:4  network.window = -1: must be a whole number >= 0 or null",
    ),
    "none of several types": (
        "batch: {rows: [1]}",
        None,
        "mine.yaml:6  batch.rows = [1]: must be a whole number or a mapping, each value a whole number",
    ),
    "an unlisted word": (
        "  texts: [a.txt]\n  backend: dsk",
        "  texts: [a.txt]",
        'mine.yaml:6  corpus.backend = "dsk": must be one of memory, disk',
    ),
    "yes for true": ("batch: {compile: yes}", None, 'mine.yaml:6  batch.compile = "yes": must be true or false'),
    "text for a list": (
        "  texts: a.txt",
        "  texts: [a.txt]",
        'mine.yaml:5  corpus.texts = "a.txt": must be a list, each item text',
    ),
    "an item of a list": (
        "  texts:\n  - a.txt\n  - 3",
        "  texts: [a.txt]",
        "mine.yaml:7  corpus.texts.1 = 3: must be text",
    ),
    "a key of an item": (
        "  texts: [a.txt]\n  sources: [{path: x, shar: 3}]",
        "  texts: [a.txt]",
        "mine.yaml:6  corpus.sources.0.shar = 3: no such key; did you mean corpus.sources.0.share? "
        "corpus.sources.0 takes path, share",
    ),
    "an entry of a mapping": (
        "  texts: [a.txt]\n  shares: {wiki: most}",
        "  texts: [a.txt]",
        'mine.yaml:6  corpus.shares.wiki = "most": must be a number',
    ),
    "an option of an option": (
        "  name: decoder\n  rope:\n    base: 0",
        "  name: decoder",
        "mine.yaml:5  network.rope.base = 0: must be a number > 0",
    ),
    "a required key": (
        "  backend: disk",
        "  texts: [a.txt]",
        "mine.yaml:4  corpus.texts: required: a list, each item text",
    ),
    "values that contradict each other": (
        "  name: decoder\n  width: 65",
        "  name: decoder",
        "mine.yaml:2  network = decoder: width 65 is not divisible by heads 4",
    ),
    "sections that do not go together": (
        "objective:\n  name: span_corruption",
        None,
        'mine.yaml:7  objective.name = "span_corruption": no network here has an encoder',
    ),
    "a default that does not go with a value": (
        "seed: 7",
        None,
        'mine.yaml:4  corpus.backend = "disk" (default): a disk has no seed 7',
    ),
    "no budget": (
        "seed: 1",
        "budget: 5e6 tokens",
        "mine.yaml  budget: required: text (What training may spend, such as 5e9 tokens "
        "(units: tokens, flops, seconds, minutes, hours, steps).)",
    ),
    "an unknown unit": (
        "budget: 5 Gt",
        "budget: 5e6 tokens",
        f'mine.yaml:1  budget = "5 Gt": unknown unit "Gt"; {UNITS}',
    ),
    "no unit": ("budget: 5e6", "budget: 5e6 tokens", f"mine.yaml:1  budget = 5000000: it has no unit; {UNITS}"),
    "no number": (
        "budget: some tokens",
        "budget: 5e6 tokens",
        f'mine.yaml:1  budget = "some tokens": "some" is not a number; {UNITS}',
    ),
    "nothing to spend": (
        "budget: 0 steps",
        "budget: 5e6 tokens",
        'mine.yaml:1  budget = "0 steps": must be > 0 and at most 1e+30',
    ),
    "more than anybody has": (
        "budget: 1e31 steps",
        "budget: 5e6 tokens",
        'mine.yaml:1  budget = "1e31 steps": must be > 0 and at most 1e+30',
    ),
    "half a step": ("budget: 0.5 steps", "budget: 5e6 tokens", 'mine.yaml:1  budget = "0.5 steps": steps come whole'),
    "a key written twice": (
        "  name: decoder\n  depth: 3\n  depth: 4",
        "  name: decoder",
        "mine.yaml:5  network.depth: written twice, first at mine.yaml:4",
    ),
    "a variable that is not set": (
        '  texts: ["${TANDEM_NOWHERE}/a.txt"]',
        "  texts: [a.txt]",
        'mine.yaml:5  corpus.texts = "${TANDEM_NOWHERE}/a.txt": the environment has no TANDEM_NOWHERE; '
        "set it (export TANDEM_NOWHERE=...), or write the text out",
    ),
    "broken YAML": (
        "  texts: [a.txt",
        "  texts: [a.txt]",
        "mine.yaml:6  cannot be read: while parsing a flow sequence expected ',' or ']', but got '<stream end>'",
    ),
    "a tab": (
        "\tname: decoder",
        "  name: decoder",
        "mine.yaml:3  cannot be read: while scanning for the next token "
        "found character '\\t' that cannot start any token",
    ),
    "an alias": (
        "  texts: &texts [a.txt]\nbatch: *texts",
        "  texts: [a.txt]",
        "mine.yaml:6  cannot be read: a recipe has no aliases and no tags; use extends",
    ),
    "a tag": (
        "  texts: !!python/tuple [a.txt]",
        "  texts: [a.txt]",
        "mine.yaml:5  cannot be read: a recipe has no aliases and no tags; use extends",
    ),
    "a list for a recipe": (
        "- a",
        BODY.strip(),
        "mine.yaml:1  a recipe is a mapping of sections, such as `network: {name: decoder}`",
    ),
    "an unknown parent": (
        "extends: mime.yaml",
        None,
        'mine.yaml:6  extends = "mime.yaml": no such file; did you mean mine.yaml? `tandem show` lists recipes',
    ),
    "two parents": (
        "extends: [a, b]",
        None,
        "mine.yaml:6  extends: must be the name or the path of one recipe",
    ),
    "its own parent": (
        "extends: ./mine.yaml",
        None,
        'mine.yaml:6  extends = "./mine.yaml": this recipe is among those that it extends',
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_told_in_one_line(what):
    written, in_place_of, line = WRONG[what]
    text = BODY + written + "\n" if in_place_of is None else BODY.replace(in_place_of, written)
    assert complaint(text) == line


NO_TEXT = "no text has a NUL or half a surrogate pair"
WRONG_OVERRIDES = {
    "network.windw=64": f"override  network.windw = 64: no such key; did you mean network.width? {DECODER}",
    "network.depth=0": "override  network.depth = 0: must be a whole number >= 1",
    "network.name=sp": 'override  network.name = "sp": no such network; did you mean sps? one of decoder, sps',
    "network.name=superposition": 'override  network.name = "superposition": no such network; write objective.name: '
    "superposition; one of decoder, sps",
    "network": "override  network: write section.key=value, such as network.depth=4",
    "network..depth=3": "override  network..depth=3: write section.key=value, such as network.depth=4",
    "corpus.texts=[a": "override  corpus.texts=[a: cannot be read: while parsing a flow sequence "
    "expected ',' or ']', but got '<stream end>'; put text that has any of , [ ] { } : # in quotes of its own",
    "seed=" + "9" * 5000: f"override  seed={'9' * 5000}: cannot be read: a number of 5000 digits",
    r'corpus.folder="a\0b"': r'override  corpus.folder="a\0b": cannot be read: ' + NO_TEXT,
    r'corpus.texts=["\ud83d\ude00"]': r'override  corpus.texts=["\ud83d\ude00"]: cannot be read: ' + NO_TEXT,
    "corpus.shares={a: 1, a: 2}": "override  corpus.shares.a: written twice, first at override",
    "network.depth=" + "[" * 2000: f"override  network.depth={'[' * 2000}: cannot be read: nested too deeply",
    "corpus.shares={'a${EMPTY}': 1, '${EMPTY}a': 2}": 'override  corpus.shares: "a${EMPTY}" and "${EMPTY}a" name the '
    "same; keep one",
    "corpus.texts=['${BYTES}']": 'override  corpus.texts = "${BYTES}": its value in the environment is not UTF-8; '
    "take one that is, such as a link with another name",
    "extends=other": "override  extends=other: a recipe says in its file what it extends",
    "budget=3 day": f'override  budget = "3 day": unknown unit "day"; {UNITS}',
}


@pytest.mark.parametrize("override", WRONG_OVERRIDES)
def test_a_wrong_override_is_told_as_one(override, monkeypatch):
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("BYTES", os.fsdecode(b"caf\xe9"))
    assert complaint(overrides=[override]) == WRONG_OVERRIDES[override]


def test_a_mistake_in_a_recipe_that_another_file_keeps_is_told_without_a_line():
    values = {"budget": "5e6 tokens", "network": {"name": "decoder"}, "corpus": {"texts": ["a.txt", 3]}}
    with pytest.raises(UserError) as caught:
        saved(values, "model/config.json")
    assert str(caught.value) == "model/config.json  corpus.texts.1 = 3: must be text"


def test_a_value_that_the_shell_has_split_is_told_with_its_quotes():
    told = complaint(overrides=["seed=1", "budget=200", "steps", "of", "training", "batch.rows=2"]).splitlines()
    for line, said in zip(told, ("200 steps", "200 steps of", "200 steps of training"), strict=False):
        assert line.endswith(f'such as network.depth=4; if it is of the value before it, quote both: "budget={said}"')


def test_all_mistakes_come_at_once_in_the_order_of_the_file_and_overrides_last():
    text = BODY.replace("5e6 tokens", "5 Gt") + "batch: {context: 1}\nobjective: {name: span_corruption}\nsed: 3\n"
    lines = complaint(text, ["network.depth=9", "network.dept=9", "batch.compile=1"]).splitlines()
    assert [line.partition(":" if "override" in line else " =")[0].split("  ") for line in lines] == [
        ["mine.yaml:1", "budget"],
        ["mine.yaml:6", "batch.context"],
        ["mine.yaml:7", "objective.name"],
        ["mine.yaml:8", "sed"],
        ["override", "network.dept = 9"],
        ["override", "batch.compile = 1"],
    ]


def test_a_check_of_two_sections_is_told_beside_the_mistakes_of_a_third():
    lines = complaint(BODY + "objective: {name: span_corruption}\nbatch: {context: 1}\n", ["network.depth=9"])
    assert "override  network.depth = 9: at most 8 with span_corruption" in lines
    assert "no network here has an encoder" in lines
    assert "batch.context" in lines


def test_a_check_that_asks_for_what_no_recipe_has_is_a_bug():
    @register("log")
    class Log:
        class Config(Settings):
            pass

        @classmethod
        def check(cls, recipe):
            yield "batch", recipe.bach

    with pytest.raises(AttributeError, match="bach"):
        recipe()


def test_a_mistake_in_a_parent_is_told_where_it_stands():
    Path("parent.yaml").write_text(BODY + "batch: {context: 1}\n")
    assert complaint("extends: parent.yaml\n").startswith("parent.yaml:6  batch.context = 1:")


@pytest.mark.parametrize("content", [b"seed: \xff\n", b"seed: \x00\n"])
def test_a_file_that_is_not_text_is_told(content):
    Path("mine.yaml").write_bytes(content)
    with pytest.raises(UserError, match=r"^mine.yaml  cannot be read: (byte|character) 6 is not"):
        load("mine.yaml")
