"""A grid is studies in cells: what is there is not run again, and all of them together tell how loss scales."""

import json
import math
import operator
import re
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import STUDY, TrainedHere, write
from typed import tandem

pytest.importorskip("scipy")

from tandem.comparison.grid import compare, load_grid, rows_by_rule
from tandem.comparison.scaling import Law, Measured
from tandem.comparison.scaling_report import Cell, Scaling, write_scaling
from tandem.comparison.table import PAID
from tandem.disk import lock
from tandem.recipe import UserError

GRID = (
    STUDY.replace("budget: 30 steps\n", "")
    + """\
grid:
  sizes:
    small: {overrides: {network.width: 32}}
    large: {seeds: [1, 2], arms: {wide: {network.depth: 2}}}
  budgets: [2 steps, 192 tokens]
"""
)


def test_a_cell_is_the_study_with_its_size_and_budget_on_top(tmp_path, small_corpus):
    grid = load_grid(str(write(tmp_path, small_corpus, GRID)), ["batch.rows=3", "seeds=[7]"])
    assert list(grid.cells) == ["small-2-steps", "small-192-tokens", "large-2-steps", "large-192-tokens"]
    assert list(grid.sizes.values()) == ["small", "small", "large", "large"]
    small, large = grid.cells["small-192-tokens"], grid.cells["large-2-steps"]
    assert str(small.budget) == "192 tokens" and str(large.budget) == "2 steps" and large.seeds == [7]
    (deep, wide), (other_deep, other_wide) = (
        [study.recipe(job).network for job in study.runs(dict.fromkeys(study.layers))] for study in (small, large)
    )
    assert (deep.width, wide.width, wide.depth) == (32, 32, 1)
    assert (other_deep.width, other_wide.width, other_wide.depth) == (32, 64, 2)
    assert small.recipe(small.runs(dict.fromkeys(small.layers))[0]).batch.rows == 3


def test_commands_that_end_together_write_the_report_in_turn(tmp_path, small_corpus, monkeypatch):
    def write_alone(cells, path):
        assert lock(path / ".lock") is None
        return path, "written"

    monkeypatch.setattr("tandem.comparison.grid.write_scaling", write_alone)
    monkeypatch.setattr("tandem.comparison.runner.compare", lambda *_: None)
    compare(load_grid(str(write(tmp_path, small_corpus, GRID))), tmp_path)


def test_a_study_without_a_grid_is_one_cell(tmp_path, small_corpus):
    grid = load_grid(str(write(tmp_path, small_corpus)))
    assert list(grid.cells) == [""] and not grid.sizes and grid.name == "tiny"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GRID + "budget: 5 steps\n", "budget: each cell has a budget of its own; write grid.budgets"),
        (GRID.replace("{seeds: [1, 2],", "{budget: 5 steps,"), "budget: each cell has a budget of its own"),
        (GRID.replace("    small:", "    sm/all:"), "grid.sizes.sm/all: must be a name"),
        (GRID.partition("grid:")[0] + "grid: 5\n", "grid: must be a mapping of sizes, budgets, trunk, rows"),
        (STUDY.replace("arms:\n", "arms:\n  none: 5\n"), "arms.none = 5: must be a mapping"),
        (GRID + "  rows: rule\n", "grid.rows = rule: it goes by tokens"),
        (GRID.replace("192 tokens", "96 tokens, 9.6e1 tokens"), "96 tokens]: one is written twice"),
        (GRID.replace("sizes:", "size:"), "no such key; did you mean grid.sizes?"),
        (GRID.replace("192 tokens", "192 toks"), 'unknown unit "toks"'),
        (GRID.replace("{seeds: [1, 2],", "{baseline: wide,"), "baseline: the same at every size; write it beside grid"),
        (GRID.replace("{seeds: [1, 2],", "{level: 0.1,"), "level: the same at every size; write it beside grid"),
        (GRID.replace("{seeds: [1, 2],", "{rates: [1e-3, 2e-3],"), "grid.sizes: rates at some sizes alone"),
        (
            GRID.replace("{network.depth: 2}}", "{network.depth: 2}}, overrides: {corpus.vocabulary: 300}"),
            "corpus.vocabulary = 300 in arm deep of large, 400 in deep of small: must be the same, or the losses are",
        ),
        (GRID.replace("network.width: 32}}\n    l", "network.widht: 32}}\n    l"), "did you mean network.width?"),
    ],
)
def test_mistakes_are_told_with_their_cure(tmp_path, small_corpus, text, complaint):
    with pytest.raises(UserError) as caught:
        load_grid(str(write(tmp_path, small_corpus, text)))
    assert complaint in str(caught.value)


def test_rows_of_a_step_follow_the_rule_of_the_double_decoders():
    """12 C^2 L parameters at the paper's five sizes, against its five numbers of tokens."""
    sizes = [(192, 15), (256, 15), (448, 12), (576, 12), (832, 12)]
    table = [[32, 96, 128, 128, 128], [32, 96, 160, 160, 160], [32, 96, 224, 224, 224], [32, 96, 224, 256, 256],
             [32, 96, 224, 320, 320]]  # fmt: skip
    tokens = [62.5e6, 125e6, 250e6, 500e6, 1e9]
    assert [[rows_by_rule(12 * C**2 * L, D) for D in tokens] for C, L in sizes] == table


def test_a_grid_takes_rows_by_the_rule(tmp_path, small_corpus):
    text = GRID.replace("budgets: [2 steps, 192 tokens]", "budgets: [2e6 tokens, 1e9 tokens]\n  rows: rule")
    grid = load_grid(str(write(tmp_path, small_corpus, text.replace("batch: {rows: 2, ", "batch: {"))))
    rows = {name: [c.recipe(j).batch.rows for j in c.runs(dict.fromkeys(c.layers))] for name, c in grid.cells.items()}
    assert rows["small-2000000-tokens"] == [32, 32] and rows["large-1000000000-tokens"] == [32] * 4


# The report ---------------------------------------------------------------------------------------------------------

BASE = Law(E=1.7, A=60.0, alpha=0.32, B=400.0, beta=0.36)
GAINED = Law(BASE.E, BASE.A, BASE.alpha, BASE.B * 0.8**BASE.beta, BASE.beta)


STUDIED = SimpleNamespace(
    title="How far?", question="Does it <scale>?", arms={"base": {}, "gained <a>": {}}, baseline="base", seeds=[1, 2],
    level=0.05,
)  # fmt: skip


def cells(sizes=(1e6, 3e6, 1e7), budgets=(2e7, 6e7, 2e8), documents=5, tokens=9, ends=(), text=None):
    """As if `gained` read a quarter more; `ends`: arms that pay 0.2 nats per token for sentence ends."""
    draw = np.random.default_rng(0)
    found = []
    for N in sizes:
        for D in budgets:
            results = []
            for arm, law in {"base": BASE, "gained <a>": GAINED}.items():
                for seed in (1, 2):
                    nats = float(law.loss([Measured(N, D, 0, 0)])[0]) * np.exp(draw.normal(0, 1e-3))
                    results.append(
                        SimpleNamespace(
                            arm=arm, seed=seed, trial=False, folder=f"{arm}-{seed}", documents=np.arange(documents),
                            document_tokens=np.full(documents, tokens), end_nats=np.full(documents, arm in ends),
                            paid_per_token=nats + 0.2 * (arm in ends),
                            parameters={"embedding": 10**6, "mlp": int(N)}, tokens=int(D), flops=6 * N * D,
                            nats_per_token=nats, steps=int(D / 1e4), positions=int(D / 2),
                            training_seconds=D / 1e5, text=text, environment=[{}],
                        )
                    )  # fmt: skip
            found.append(Cell(f"{N:.0e}", f"{D:.0e} tokens", results, STUDIED))
    return found


def test_the_report_tells_laws_lines_and_what_a_method_saves(tmp_path):
    page, text = write_scaling(cells(), tmp_path)
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert len(record["runs"]) == 36 and len(record["lines"]) == 12
    assert all(run["positions"] == run["tokens"] / 2 for run in record["runs"])
    value, low, high = record["laws"]["base"]["E"]
    assert low < 1.7 < high and low < value < high
    assert len(record["multipliers"]["tokens"]) == len(record["multipliers"]["parameters"]) == 9
    for found in record["multipliers"]["tokens"]:
        assert found["laws"][1] < found["laws"][0] < found["laws"][2]
        assert found["laws"][0] == pytest.approx(1.25, abs=0.05)
        beyond = found["budget"] == "2e+08 tokens"  # the baseline has no run of a quarter more
        line = found["lines"] if beyond else found["lines"][0]
        assert line == pytest.approx(1.25, abs=0.15)  # lines do not bend as laws do
        assert found["measured"] != line
    assert all(found["laws"][0] > 1.1 for found in record["multipliers"]["parameters"])
    for title in ("bootstrap over residuals of cells", "without a floor", "lowest and the highest seed"):
        assert title in text and title in page.read_text()
    place = operator.itemgetter("size", "budget")
    for read in record["readings"]:
        of = {arm: [r["nats"] for r in record["runs"] if (r["arm"], r["size"], r["budget"]) == (arm, *place(read))]
              for arm in STUDIED.arms}  # fmt: skip
        assert read["equal_flops"] == pytest.approx(np.mean(of["gained <a>"]) - np.mean(of["base"]))
        assert read["equal_data"] == read["equal_flops"] < 0
        multiples = [read[f"{what}_at_equal_loss"] for what in ("steps", "flops", "seconds")]
        if read["budget"] == "2e+08 tokens":  # the baseline has no longer run, so it never reaches this loss
            assert multiples == [[1.0, ">"]] * 3
        else:
            assert [value for value, _ in multiples] == pytest.approx([1.25] * 3, abs=0.1)
        by_seed = [read["by_seed"][seed]["equal_flops"] for seed in ("1", "2")]
        assert by_seed == pytest.approx([a - b for a, b in zip(of["gained <a>"], of["base"], strict=True)])
    assert len(record["readings"]) == 9
    for title in ("Nats per token", "L = E + A N^-alpha", "L = a x^-b", "Effective data", "Effective parameters"):
        assert title in text and title in page.read_text()
    html = page.read_text()
    assert "gained <a>" not in html and "Does it &lt;scale&gt;?" in html and html.count("<svg") == 3


def test_arms_are_compared_on_the_seeds_that_both_have(tmp_path):
    """`gained` is the baseline, seed by seed, and a seed adds 1; its second seed is missing in one cell, not finite in
    another."""
    three = cells(sizes=(1e6,))
    for cell in three:
        base, gained = cell.results[:2], cell.results[2:]
        for one, other in zip(base, gained, strict=True):
            other.paid_per_token = one.paid_per_token = one.paid_per_token + one.seed
    three[0].results.pop()
    three[1].results[-1].paid_per_token = math.nan
    page, text = write_scaling(three, tmp_path)
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert [(read["budget"], read["equal_flops"], [*read["by_seed"]]) for read in record["readings"]] == [
        ("2e+07 tokens", 0.0, ["1"]), ("2e+08 tokens", 0.0, ["1", "2"])
    ]  # fmt: skip
    assert not record["multipliers"]["tokens"]
    assert "Missing: gained <a>, 1e+06, 20 M tokens, seed 2." in text
    assert "likelihood of gained <a>, 1e+06, 60 M tokens, seed 2." in text and "seed 2. The arm" in page.read_text()
    assert {(run["arm"], run["budget"]) for run in record["runs"]} == {
        ("base", "2e+07 tokens"), ("base", "6e+07 tokens"), ("base", "2e+08 tokens"),
        ("gained <a>", "2e+07 tokens"), ("gained <a>", "2e+08 tokens"),
    }  # fmt: skip


def test_runs_are_said_to_share_steps_where_some_have_taken_them_over():
    """Not where they were to: none has done so whose warm-up is a share."""
    found = cells(sizes=(1e6,))
    assert not Scaling.of(found).warnings
    found[0].results[-1].environment = [{"trunk": "runs/base-1, step 5"}]
    assert "share steps (grid.trunk)" in Scaling.of(found).warnings[0]


@pytest.mark.parametrize("lost", [slice(2, 4), slice(0, 2), slice(0, 4)])  # of an arm, of the baseline, of both
def test_multipliers_wait_for_a_whole_cell(lost):
    cells_of_one = cells(sizes=(1e6,), budgets=(2e7, 6e7, 2e8, 6e8))
    assert len(Scaling.of(cells_of_one).multipliers("tokens")) == 4
    del cells_of_one[0].results[lost]
    assert not Scaling.of(cells_of_one).multipliers("tokens")


def test_where_runs_are_few_nothing_is_said(tmp_path):
    _, text = write_scaling(cells(budgets=(2e7, 6e7)), tmp_path)
    assert "alpha" not in text and "Effective data" not in text and "Effective parameters" in text
    assert "at equal FLOPs" in text and "at equal FLOPs" not in write_scaling(cells(budgets=(2e7,)), tmp_path)[1]
    unlike = [cell._replace(budget="1e13 flops") for cell in cells()]
    assert not [axis for axis, _ in Scaling.of(unlike).lines if axis == "parameters"]
    _, text = write_scaling(cells(sizes=(1e6,), budgets=(2e7,)), tmp_path)
    assert "Nats per token" in text and "exponent" not in text
    for more, axes in ((50_000, ["parameters"]), (500_000, [])):  # one budget in seconds: alike, or sizes apart
        seconds = cells(budgets=(2e7,))
        for place, result in enumerate(result for cell in seconds for result in cell.results):
            result.tokens += more * place
        found = Scaling.of(seconds)
        assert not found.laws and [axis for axis, _ in found.lines] == axes


def test_a_law_takes_six_cells_however_many_seeds_they_have():
    """Two budgets in FLOPs at three sizes: with one cell missing, five numbers would go through five means exactly."""
    six = [
        cell._replace(budget=f"{flops} flops")
        for N in (1e6, 3e6, 1e7)
        for flops in (1e15, 4e15)
        for cell in cells(sizes=(N,), budgets=(flops / 6 / N,))
    ]
    assert [*Scaling.of(six).laws] == ["base", "gained <a>"] and not Scaling.of(six[:-1]).laws


@pytest.mark.parametrize("other", [{"documents": 6}, {"tokens": 8}])
def test_cells_on_different_documents_are_refused(other):
    one, *others = cells()
    with pytest.raises(UserError, match="scored on different documents"):
        Scaling.of([*others, one._replace(results=cells(**other)[0].results)])


def test_cells_trained_on_different_text_are_refused():
    one, *others = cells(text=("a1", "b1"))
    with pytest.raises(UserError, match="not of one text"):
        Scaling.of([*others, one._replace(results=cells(text=("a2", "b1"))[0].results)])


FEW = {"sizes": (1e6,), "budgets": (2e7, 6e7)}
"""Too little for a law or a line, which take their time."""


def test_a_grid_charges_sentence_ends_as_its_studies_do(tmp_path):
    free, paid = (Scaling.of(cells(**FEW, ends=ends)) for ends in ((), ["gained <a>"]))
    assert paid.pays_for_ends and not free.pays_for_ends
    for (_, others), (arm, own) in zip(free.runs.items(), paid.runs.items(), strict=True):
        charged = [a.measured.nats - b.measured.nats for a, b in zip(own, others, strict=True)]
        assert charged == pytest.approx([0.2 * (arm != "base")] * 4)
    page, text = write_scaling(cells(**FEW, ends=["gained <a>"]), tmp_path)
    assert PAID in text and PAID in page.read_text() and PAID not in write_scaling(cells(**FEW), tmp_path)[1]


def test_an_arm_and_seeds_of_one_size_alone_are_in_the_report(tmp_path):
    *others, last = cells(**FEW)
    more = [SimpleNamespace(**vars(result) | {"arm": "more", "seed": 7}) for result in last.results[:2]]
    study = SimpleNamespace(**vars(STUDIED) | {"arms": {**STUDIED.arms, "more": {}}, "seeds": [1, 2, 7]})
    page, text = write_scaling([*others, last._replace(results=[*last.results, *more], study=study)], tmp_path)
    assert "more, 1e+06" in text and "10 runs of 3 arms" in page.read_text()
    assert "<dt>seeds</dt><dd>1, 2, 7</dd>" in page.read_text()
    for said in ("nats per token against parameters", "Parameters are those outside the embedding table and the head."):
        assert said in page.read_text()
    for label in ("1e+06", "20 M tokens", "60 M tokens"):  # at the line of the baseline alone
        assert page.read_text().count(f">{label}</text>") == 1


@pytest.mark.slow
def test_a_grid_grows_and_what_is_there_is_not_run_again(tmp_path, small_corpus, monkeypatch):
    monkeypatch.setattr("tandem.comparison.runner.Training", TrainedHere)

    def compare(text, *options):
        path = write(tmp_path, small_corpus, text.replace("seeds: [1, 2], ", ""))
        done = tandem("compare", path, "--studies", tmp_path / "studies", *options)
        assert done.exit_code == 0, done.output
        return done.output

    one = GRID.replace("    large", "    # large")
    folder = tmp_path / "studies/tiny"
    compare(one.replace("[2 steps, 192 tokens]", "[2 steps]"))
    finished = folder / "small-2-steps/runs/deep-seed1/result.json"
    before = finished.stat().st_mtime_ns
    assert "missing" in compare(one, "--list")
    output = compare(one)
    assert "Nats per token" in output and "scaling.html" in output
    assert finished.stat().st_mtime_ns == before and (folder / "small-192-tokens/report.html").exists()
    record = json.loads((folder / "scaling.json").read_text())
    assert {(run["arm"], run["budget"]) for run in record["runs"]} == {
        (arm, budget) for arm in ("deep", "wide") for budget in ("2 steps", "192 tokens")
    }


TRUNK = """\
rates: [1e-3, 2e-3]
trial_share: 0.5
grid:
  trunk: true
  sizes: {small: {overrides: {network.width: 32, schedule.warmup: 1}}}
  budgets: [256 tokens, 576 tokens]
"""


def test_runs_with_a_trunk_cost_what_it_does_not_train(tmp_path, small_corpus):
    path = write(tmp_path, small_corpus, GRID[: GRID.index("grid:")] + TRUNK)
    done = tandem("compare", path, "--studies", tmp_path, "--list")
    assert done.exit_code == 0, done.output
    (one, beyond), (nine, all_of_it) = re.findall(r"deep (\S+) FLOP( beyond those of its trunk)?", done.stdout)
    assert beyond and not all_of_it and 9 * float(one) == pytest.approx(float(nine), rel=0.01)  # one step of four


@pytest.mark.slow
def test_runs_of_a_trunk_begin_with_its_steps_and_end_as_without_it(tmp_path, small_corpus, monkeypatch):
    monkeypatch.setattr("tandem.comparison.runner.Training", TrainedHere)
    text, found = GRID[: GRID.index("grid:")] + TRUNK, {}
    for name, asked in (("with", "true"), ("without", "false")):
        path = write(tmp_path, small_corpus, text.replace("trunk: true", f"trunk: {asked}"))
        done = tandem("compare", path, "--studies", tmp_path / name)
        assert done.exit_code == 0, done.output
        folder = tmp_path / name / "tiny"
        told = (folder / "scaling.txt").read_text()
        assert ("share steps (grid.trunk)" in told) == (name == "with") and "Missing" not in told
        record = json.loads((folder / "scaling.json").read_text())
        found[name] = [(run["arm"], run["budget"], run["nats"]) for run in record["runs"]]
        trunk, begun = folder / "small-576-tokens/runs", {}
        for run in sorted((folder / "small-256-tokens/runs").iterdir()):
            begun[run.name] = json.loads((run / "environment.json").read_text())[0].get("trunk")
            is_shared = name == "with" and (trunk / run.name).exists()  # the best rate may be another
            step = 3 if "seed" in run.name else 1
            assert begun[run.name] == (f"{trunk / run.name}, step {step}" if is_shared else None)
        assert len(begun) == 6 and (name == "without" or sum(map(bool, begun.values())) >= 4)
        assert all("trunk" not in json.loads((run / "environment.json").read_text())[0] for run in trunk.iterdir())
    assert found["with"] == found["without"] and len(found["with"]) == 4


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("576 tokens", "9 steps", "in one unit, not seconds, and no rows"),
        ("[256 tokens, 576 tokens]", "[20 seconds, 60 seconds]", "in one unit, not seconds, and no rows"),
        ("trunk: true", "trunk: true\n  rows: rule", "in one unit, not seconds, and no rows"),
    ],
)
def test_runs_that_cannot_share_steps_have_no_trunk(tmp_path, small_corpus, before, after, told):
    text = (GRID[: GRID.index("grid:")] + TRUNK).replace(before, after)
    with pytest.raises(UserError, match=f"grid.trunk: .*{told}"):
        load_grid(str(write(tmp_path, small_corpus, text)))


def test_the_published_grid_has_three_families_at_five_sizes_and_five_lengths(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_DATA", str(tmp_path))
    grid = load_grid("double_decoder_scaling")
    assert len(grid.cells) == 25
    for name, study in grid.cells.items():
        recipes = {job.arm: study.recipe(job) for job in study.runs(dict.fromkeys(study.layers)) if job.seed == 1}
        assert list(recipes) == ["decoder", "double_decoder", "encoder_decoder"]
        assert len({(r.network.width, r.network.heads, r.batch.rows, r.budget.amount) for r in recipes.values()}) == 1
        asked = {arm: (r.objective.after, r.objective.since, r.evaluation.prefix) for arm, r in recipes.items()}
        after = {"decoder": "next_token", "double_decoder": "next_token", "encoder_decoder": "span_corruption"}
        assert asked == {arm: (first, 0.9, True) for arm, first in after.items()}, name
    widths = {name.partition("-")[0]: study.recipe(job).network.width for name, study in grid.cells.items()
              for job in study.runs(dict.fromkeys(study.layers))}  # fmt: skip
    assert widths == {"6m": 192, "12m": 256, "25m": 448, "50m": 576, "100m": 832}


def test_partitions_are_compared_by_strategy_and_scope_with_nothing_else_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_DATA", str(tmp_path))
    (study,) = load_grid("double_decoder_partitions").cells.values()
    recipes = {job.arm: study.recipe(job) for job in study.runs(dict.fromkeys(study.layers)) if job.seed == 1}
    splits = {arm: (p.strategy, p.scope, p.shared) for arm, p in ((a, r.network.partition) for a, r in recipes.items())}
    assert splits == {
        "document": ("random_uniform", "document", False),
        "row": ("random_uniform", "row", False),
        "shared": ("random_uniform", "row", True),
        "every_token": ("every_token", "document", False),
        "single": ("single", "document", False),
    }
    networks = [r.network.model_dump() | {"partition": None} for r in recipes.values()]
    assert all(network == networks[0] for network in networks)
    assert (networks[0]["width"], networks[0]["document_mask"], networks[0]["sink"]) == (64, True, False)
    assert all(r.evaluation.prefix for r in recipes.values())
