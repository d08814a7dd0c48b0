"""A recipe is typed, explains every value, merges as it says, and is read back equal."""

from pathlib import Path

import pytest
from pydantic import model_validator
from written import BODY, recipe

from tandem.recipe import Budget, Settings, UserError, load, parse_budget, register, registered


def test_values_are_typed_and_choices_are_classes():
    run = recipe(BODY + "batch: {context: 64}\n")
    assert run.network == registered("network")["decoder"].Config()
    assert run.choice("network") is registered("network")["decoder"]
    assert run.choice("objective") is registered("objective")["next_token"]  # the default
    assert (run.seed, run.budget, run.batch.context) == (1337, Budget(5e6, "tokens"), 64)
    assert run.corpus.texts == ("a.txt",)


def test_every_value_has_an_origin():
    Path("parent.yaml").write_text(BODY + "batch: {context: 64, tokens: 8}\n")
    run = recipe("extends: parent.yaml\nbatch:\n  context: 32\nseed: 3\n", ["network.rope.base=2e4"])
    origins = {key: str(origin) for key, origin in run.origins.items()}
    assert origins == {
        "seed": "mine.yaml:4",
        "budget": "parent.yaml:1",
        "corpus.texts": "parent.yaml:5",
        "corpus.sources": "default",
        "corpus.shares": "default",
        "corpus.backend": "default",
        "network.name": "parent.yaml:3",
        "network.depth": "default",
        "network.heads": "default",
        "network.width": "default",
        "network.head_width": "derived",
        "network.rope.base": "override",
        "network.rope.width": "default",
        "objective.name": "default",
        "objective.weight": "default",
        "batch.context": "mine.yaml:3",
        "batch.tokens": "parent.yaml:6",
        "batch.rows": "default",
        "batch.compile": "default",
    }
    assert [key for key, _, _ in run.table()] == list(origins)
    assert ("network.head_width", "16", "derived") in run.table()


@pytest.mark.parametrize(("written", "value", "origin"), [(" 8", 8, "mine.yaml:4"), (" null", 16, "derived")])
def test_a_derived_value_is_resolved_only_where_none_is_given(written, value, origin):
    run = recipe(BODY.replace("decoder", f"decoder\n  head_width:{written}"))
    assert (run.network.head_width, str(run.origins["network.head_width"])) == (value, origin)


def test_settings_made_in_python_derive_too_and_before_their_validators():
    class Config(Settings):
        width: int = 6
        half: int | None = None

        def derive(self):
            return {"half": self.width // 2}

        @model_validator(mode="after")
        def _see(self):
            assert self.half is not None
            return self

    assert Config(width=8).half == 4
    assert Config(width=8, half=1).half == 1
    with pytest.raises(ValueError, match="frozen"):
        Config().width = 3


def test_extends_is_a_chain_that_merges_key_by_key():
    Path("recipes/decoder").mkdir(parents=True)
    Path("recipes/decoder/base.yaml").write_text(BODY + "batch: {context: 64, tokens: 8}\n")
    Path("recipes/decoder/deep.yaml").write_text("extends: decoder/base\nnetwork: {depth: 9, rope: {base: 5}}\n")
    run = recipe("extends: decoder/deep\nnetwork: {rope: {width: 4}}\nbatch:\n  context: 32\n  tokens: null\n")
    assert (run.network.depth, run.network.rope.base, run.network.rope.width) == (9, 5.0, 4)
    assert (run.batch.context, run.batch.tokens) == (32, None)


def test_a_parent_by_path_lies_beside_its_child():
    recipe(BODY + "seed: 5\n", path="deep/er/base.yaml")
    assert recipe("extends: er/base.yaml\n", path="deep/mine.yaml").seed == 5


@pytest.mark.parametrize(("child", "overrides", "shares"), [
    ("corpus: {shares: {c: 3}}", [], {"c": 3}),
    ("corpus: {shares: {}}", [], {}),
    ("", ["corpus.shares={c: 3}", "corpus.shares={d: 4}"], {"d": 4}),
    ("", ["corpus={shares: {c: 3}}"], {"c": 3}),
    ("", ["corpus.shares.c=3", "corpus.shares.d=4"], {"a": 1, "b": 2, "c": 3, "d": 4}),
    ("", ["corpus.shares={}", "corpus.shares.c=3"], {"c": 3}),
])  # fmt: skip
def test_a_mapping_of_data_replaces_and_a_dotted_key_adds_to_it(child, overrides, shares):
    recipe(BODY + "  shares: {a: 1, b: 2}\n", path="base.yaml")
    assert recipe(f"extends: base.yaml\n{child}\n", overrides).corpus.shares == shares


def test_a_list_replaces_and_an_empty_section_says_nothing():
    recipe(BODY + "batch: {context: 64}\n", path="base.yaml")
    run = recipe("extends: base.yaml\ncorpus: {texts: [b.txt]}\nbatch:\n")
    assert (run.corpus.texts, run.batch.context) == (("b.txt",), 64)


@pytest.mark.parametrize(
    ("base", "child", "depth"),
    [
        ("{name: sps, depth: 5, window: 1}", "{name: decoder}", 2),  # another choice: afresh
        ("{name: decoder, depth: 5}", "{name: decoder}", 5),
        ("{name: decoder, depth: 5}", "{}", 5),
        ("{depth: 5}", "{name: decoder}", 5),  # the base left the choice open
    ],
)
def test_a_section_that_changes_its_name_starts_afresh(base, child, depth):
    Path("base.yaml").write_text(BODY.replace("\n  name: decoder", f" {base}"))
    assert recipe(f"extends: base.yaml\nnetwork: {child}\n").network.depth == depth
    assert load("base.yaml", ["network.name=sps", "network.depth=3"]).network.depth == 3


def test_what_another_name_does_not_keep_is_noted():
    recipe(BODY.replace("decoder", "decoder\n  depth: 5\n  heads: 2") + "objective: {weight: 0.5}\n", path="base.yaml")
    (note,) = load("base.yaml", ["network.name=sps"]).notes
    assert note == (
        "network.name=sps starts the section afresh, without network.depth=5 of the recipe; what is to stay must be "
        "given again"
    )
    for given in (["network.depth=4"], ["network.depth=5"]):
        assert not load("base.yaml", ["network.name=sps", *given]).notes
    assert not load("base.yaml", ["network.name=decoder", "objective.name=superposition"]).notes
    assert recipe("extends: base.yaml\nnetwork: {name: sps}\n").notes == [note]
    assert not recipe("extends: base.yaml\nnetwork: {name: sps, depth: 5}\n").notes
    Path("child.yaml").write_text("extends: base.yaml\nnetwork: {name: sps}\n")
    assert not load("child.yaml", ["network.depth=4"]).notes  # which another file or an override may give
    assert not recipe(BODY + "objective: none\n", ["objective.name=superposition"]).notes


def test_a_parent_that_names_no_choice_has_made_the_default_one():
    Path("base.yaml").write_text(BODY + "objective: {weight: 0.5}\n")
    assert recipe("extends: base.yaml\nobjective: {name: next_token}\n").objective.weight == 0.5
    assert recipe("extends: base.yaml\nobjective: {name: superposition}\n").objective.bag == 8


def test_overrides_are_yaml_and_the_last_one_counts():
    run = recipe(overrides=["corpus.texts=[a.txt, b.txt]", "budget=2e6 steps", "seed=1", "seed=2", "network.rope=null"])
    assert run.corpus.texts == ("a.txt", "b.txt")
    assert (run.budget, run.seed, run.network.rope) == (Budget(2e6, "steps"), 2, None)


def test_numbers_and_words_are_read_as_yaml_1_2_has_them():
    @register("log")
    class Log:
        class Config(Settings):
            words: tuple[str, ...]
            numbers: tuple[float, ...]
            counts: tuple[int, ...]

    text = """\
log:
  words: [on, off, yes, no, y, 12:30:00, 2026-11-20, 1_000, "3", '6e-4', =, .nan]
  numbers: [6e-4, 1E3, 1., .5, -2, +3.5e+2, 3]
  counts: [2e6, 010, 0x1F, 0o17, +4, 1.5e3]
"""
    log = recipe(BODY + text).log
    words = ("on", "off", "yes", "no", "y", "12:30:00", "2026-11-20", "1_000", "3", "6e-4", "=", ".nan")
    assert log.words == words
    assert log.numbers == (6e-4, 1e3, 1.0, 0.5, -2.0, 350.0, 3.0)
    assert log.counts == (2_000_000, 10, 31, 15, 4, 1500)


@pytest.mark.parametrize("overrides", [[], ["network.name=sps", "network.window=null"], ["network.rope=null"]])
def test_the_saved_recipe_is_read_back_equal(overrides, monkeypatch):
    monkeypatch.setenv("HERE", "/somewhere")
    words = ["on", "null", "6e-4", "0x1F", "true", "~", "", "a: b", "# c", "- d", "ü", "1_000", "${HERE}/x"]
    run = recipe(BODY.replace("[a.txt]", repr(words)) + "  sources: [{path: '${HERE}/y', share: 6.0e-10}]\n", overrides)
    again = recipe(run.to_yaml(), path="saved.yaml")
    assert again == run
    assert again.settings == run.settings
    assert again.fingerprint == run.fingerprint
    assert {str(origin).partition(":")[0] for origin in again.origins.values()} == {"saved.yaml"}


def test_what_a_saved_recipe_says_of_values_that_follow_from_others_does_not_outlive_these():
    Path("saved.yaml").write_text(recipe().to_yaml())
    child = "extends: saved.yaml\nnetwork: {name: decoder, heads: 8}\n"
    told = r"saved.yaml:\d+  network.head_width = 16: .*; network.head_width=null makes it %s, network.head_width=16 k"
    for given, follows in (([], 8), (["network.width=96"], 12)):
        with pytest.raises(UserError, match=told % follows):
            recipe(child, given)
    assert recipe(child, ["network.head_width=null"]).network.head_width == 8
    assert recipe(child, ["network.head_width=16"]).network.head_width == 16
    assert recipe(child, ["network.width=128"]).network.head_width == 16  # as said
    assert load("saved.yaml", ["network.depth=3", "network.heads=4"]).network.head_width == 16
    Path("own.yaml").write_text(BODY.replace("decoder", "decoder\n  head_width: 20"))
    assert load("own.yaml", ["network.heads=8"]).network.head_width == 20  # followed from nothing


def test_a_saved_null_is_derived_anew_from_what_is_changed():
    @register("log")
    class Log:
        class Config(Settings):
            level: str = "off"
            every: int | None = None

            def derive(self):
                return {"every": 9} if self.level == "on" else {}

    Path("saved.yaml").write_text(recipe().to_yaml())
    assert load("saved.yaml").log.every is None
    assert load("saved.yaml", ["log.level=on"]).log.every == 9


def test_a_variable_is_expanded_where_it_is_used_and_kept_where_it_is_saved(monkeypatch):
    text = BODY.replace("[a.txt]", '["${HERE}/${HERE}.txt", $HERE]')
    monkeypatch.setenv("HERE", "x")
    run = recipe(text)
    monkeypatch.setenv("HERE", "y")
    moved = recipe(text)
    assert (run.corpus.texts, moved.corpus.texts) == (("x/x.txt", "$HERE"), ("y/y.txt", "$HERE"))
    assert "${HERE}/${HERE}.txt" in run.to_yaml()
    assert run.fingerprint == moved.fingerprint


def test_a_variable_in_the_key_of_a_mapping_is_one_too(monkeypatch):
    overrides = ["corpus.shares={'${HERE}/a': 0.5, b: 0.5}"]
    monkeypatch.setenv("HERE", "x")
    run = recipe(overrides=overrides)
    monkeypatch.setenv("HERE", "y")
    assert (run.corpus.shares, recipe(overrides=overrides).corpus.shares) == (
        {"x/a": 0.5, "b": 0.5},
        {"y/a": 0.5, "b": 0.5},
    )
    assert run.values["corpus"]["shares"] == {"${HERE}/a": 0.5, "b": 0.5}
    assert run.fingerprint == recipe(overrides=overrides).fingerprint
    monkeypatch.delenv("HERE")
    with pytest.raises(UserError, match="the environment has no HERE"):
        recipe(overrides=overrides)


def test_the_fingerprint_follows_the_values_and_not_where_they_were_written():
    plain = recipe()
    assert recipe("batch: {context: 256}\n" + BODY, ["seed=1337"]).fingerprint == plain.fingerprint
    shares = ["corpus.shares={a: 1, b: 2}"], ["corpus.shares={b: 2, a: 1}"]
    assert recipe(overrides=shares[0]).fingerprint == recipe(overrides=shares[1]).fingerprint
    assert recipe(overrides=["seed=1338"]).fingerprint != plain.fingerprint
    assert recipe(overrides=["budget=5000000 tokens"]).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("text", "amount", "unit", "said"),
    [
        ("5e6 tokens", 5e6, "tokens", "5000000 tokens"),
        ("1 step", 1, "steps", "1 steps"),
        ("7.66e17 FLOPs", 7.66e17, "flops", "7.66e+17 flops"),
        ("1.5 hours", 5400, "seconds", "5400 seconds"),
        ("2 minutes", 120, "seconds", "120 seconds"),
        ("0.25 seconds", 0.25, "seconds", "0.25 seconds"),
    ],
)
def test_a_budget_is_an_amount_of_a_unit(text, amount, unit, said):
    budget = parse_budget(text)
    assert (budget.amount, budget.unit, str(budget)) == (amount, unit, said)
    assert parse_budget(str(budget)) == budget
