"""What a study is: its arms, and what they all share.

    title: Deep or wide at equal FLOPs
    question: Which shape of one million parameters learns more from the same FLOPs?
    recipe: decoder/1m                              # what the arms share: a recipe,
    overrides: {batch.rows: 16}                     # and what lies on top of it
    arms:
      deep: {network.depth: 8, network.width: 112}
      wide: {network.depth: 4, network.width: 160}
      other: {recipe: decoder/tiny}                 # an arm may be another recipe
    baseline: deep
    seeds: [1, 2, 3]
    budget: 1.2e13 flops                            # of each run; or  together: 8 minutes  for all of them
    rates: [1e-3, 2e-3, 4e-3]                       # every arm gets the same trials

Every run of a study is a recipe (tandem/recipe): that of its arm with the study's overrides, seed, budget and learning
rate. Mistakes are reported like those of recipes: all at once, with their lines.

With `rates`, every arm is first tried at each of them, with one seed that the comparison does not use, and keeps its
best. The trials are scored on one half of the held-out documents and the arms on the other, so that no rate is measured
on the documents by which it was chosen.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from tandem.recipe import SECTIONS, Budget, Recipe, Settings, UserError, did_you_mean, parse_budget, recipes
from tandem.recipe.budget import BudgetText
from tandem.recipe.document import (
    DEFAULT,
    DERIVED,
    Node,
    Problems,
    find,
    is_study,
    names_recipe,
    read_chain,
    read_overrides,
    shown,
    to_yaml,
)
from tandem.recipe.options import read_options
from tandem.recipe.resolve import resolve

RATE = "optimiser.lr"
SPLIT = "evaluation.split"
POINTS = 20
"""Points on the curve of each run, unless its recipe sets their number."""
KEYS = ("extends", "grid")
"""Keys of a study file that are read elsewhere (recipe/document.py, grid.py)."""
JUDGED = ("evaluation.documents", "evaluation.final_documents", "evaluation.prefix")
"""Keys that decide on how much of the text runs are scored."""


class Keys(Settings):
    """The contents of a study file."""

    title: str
    """What the study is called, in a few words."""
    question: str
    """What it asks, in a sentence."""
    recipe: str
    """Name or path of the recipe that the arms share."""
    overrides: dict[str, Any] = {}
    """Changes to the recipe for every arm."""
    arms: Annotated[dict[str, dict[str, Any]], Field(min_length=2)]
    """What each arm changes, by arm name; `recipe` starts from another recipe."""
    baseline: str
    """The arm with which the others are compared."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Training seeds; every arm is trained once with each."""
    budget: BudgetText | None = None
    """What each run may spend, such as 2e6 tokens; the same for every arm."""
    together: BudgetText | None = None
    """What all runs may spend together, trials included, in equal shares; instead of `budget`."""
    rates: list[Annotated[float, Field(gt=0)]] = []
    """Peak learning rates that every arm tries; none: that of its recipe."""
    tuning_seed: int = Field(1000, ge=0)
    """The seed of the trials."""
    trial_share: float = Field(1.0, gt=0, le=1)
    """The part of a run's budget that each trial spends."""
    level: float = Field(0.05, gt=0, lt=1)
    """Significance level: the probability with which a study of arms that do not differ may name a winner."""
    margin: float | None = Field(None, gt=0)
    """Difference in nats per token that is too small to matter; the report tests whether arms are within it of the
    baseline (two one-sided tests)."""
    targets: list[float] = []
    """Losses in nats per token; the report tells what each arm spent to reach them."""


class Job(NamedTuple):
    """One run of a study."""

    arm: str
    seed: int
    rate: float | None
    """Learning rate; None: that of the recipe."""
    trial: bool

    @property
    def name(self) -> str:
        """The name of its folder. The rate is part of it: a rate added later may turn out to be the best."""
        rate = f"-lr{self.rate!r}" if self.rate else ""
        return f"{self.arm}{rate}" if self.trial else f"{self.arm}{rate}-seed{self.seed}"


@dataclass(frozen=True)
class Study:
    """A resolved study: every run that it may come to has a valid recipe."""

    keys: Keys
    budget: Budget
    """Of each run."""
    layers: dict[str, list[Node]]
    """The layers of each arm's recipe, the most general first."""
    branches: list[str] = field(default_factory=list)
    """Shorter budgets, whose runs are to begin with steps of this study's."""

    title = property(lambda self: self.keys.title)
    question = property(lambda self: self.keys.question)
    baseline = property(lambda self: self.keys.baseline)
    seeds = property(lambda self: self.keys.seeds)
    rates = property(lambda self: self.keys.rates)
    level = property(lambda self: self.keys.level)
    targets = property(lambda self: self.keys.targets)

    @functools.cached_property
    def recipes(self) -> dict[str, Recipe]:
        """By arm, the recipe of its first run: that of its other runs differs in seed and learning rate alone."""
        return {arm: self.recipe(self.first_run(arm)) for arm in self.layers}

    @functools.cached_property
    def arms(self) -> dict[str, dict[str, Any]]:
        """By arm, in order: dotted key -> value of the settings that differ between arms."""
        every = self._values_by_arm()
        first, *others = every.values()
        same = {key for key in first if all(other.get(key, ...) == first[key] for other in others)}
        return {arm: {k: v for k, v in values.items() if k not in same} for arm, values in every.items()}

    @functools.cached_property
    def starts(self) -> dict[str, Path]:
        """By arm, the run from whose weights it starts; arms with random initial weights are left out."""
        return {arm: recipe.start.run for arm, recipe in self.recipes.items() if recipe.start.run}

    @functools.cached_property
    def texts(self) -> list[str]:
        """The training texts, as the recipe has them."""
        texts = self.recipes[next(iter(self.layers))].value("corpus.texts")
        return [texts] if isinstance(texts, str) else list(texts)

    @property
    def notes(self) -> list[str]:
        """What a user may not expect of what was written, a sentence each; of several arms, several times."""
        return [note for recipe in self.recipes.values() for note in recipe.notes]

    def trials(self) -> list[Job]:
        """All trials, rate by rate, so that no arm is ahead of the others."""
        return [Job(arm, self.keys.tuning_seed, rate, True) for rate in self.rates for arm in self.layers]

    def runs(self, chosen: Mapping[str, float | None]) -> list[Job]:
        """The runs to compare, seed by seed, of the arms whose rate is `chosen` (None: that of the recipe)."""
        return [Job(arm, seed, chosen[arm], False) for seed in self.seeds for arm in self.layers if arm in chosen]

    def first_run(self, arm: str) -> Job:
        """The first run of an arm, at the first of the rates."""
        return Job(arm, self.seeds[0], self.rates[0] if self.rates else None, False)

    def part(self, job: Job) -> float:
        """The fraction of a run's budget that a job spends."""
        return self.keys.trial_share if job.trial else 1.0

    def recipe(self, job: Job, trunk: Path | None = None) -> Recipe:
        """The full recipe of a run. Raises: UserError for each mistake in the recipe of its arm."""
        rate = {"optimiser": {"lr": job.rate}} if job.rate else {}
        split = ("tuning" if job.trial else "comparison") if self.rates else "all"
        budget = _part(self.budget, self.part(job)) if job.trial else self.budget
        given = {"seed": job.seed, "budget": str(budget), "evaluation": {"split": split}, **rate}
        given |= {"start": {"trunk": str(trunk)}} if trunk else {}
        shorter = [_part(parse_budget(text), self.part(job)) if job.trial else text for text in self.branches]
        given |= {"checkpoint": {"branches": [*map(str, shorter)]}} if shorter else {}
        layers = self.layers[job.arm]
        curve = Node.of({"evaluation": {"points": POINTS}}, DEFAULT)
        return resolve([curve, *layers, Node.of(given, DERIVED)], layers[-1].origin, Problems())

    def to_yaml(self) -> str:
        """Everything that decides results, as YAML."""
        own = self.keys.model_dump(mode="json", exclude={"recipe", "overrides", "arms"})
        return to_yaml({**own, "budget": str(self.budget), "arms": self._values_by_arm()})

    def _values_by_arm(self) -> dict[str, dict[str, Any]]:
        """By arm: dotted key -> value of its recipe, except for what the study itself sets for each run."""
        given = {"seed", "budget", *([RATE] if self.rates else [])}
        return {arm: {k: r.value(k) for k in r.origins if k not in given} for arm, r in self.recipes.items()}


def read_layers(reference: str, overrides: Iterable[str], problems: Problems) -> tuple[Path, list[Node], Node]:
    """Path of a study, the trees of its files, the most general first, and the overrides on top of them."""
    path = _find(reference)
    files, asked = read_chain(str(path), problems), _aimed(read_overrides(overrides, problems))
    if not is_study([*files, asked]) and any(file.value.keys() & {*SECTIONS} for file in files):
        raise UserError(f"{files[-1].origin}  this is a recipe, not a study; `tandem train` trains it")
    return path, files, asked


def _find(reference: str) -> Path:
    """The file of a study, by its path or its name, with or without `studies/`. Raises: UserError with the nearest."""
    if f"studies/{reference}" in recipes():
        return find(f"studies/{reference}")
    if names_recipe(reference):
        return find(reference)
    named = [name.removeprefix("studies/") for name in recipes() if name.startswith("studies/")]
    near = did_you_mean(reference.removeprefix("studies/"), named)
    raise UserError(f"{shown(reference)}: no such study; {near}`tandem show` lists them")


def study_of(path: Path, files: list[Node], above: list[Node], problems: Problems) -> Study:
    """The study given by the trees of its files and of `above` on top. Raises: UserError, a line for each problem."""
    written = [_unfolded(layer, problems) for layer in (*files, *above)]
    tree = functools.reduce(lambda base, top: top.over(base), written, Node({}, DEFAULT))
    tree = Node(tree.value, files[-1].origin)
    keys = read_options(Keys, "", "a study", hollow(tree, {"overrides": 0, "arms": 1}), problems, KEYS)
    if isinstance(keys, Keys):
        for place, reason in _contradictions(keys, tree):
            problems.add((tree.at(*place) or tree).origin, f"{'.'.join(place)}{reason}")
    problems.raise_any()
    assert isinstance(keys, Keys)
    study = Study(keys, _share(keys), _read_arms(tree, written, path.parent, problems))
    problems.raise_any()
    require_one_text({"": study})
    return study


def _contradictions(keys: Keys, tree: Node) -> Iterator[tuple[tuple[str, ...], str]]:
    """(place in the file, what is wrong there) for values that are valid alone but not together."""
    if keys.budget is None and keys.together is None:
        yield (), "budget: required: what each run may spend, such as 2e6 tokens; or together: what all may"
    if keys.budget and keys.together:
        reason = f"budget = {shown(keys.budget)} is given too; take one of them out"
        yield ("together",), f" = {shown(keys.together)}: {reason}"
    if keys.baseline not in keys.arms:
        near = did_you_mean(keys.baseline, keys.arms)
        yield ("baseline",), f" = {shown(keys.baseline)}: no such arm; {near}arms: {', '.join(keys.arms)}"
    for key in ("seeds", "rates", "targets"):
        values = getattr(keys, key)
        if len(set(values)) < len(values):
            yield (key,), f" = {shown(values)}: one is written twice"
    if len(keys.rates) == 1:
        yield ("rates",), f" = {keys.rates}: one is no choice; give several, or {RATE} in overrides"
    if keys.rates and keys.tuning_seed in keys.seeds:
        reason = f"{keys.tuning_seed} is the seed of the trials; take others, or another tuning_seed"
        yield ("seeds",), f" = {keys.seeds}: {reason}"
    if not tree.at("rates"):
        for key in ("tuning_seed", "trial_share"):
            if tree.at(key):
                yield (key,), f" = {getattr(keys, key)}: is for trials, and without rates there are none; take it out"
    places = [("overrides",), *(("arms", arm) for arm in keys.arms)]
    for place in places:
        for key in ("seed", "budget", SPLIT, *([RATE] if keys.rates and len(place) > 1 else [])):
            if tree.at(*place, *key.split(".")):
                rest = ": with rates one half of the documents, else all; take it out" if key == SPLIT else ""
                yield (*place, *key.split(".")), f": the study gives it to every arm alike{rest}"
    for arm in keys.arms:
        if not re.fullmatch(r"[\w+-]+", arm):
            yield ("arms", arm), ": must be a name of letters, digits, _, + and -, for folders are called after it"


def _share(keys: Keys) -> Budget:
    """The budget of one run."""
    if keys.budget:
        return parse_budget(keys.budget)
    together = parse_budget(keys.together or "")
    return _part(together, 1 / (len(keys.arms) * (len(keys.seeds) + len(keys.rates) * keys.trial_share)))


def _part(budget: Budget, share: float) -> Budget:
    amount = budget.amount * share
    whole = budget.unit in ("tokens", "steps")
    return Budget(float(max(1, int(amount)) if whole else f"{amount:.4g}"), budget.unit)


def _read_arms(tree: Node, written: list[Node], beside: Path, problems: Problems) -> dict[str, list[Node]]:
    """The recipe layers of each arm: its files, the changes for all arms, and its own changes, both file by file, as a
    later file may change the name of a section."""

    def parts(*place: str) -> list[Node]:
        return [part for layer in written if (part := layer.at(*place)) and isinstance(part.value, dict)]

    for part in parts("overrides"):
        if extends := part.value.pop("extends", None):
            problems.add(extends.origin, "overrides.extends: what all arms extend is written as the study's recipe")
    layers: dict[str, list[Node]] = {}
    for arm in tree.value["arms"].value:
        own = parts("arms", arm)
        for part in own:
            if extends := part.value.pop("extends", None):
                problems.add(extends.origin, f"arms.{arm}.extends: what an arm extends is written as its recipe")
        based = [tree.value["recipe"], *filter(None, [part.value.pop("recipe", None) for part in own])][-1]
        try:
            files = read_chain(str(find(str(based.plain()), beside)), problems)
            layers[arm] = [*files, *parts("overrides"), *own]
        except UserError as error:
            problems.add(based.origin, f"recipe = {error}")
    return layers


def require_one_text(studies: Mapping[str, Study]) -> None:
    """Checks that every arm of `studies` (by name) reads the same text and is scored on the same documents.

    Raises: UserError with the problems of all recipes at once.
    """
    lines: dict[str, None] = {}
    recipes: dict[str, Recipe] = {}
    for name, arm in ((name, arm) for name, study in studies.items() for arm in study.layers):
        try:
            recipes[f"{arm} of {name}" if name else arm] = studies[name].recipe(studies[name].first_run(arm))
        except UserError as error:
            lines |= dict.fromkeys(str(error).splitlines())  # problems that arms share are reported once
    (first, one), *others = recipes.items() or [("", Recipe())]
    for arm, recipe in others:
        for key in (key for key in recipe.origins if _is_text(key) or key in JUDGED):
            if recipe.value(key) != one.value(key):
                told = f"{shown(recipe.value(key))} in arm {arm}, {shown(one.value(key))} in {first}"
                reason = "must be the same, or the losses are of different texts"
                lines[f"{recipe.origins[key]}  {key} = {told}: {reason}"] = None
    if lines:
        raise UserError("\n".join(lines))


def _is_text(key: str) -> bool:
    """Whether a key decides which tokens are read. Where they are stored and how sentences are split does not."""
    return key.startswith("corpus.") and not key.startswith(("corpus.folder", "corpus.sentences"))


# The file as a tree ----------------------------------------------------------------------------------------------


def _aimed(asked: Node) -> Node:
    """Moves overrides of a recipe's sections to `overrides`, so that they apply to every arm."""
    sections = {key: node for key, node in asked.value.items() if key in SECTIONS}
    own = Node({key: node for key, node in asked.value.items() if key not in SECTIONS}, asked.origin)
    return Node({"overrides": Node(sections, asked.origin)}, asked.origin).over(own) if sections else own


def _unfolded(tree: Node, problems: Problems) -> Node:
    """Dotted keys of a recipe as nested mappings: `network.depth: 8` as `network: {depth: 8}`."""

    def add(base: Node, top: Node, *above: str) -> Node:
        if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
            problems.add(top.origin, f"{'.'.join(above)}: written twice, first at {base.origin}")
            return base
        both = {key: add(base.value[key], top.value[key], *above, key) for key in base.value.keys() & top.value.keys()}
        return Node(base.value | top.value | both, base.origin)

    def unfold(node: Node, *above: str) -> Node:
        if not isinstance(node.value, dict):
            return Node({}, node.origin) if node.value is None else node  # an arm that changes nothing
        layers = [inner.under(key.split(".")) for key, inner in node.value.items()]
        return functools.reduce(lambda base, top: add(base, top, *above), layers, Node({}, node.origin))

    values = dict(tree.value)
    if "overrides" in values:
        values["overrides"] = unfold(values["overrides"], "overrides")
    if (arms := values.get("arms")) and isinstance(arms.value, dict):
        values["arms"] = Node({arm: unfold(node, "arms", arm) for arm, node in arms.value.items()}, arms.origin)
    return Node(values, tree.origin)


def hollow(tree: Node, depths: Mapping[str, int]) -> Node:
    """The tree, under these keys only down to `depths`: below are parts of recipes, read with those of the arms."""

    def cut(node: Node, depth: int) -> Node:
        if not isinstance(node.value, dict):
            return node
        return Node({key: cut(inner, depth - 1) for key, inner in node.value.items()} if depth else {}, node.origin)

    if not isinstance(tree.value, dict):
        return tree
    return Node({k: cut(node, depths[k]) if k in depths else node for k, node in tree.value.items()}, tree.origin)
