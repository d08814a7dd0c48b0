"""A trained run is read with other settings that shape no weight, as its twin that was trained with them is."""

import json
import shutil

import pytest
from typed import tandem

import tandem as library
from tandem.comparison.trained import _recipe
from tandem.recipe import UserError, load
from tandem.training.folder import RunFolder

SMALL = ["budget=4 steps", "batch.rows=2", "batch.context=32", "sampling.tokens=3", "network.width=32"]
SMALL += ["network.depth=1", "network.passes=2", "network.passes_min=null", "network.init=normal"]
TWO = "network.score_passes=2"
FREE = "of context_ready: network.dropout, network.passes, network.passes_min, network.score_passes"


@pytest.fixture(scope="module")
def runs(small_corpus, tmp_path_factory):
    """Two runs of the same weights, one of which was trained with TWO."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more in ("mine", []), ("twin", [TWO]):
        done = tandem("train", "context_ready/tiny", "--run", name, "--runs", folder, *SMALL, *small_corpus, *more)
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def mine(runs, tmp_path):
    return shutil.copytree(runs / "mine", tmp_path / "mine")


@pytest.fixture
def poem(tmp_path):
    (tmp_path / "poem.txt").write_text("The cat sees a large red house and then sleeps. " * 9)
    return tmp_path / "poem.txt"


def said(*words):
    done = tandem(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


def scores(run, **more):
    opened = library.open_trained(run, **more)
    return library.scored(opened, opened.corpus.validation).nats_by_document.tolist()


def test_a_run_is_scored_as_its_twin(runs, mine, poem):
    found, twins = scores(mine, overrides=[TWO]), scores(runs / "twin")
    assert found == twins == scores(mine, overrides=TWO) != scores(mine)
    before = (mine / "recipe.yaml").read_bytes()
    texts = "--texts", f"poem={poem}"
    first, *rest = said("evaluate", mine, TWO, *texts).splitlines()
    other, *others = said("evaluate", runs / "twin", *texts).splitlines()
    assert rest == others and first == other.replace("of 4:", f"of 4, {TWO}:") != other
    assert TWO not in said("evaluate", mine, *texts) and (mine / "recipe.yaml").read_bytes() == before


def test_records_of_tasks_and_analyses_tell_the_settings(runs, mine, poem):
    (mine.parent / "own.yaml").write_text(f"texts: {{poem: {poem}}}")
    twin, kept = shutil.copytree(runs / "twin", mine.parent / "twin"), {}
    for run, *more in ((mine, TWO), (mine,), (twin,)):
        shown = said("evaluate", run, "--tasks", mine.parent / "own.yaml", *more)
        record = json.loads((run / "tasks/poem.json").read_text())
        assert record["overrides"] == more and (TWO in shown) == bool(more)
        kept[run.name, *more] = record["metrics"]
    assert kept["mine", TWO] == kept["twin",] != kept["mine",]
    asked = "documents=3", "passes=3"
    for more in (["network.tolerance=100"], []):
        shown = said("analyse", "contraction", mine, *more, *asked)
        record = json.loads((mine / "analysis/contraction.json").read_text())
        assert record.get("overrides", []) == more and ("network.tolerance=100" in shown) == bool(more)
        assert record["passes_to_tolerance"] == (2 if more else None) and record["options"]["passes"] == 3
    said("analyse", "coordinate_check", mine, TWO, "widths=[32, 64]", "steps=0")  # of a run, without its weights
    assert json.loads((mine / "analysis/coordinate_check.json").read_text())["overrides"] == [TWO]


def test_text_is_generated_and_the_setting_is_no_prompt(mine, poem, monkeypatch):
    generated, passes = "tandem.comparison.trained.stream_text", []

    def noted(network, *given, **more):
        passes.append(network.config.score_passes)
        return library.stream_text(network, *given, **more)

    monkeypatch.setattr(generated, noted)
    options = "--tokens", 3, "--json"
    for words in (["The cat", TWO], [TWO, "The cat"], ["The cat"], [TWO], [TWO, "--file", poem]):
        (line,) = said("generate", mine, *words, *options).splitlines()
        expected = poem.read_text() if poem in words else "The cat" if "The cat" in words else ""
        assert json.loads(line)["prompt"] == expected
        assert passes.pop() == (2 if TWO in words else "stream")
    poem.write_text("network.depth=2")
    assert json.loads(said("generate", mine, "--file", poem, *options))["prompt"] == "network.depth=2"
    assert json.loads(said("generate", mine, "network. depth=2", *options))["prompt"] == "network. depth=2"


def test_an_exported_model_has_them_beside_the_recipe_of_training(runs, mine, poem):
    assert f"(step 4, {TWO})" in said("export", mine, mine.parent / "model", TWO)
    found, twins = (json.loads((at / "config.json").read_text()) for at in (mine.parent / "model", runs / "twin/model"))
    assert found["network"] == twins["network"] and found["network"]["score_passes"] == 2
    assert found["recipe"] == load(str(mine / "recipe.yaml")).values
    told = said("evaluate", mine.parent / "model", "--texts", f"poem={poem}")
    assert told == said("evaluate", runs / "twin/model", "--texts", f"poem={poem}")
    assert told != said("evaluate", mine / "model", "--texts", f"poem={poem}")


@pytest.mark.parametrize("wrong", ["network.depth=2", "network.name=decoder", "batch.context=64"])
@pytest.mark.parametrize("use", ["evaluate", "generate", "export", "contraction", "coordinate_check"])
def test_any_other_setting_is_refused_with_those_that_may_be_given(mine, tmp_path, use, wrong):
    before = sorted(tmp_path.rglob("*"))
    words = {"evaluate": [use, mine], "generate": [use, mine], "export": [use, mine, tmp_path / "model"]}
    done = tandem(*words.get(use, ["analyse", use, mine]), TWO, wrong)
    assert done.exit_code == 2 and done.stderr.startswith(f"{wrong}: only a setting that shapes no weight")
    assert FREE in done.stderr and not done.stdout and sorted(tmp_path.rglob("*")) == before
    assert ("give it by --file" in done.stderr) == (use == "generate")


def test_a_value_is_refused_as_in_a_recipe(mine):
    for given, why in (
        (["network.score_passes=0"], "must be stream or a whole number >= 1"),
        (["network.score_passes"], "write section.key=value"),
        (["network={score_passes: 2}"], FREE),
        ([TWO, "network.prefill=3"], "take prefill: converge, or score_passes: stream"),
    ):
        done = tandem("evaluate", mine, *given)
        assert done.exit_code == 2 and why in done.stderr and not done.stdout


def test_a_model_that_is_exported_keeps_its_own(runs):
    for words in (["evaluate", "--texts", "a=b"], ["generate"]):
        done = tandem(words[0], runs / "mine/model", TWO, *words[1:])
        assert done.exit_code == 2 and "tandem export RUN FOLDER network.KEY=VALUE" in done.stderr and not done.stdout
    with pytest.raises(UserError, match="keeps the settings that it was exported with"):
        library.open_model(runs / "mine/model", overrides=[TWO])


def test_part_of_a_setting_may_be_given(small_corpus, tmp_path):
    recipe = load("double_decoder/tiny", ["network.partition.min_context=2", *small_corpus])
    RunFolder.start(tmp_path / "run", recipe.to_yaml()).close()
    found = _recipe(RunFolder.open(tmp_path / "run"), ["network.partition.align=2"]).network.partition
    assert found == recipe.network.partition.model_copy(update={"align": 2})
