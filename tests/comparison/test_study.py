"""A study says what its runs are, and every mistake in it, with its line, before anything is trained."""

import re
from pathlib import Path

import pytest
from tiny import STUDY, read, write
from typed import tandem

from tandem.comparison.folder import StudyFolder
from tandem.comparison.grid import load_grid
from tandem.comparison.page import portable
from tandem.recipe import UserError, load, recipes

RATES = "rates: [1e-3, 4e-3]\n"


def complaint(folder, small_corpus, *overrides, text=STUDY):
    with pytest.raises(UserError) as caught:
        read(folder, small_corpus, *overrides, text=text)
    return str(caught.value).replace(f"{folder}/", "")


def test_arms_differ_only_in_what_they_say(tmp_path, small_corpus):
    study = read(tmp_path, small_corpus)
    assert study.arms["deep"]["network.depth"] == 3 and study.arms["wide"]["network.depth"] == 1
    assert all(key.startswith("network.") for arm in study.arms.values() for key in arm)
    runs = study.runs(dict.fromkeys(study.arms))
    assert [run.name for run in runs] == ["deep-seed1", "wide-seed1"]
    deep, wide = map(study.recipe, runs)
    for key in deep.origins:
        assert key in study.arms["deep"] or deep.value(key) == wide.value(key), key
    assert (deep.seed, str(deep.budget), deep.batch.rows) == (1, "30 steps", 2)


def test_every_arm_gets_the_same_trials_on_documents_of_their_own(tmp_path, small_corpus):
    study = read(tmp_path, small_corpus, "seeds=[4, 5]", "rates=[1e-3, 4e-3]")
    trials = study.trials()
    assert [trial.name for trial in trials] == ["deep-lr0.001", "wide-lr0.001", "deep-lr0.004", "wide-lr0.004"]
    for trial in trials:
        recipe = study.recipe(trial)
        assert recipe.seed == 1000 and recipe.optimiser.lr == trial.rate and recipe.evaluation.split == "tuning"
    runs = study.runs({"deep": 1e-3, "wide": 4e-3})
    assert [run.name for run in runs][:2] == ["deep-lr0.001-seed4", "wide-lr0.004-seed4"]
    assert {study.recipe(run).evaluation.split for run in runs} == {"comparison"}
    assert study.recipe(runs[1]).optimiser.lr == 4e-3
    assert read(tmp_path, small_corpus).recipe(runs[0]._replace(rate=None)).evaluation.split == "all"


def test_runs_share_what_they_may_spend_together(tmp_path, small_corpus):
    text = STUDY.replace("budget: 30 steps", "together: 2 minutes")
    study = read(tmp_path, small_corpus, "seeds=[1, 2, 3]", "rates=[1e-3, 4e-3, 8e-3]", text=text)
    assert str(study.budget) == "10 seconds" == str(study.recipe(study.trials()[0]).budget)
    text = text.replace("2 minutes", "200 seconds")
    assert str(read(tmp_path, small_corpus, "seeds=[1, 2, 3]", text=text).budget) == "33.33 seconds"


def test_it_knows_the_runs_that_its_arms_start_from(tmp_path, small_corpus):
    assert not read(tmp_path, small_corpus).starts
    started = read(tmp_path, small_corpus, "arms.wide.start.run=runs/plain").starts
    assert started == {"wide": Path("runs/plain")}
    assert list(read(tmp_path, small_corpus, "start.run=runs/plain").starts) == ["deep", "wide"]


def test_an_arm_waits_for_a_run_that_is_named_by_the_environment(tmp_path, small_corpus, monkeypatch):
    monkeypatch.setenv("STUDIES", str(tmp_path))
    study = read(tmp_path, small_corpus, "arms.wide.start.run=${STUDIES}/tiny/runs/deep-seed1")
    deep, wide = study.runs(dict.fromkeys(study.arms))
    folder = StudyFolder(study, tmp_path / "tiny")
    assert folder.waits_for(wide) == tmp_path / "tiny/runs/deep-seed1" and folder.waits_for(deep) is None


def test_trials_may_be_shorter_than_runs(tmp_path, small_corpus):
    study = read(tmp_path, small_corpus, "rates=[1e-3, 4e-3]", "trial_share=0.3")
    trials = map(study.recipe, study.trials())
    runs = map(study.recipe, study.runs(dict.fromkeys(study.arms, 1e-3)))
    assert {str(trial.budget) for trial in trials} == {"9 steps"}
    assert {str(run.budget) for run in runs} == {"30 steps"}
    assert not read(tmp_path, small_corpus, "rates=[]", text=STUDY + RATES + "trial_share: 0.3\n").trials()
    text = STUDY.replace("budget: 30 steps", "together: 2 minutes")
    study = read(tmp_path, small_corpus, "seeds=[1, 2]", "rates=[1e-3, 4e-3]", "trial_share=0.5", text=text)
    assert str(study.budget) == "20 seconds" and str(study.recipe(study.trials()[0]).budget) == "10 seconds"


def test_its_values_lie_over_those_of_the_recipe_and_under_those_of_the_arm(tmp_path, small_corpus):
    text = STUDY.replace("wide: {network.depth: 1}", "wide: {recipe: decoder/1m, batch: {rows: 3}}")
    study = read(tmp_path, small_corpus, "evaluation.every=7", "arms.wide.network.heads=2", text=text)
    deep, wide = (study.recipe(run) for run in study.runs(dict.fromkeys(study.arms)))
    assert (wide.network.width, wide.network.heads, wide.batch.rows, deep.batch.rows) == (128, 2, 3, 2)
    assert wide.evaluation.every == deep.evaluation.every == 7


def test_another_name_starts_a_section_afresh_in_a_study_too(tmp_path, small_corpus):
    text = STUDY.replace("overrides:\n", "overrides:\n  network: {name: sps, window: 5}\n")
    write(tmp_path, small_corpus, text=text.replace("wide: {", "wide: {optimiser: {name: muon, lr: 4e-3}, "))
    top = tmp_path / "top.yaml"
    top.write_text("extends: tiny.yaml\narms: {wide: {optimiser: {name: adamw}}}\noverrides: {network.name: decoder}\n")
    study = load_grid(str(top)).cells[""]
    deep, wide = map(study.recipe, study.runs(dict.fromkeys(study.arms)))
    assert deep.network.window is None and (deep.network.depth, wide.network.depth) == (3, 1)
    assert deep.optimiser == wide.optimiser
    below = load_grid(str(tmp_path / "tiny.yaml"), ["network.name=decoder"]).cells[""]
    assert below.recipe(below.runs(dict.fromkeys(below.arms))[0]).network == deep.network


def test_it_is_told_what_another_name_drops(tmp_path, small_corpus):
    path = write(tmp_path, small_corpus, text=STUDY.replace("overrides:\n", "overrides:\n  optimiser.lr: 3e-3\n"))
    told = tandem("compare", path, "--studies", tmp_path, "--list", "optimiser.name=muon").stderr
    assert told.startswith("optimiser.name=muon starts the section afresh, without optimiser.lr=0.003 of the recipe;")
    assert told.count("\n") == 1
    assert not tandem("compare", path, "--studies", tmp_path, "--list").stderr
    in_an_arm = tandem("compare", path, "--studies", tmp_path, "--list", "arms.wide.optimiser.name=muon").stderr
    assert in_an_arm == told


def test_arms_may_keep_one_text_in_several_places(tmp_path, small_corpus):
    text = STUDY.replace("wide: {network.depth: 1}", "wide: {corpus.folder: elsewhere}")
    study = read(tmp_path, small_corpus, text=text)
    assert study.arms["wide"]["corpus.folder"] == "elsewhere"


@pytest.mark.parametrize(
    ("written", "instead_of", "line"),
    [
        (
            "baseline: dep",
            "baseline: deep",
            'tiny.yaml:17  baseline = "dep": no such arm; did you mean deep? arms: deep',
        ),
        ("seeds: [1, 1]", "seeds: [1]", "tiny.yaml:18  seeds = [1, 1]: one is written twice"),
        (
            "seeds: []",
            "seeds: [1]",
            "tiny.yaml:18  seeds = []: must be a list of length >= 1, each item a whole number >= 0",
        ),
        ("seed: [1]", "seeds: [1]", "tiny.yaml:18  seed = [1]: no such key; did you mean seeds? a study takes title"),
        ("gird: {}", "", "gird = {}: no such key; did you mean grid? a study takes title"),
        ("budget: 3 Gt", "budget: 30 steps", 'tiny.yaml:19  budget = "3 Gt": unknown unit "Gt"; write "5e9 tokens"'),
        ("", "budget: 30 steps", "budget: required: what each run may spend"),
        (
            "together: 1 hour",
            "",
            'tiny.yaml:20  together = "3600 seconds": budget = "30 steps" is given too; take one of them out',
        ),
        ("rates: [1e-3]", "", "tiny.yaml:20  rates = [0.001]: one is no choice"),
        (RATES + "tuning_seed: 1", "", "tiny.yaml:18  seeds = [1]: 1 is the seed of the trials"),
        (
            "deep: {network.dept: 3}",
            "deep: {network.depth: 3, network.width: 32}",
            "network.dept = 3: no such key; did",
        ),
        (
            "deep: {network.depth: 3, network: {depth: 2, width: 32}}",
            "deep: {network.depth: 3, network.width: 32}",
            "tiny.yaml:15  arms.deep.network.depth: written twice, first at tiny.yaml:15",
        ),
        (
            "batch: {rows: 2, context: 32}\n  batch.rows: 3",
            "batch: {rows: 2, context: 32}",
            "tiny.yaml:10  overrides.batch.rows: written twice, first at tiny.yaml:9",
        ),
        ("wide: {seed: 3}", "wide: {network.depth: 1}", "tiny.yaml:16  arms.wide.seed: the study gives it"),
        (
            "wide: {evaluation.split: tuning}",
            "wide: {network.depth: 1}",
            "tiny.yaml:16  arms.wide.evaluation.split: the study gives it to every arm alike: with rates one half of",
        ),
        (
            "evaluation: {documents: 5, split: comparison}",
            "evaluation.documents: 5",
            "tiny.yaml:13  overrides.evaluation.split: the study gives it to every arm alike: with rates one half of",
        ),
        (
            "trial_share: 0.5",
            "",
            "tiny.yaml:20  trial_share = 0.5: is for trials, and without rates there are none; take it out",
        ),
        ("tuning_seed: 9", "", "tiny.yaml:20  tuning_seed = 9: is for trials, and without rates there are none; take"),
        ("wide/1: {}", "wide: {network.depth: 1}", "tiny.yaml:16  arms.wide/1: must be a name of letters"),
        (
            "wide: {recipe: decoder/2m}",
            "wide: {network.depth: 1}",
            'tiny.yaml:16  recipe = "decoder/2m": no such recipe',
        ),
        (
            "wide: {extends: decoder/1m}",
            "wide: {network.depth: 1}",
            "tiny.yaml:16  arms.wide.extends: what an arm extends is written as its recipe",
        ),
        (
            "overrides:\n  extends: decoder/1m\n",
            "overrides:\n",
            "tiny.yaml:9  overrides.extends: what all arms extend is written as the study's recipe",
        ),
        (
            "wide: {recipe: {name: 1}}",
            "wide: {network.depth: 1}",
            "tiny.yaml:16  recipe = \"{'name': 1}\": no such recipe",
        ),
        (
            "wide: {corpus.vocabulary: 300}",
            "wide: {network.depth: 1}",
            "tiny.yaml:16  corpus.vocabulary = 300 in arm wide",
        ),
    ],
)
def test_a_mistake_has_its_line(tmp_path, small_corpus, written, instead_of, line):
    text = STUDY.replace(instead_of, written) if instead_of else STUDY + written + "\n"
    assert line in complaint(tmp_path, small_corpus, text=text)


def test_all_mistakes_of_all_arms_are_told_once(tmp_path, small_corpus):
    lines = complaint(tmp_path, small_corpus, "network.dept=3", "arms.wide.batch.rows=0").splitlines()
    assert len(lines) == 2 and lines[0].startswith("override  network.dept = 3") and "batch.rows = 0" in lines[1]


def test_data_elsewhere_are_named_without_where_they_lie(tmp_path, small_corpus, monkeypatch):
    texts = next(line.partition("=")[2] for line in small_corpus if line.startswith("corpus.texts"))
    override = 'corpus.texts=["${TANDEM_DATA}/sub/*.txt"]'
    monkeypatch.delenv("TANDEM_DATA", raising=False)
    assert "the environment has no TANDEM_DATA; set it" in complaint(tmp_path, small_corpus, override)
    monkeypatch.setenv("TANDEM_DATA", "/somewhere")
    study = read(tmp_path, small_corpus, override)
    assert [*map(portable, study.texts)] == ["sub/*.txt"] and "/somewhere" not in study.to_yaml()
    assert [*map(portable, read(tmp_path, small_corpus).texts)] == [texts.strip("[]").rpartition("/")[2]]


def test_what_is_done_is_listed_of_this_study_alone(tmp_path, small_corpus):
    StudyFolder(read(tmp_path, small_corpus), tmp_path / "tiny").open()
    with pytest.raises(UserError, match=r"holds another study(.|\n)*budget: 30 steps there, 9 steps asked"):
        StudyFolder(read(tmp_path, small_corpus, "budget=9 steps"), tmp_path / "tiny").status()
    for damaged in ("", "arms: [", "arms: [1]", "seeds: [1]"):
        (tmp_path / "tiny" / "study.yaml").write_text(damaged)
        with pytest.raises(UserError, match=r"study.yaml: damaged; delete it if all runs here are of this study"):
            StudyFolder(read(tmp_path, small_corpus), tmp_path / "tiny").status()


def test_more_may_be_added_to_a_study_but_nothing_else_changed(tmp_path, small_corpus):
    def opened(*overrides, text=STUDY + RATES):
        StudyFolder(read(tmp_path, small_corpus, *overrides, text=text), tmp_path / "studies" / "tiny").open()

    def refused(*overrides, text=STUDY + RATES):
        with pytest.raises(UserError, match="holds another study") as caught:
            opened(*overrides, text=text)
        return [line.strip() for line in str(caught.value).splitlines()[1:]]

    opened()
    assert refused("seeds=[2]") == ["seeds: [1] there, [2] asked"]
    assert refused("budget=9 steps", "level=0.1") == [
        "budget: 30 steps there, 9 steps asked",
        "level: 0.05 there, 0.1 asked",
    ]
    assert refused("arms.wide.network.depth=2") == ["arms.wide.network.depth: 1 there, 2 asked"]
    assert refused(text=STUDY.replace("wide:", "flat:") + RATES) == ["arms.wide: an arm there, absent asked"]
    assert "rates: [0.001, 0.004] there, [] asked" in refused(text=STUDY)
    opened("seeds=[1, 2]", "rates=[1e-3, 4e-3, 8e-3]", "targets=[3.5]", "arms.flat.network.depth=2", "title=Another")
    assert refused() == ["seeds: [1, 2] there, [1] asked", *refused()[1:]]


def test_a_study_that_shares_a_budget_grows_by_the_budget_of_a_run(tmp_path, small_corpus):
    def opened(key, value, seeds):
        text = STUDY.replace("budget: 30 steps", f"{key}: {value}").replace("seeds: [1]", f"seeds: {seeds}")
        StudyFolder(read(tmp_path, small_corpus, text=text), tmp_path / "tiny").open()

    opened("together", "60 steps", [1])
    with pytest.raises(UserError, match="budget: 30 steps there, 15 steps asked; write `budget: 30 steps` in place of"):
        opened("together", "60 steps", [1, 2])
    opened("budget", "30 steps", [1, 2])
    opened("together", "120 steps", [1, 2])


def test_a_command_writes_no_report_of_less_than_was_added_meanwhile(tmp_path, small_corpus):
    older = StudyFolder(read(tmp_path, small_corpus), tmp_path / "tiny")
    older.open()
    older.write()
    newer = StudyFolder(read(tmp_path, small_corpus, "seeds=[1, 2]"), tmp_path / "tiny")
    newer.open()
    page = newer.write().read_text()
    with pytest.raises(UserError, match=r"holds another study(.|\n)*seeds: \[1, 2\] there, \[1\] asked"):
        older.write()
    assert newer.write().read_text() == page


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("studies/")])
def test_the_studies_that_come_with_tandem_are_without_mistake(name, monkeypatch):
    monkeypatch.setenv("TANDEM_DATA", "/data")
    for study in load_grid(name.removeprefix("studies/")).cells.values():
        assert study.arms.keys() >= {study.baseline} and study.texts


def test_a_recipe_is_told_from_a_study_and_a_misspelt_name_from_both(tmp_path, small_corpus):
    for reference, told in {
        "decoder/tiny": "tiny.yaml  this is a recipe, not a study; `tandem train` trains it",
        "demoo": '"demoo": no such study; did you mean demo? `tandem show` lists them',
        "studies/demoo": '"studies/demoo": no such study; did you mean demo? `tandem show` lists them',
    }.items():
        with pytest.raises(UserError, match=re.escape(told)):
            load_grid(reference)
    path = write(tmp_path, small_corpus)
    for reference in (str(path), "studies/demo"):
        with pytest.raises(UserError, match=r"yaml  this is a study, not a recipe; `tandem compare` trains its arms"):
            load(reference, ["network.depth=3"])
    assert tandem("show", path, "seeds=[7]").stdout.startswith("title: Deep or wide\n")


def test_the_file_written_is_found_by_its_path(tmp_path, small_corpus):
    assert load_grid(str(write(tmp_path, small_corpus, name="mine"))).name == "mine"


def test_arms_may_cut_the_same_text_into_other_sentences(tmp_path, small_corpus):
    told = STUDY.replace("{network.depth: 1}", "{network.depth: 1, corpus.sentences: {splitter: every, every: 25}}")
    assert read(tmp_path, small_corpus, text=told).arms["wide"]["corpus.sentences.every"] == 25
    other = STUDY.replace("{network.depth: 1}", "{network.depth: 1, corpus.vocabulary: 300}")
    assert "must be the same, or the losses are of different texts" in complaint(tmp_path, small_corpus, text=other)
