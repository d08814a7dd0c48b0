"""From the tree of a recipe to the typed run, with every mistake found on the way."""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pydantic import Field, ValidationError

from tandem.recipe.budget import Budget, BudgetText, parse_budget
from tandem.recipe.document import (
    DEFAULT,
    DERIVED,
    OVERRIDE,
    Node,
    Origin,
    Problems,
    is_study,
    read_chain,
    read_overrides,
    shown,
    to_yaml,
)
from tandem.recipe.options import RECIPE, as_written, join, origins, read_options
from tandem.recipe.settings import (
    SECTIONS,
    Settings,
    UserError,
    default_name,
    did_you_mean,
    is_choice,
    register_all,
    registered,
)


class Run(Settings):
    """The keys of a recipe outside its sections."""

    seed: int = Field(1337, ge=0)
    """Determines the initial weights, the order of the documents and every other random draw."""
    budget: BudgetText
    """What training may spend, such as 5e9 tokens (units: tokens, flops, seconds, minutes, hours, steps)."""


class NoSection(AttributeError):
    """The recipe does not have the requested section, or the section is invalid."""


@dataclass(frozen=True)
class Recipe:
    """A run, resolved and typed: `recipe.network` is the `Config` of the network, and likewise for every section.

    Two recipes are equal when their values are, wherever the values were written.
    """

    values: dict[str, Any] = field(default_factory=dict)
    """Every value, as a complete recipe file would have it; `${NAME}` stays as written."""
    origins: dict[str, Origin] = field(default_factory=dict, compare=False)
    """Dotted key -> where its value was written."""
    notes: list[str] = field(default_factory=list, compare=False)
    """What a user may not expect of what was written, a sentence each."""
    choices: dict[str, type] = field(default_factory=dict, compare=False)
    settings: dict[str, Settings] = field(default_factory=dict, compare=False)

    def __getattr__(self, section: str) -> Any:
        return _entry(vars(self).get("settings", {}), section)

    def choice(self, section: str) -> Any:
        """The class that a section builds."""
        return _entry(self.choices, section)

    @property
    def seed(self) -> int:
        return self.run.seed

    @property
    def budget(self) -> Budget:
        return parse_budget(self.run.budget)

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that change with any value."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:8]

    def value(self, key: str) -> Any:
        """The value of a dotted key, as in `values`."""
        return functools.reduce(lambda values, part: values[part], key.split("."), self.values)

    def table(self) -> list[tuple[str, str, str]]:
        """Key, value and origin of everything, in the order of a recipe."""
        return [(key, json.dumps(self.value(key)), str(origin)) for key, origin in self.origins.items()]

    def to_yaml(self) -> str:
        """The whole recipe as YAML, from which `load` reads an equal one."""
        return to_yaml(self.values)


def _entry(sections: Mapping[str, Any], name: str) -> Any:
    if name not in sections:
        raise NoSection(f"this recipe has no {name}")
    return sections[name]


def load(reference: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read, merge, check and resolve a recipe.

    Args:
        reference: the path of a .yaml file, or a name such as decoder/tiny (in ./recipes, then in Tandem's own).
        overrides: `section.key=value` with YAML values; they take precedence over the file.
    Raises: UserError with one line for each problem.
    """
    problems = Problems()
    layers = read_chain(str(reference), problems)
    return resolve([*layers, read_overrides(overrides, problems)], layers[-1].origin, problems)


def changed(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """`recipe` with `section.key=value` on top. Raises: UserError as `load` does."""
    problems = Problems()
    written = Node.of(recipe.values, DERIVED)
    return resolve([written, read_overrides(overrides, problems)], DERIVED, problems)


def saved(values: dict[str, Any], source: str) -> Recipe:
    """The recipe with these values, which the file `source` keeps. Raises: UserError as `load` does."""
    origin = Origin(source)
    return resolve([Node.of(values, origin)], origin, Problems())


def resolve(layers: Sequence[Node], origin: Origin, problems: Problems) -> Recipe:
    """Merge `layers`, the most general first, into a recipe; missing keys are reported at `origin`.

    Raises: UserError with one line for each of `problems` and each one found here.
    """
    register_all()
    if is_study(layers):
        raise UserError(f"{origin.source}  this is a study, not a recipe; `tandem compare` trains its arms")
    recipe, trees = Recipe(), [*accumulate(layers, _over, initial=Node({}, DEFAULT))]
    tree = Node(trees[-1].value, origin)
    kinds = list(filter(registered, SECTIONS))
    own = Node({key: node for key, node in tree.value.items() if key not in kinds}, tree.origin)
    _keep("", RECIPE, Run, own, recipe, problems, ["extends", *kinds])
    for kind in kinds:
        _read_section(kind, tree.at(kind) or Node({}, tree.origin), recipe, problems)
    for cls in recipe.choices.values():
        _check(cls, tree, recipe, problems)
    for below in trees:
        for kind, settings in recipe.settings.items():
            _require_derived_anew(kind, settings, below.at(kind), tree.at(kind), problems)
    problems.raise_any()
    for below, top in zip(trees, layers, strict=False):
        recipe.notes.extend(_not_kept(recipe, below, top, tree))
    return recipe


def _not_kept(recipe: Recipe, below: Node, top: Node, tree: Node) -> Iterator[str]:
    """For each section to which `top` gives another name, the values below that are dropped, though the new choice has
    such options, too, unless `tree`, the whole recipe, gives others."""
    for kind in _renamed(below, top):
        now, given = recipe.values[kind], tree.value[kind].value
        was = written if isinstance(written := below.value[kind].plain(), dict) else {}
        lost = {key: value for key, value in was.items() if key in now.keys() - given.keys()}
        words = [f"{kind}.{key}={shown(value)}" for key, value in lost.items() if value not in (None, now[key])]
        if words:
            told = f"{kind}.name={now['name']} starts the section afresh, without {', '.join(words)} of the recipe"
            yield f"{told}; what is to stay must be given again"


def _require_derived_anew(
    kind: str, settings: Settings, below: Node | None, above: Node | None, problems: Problems
) -> None:
    """Refuse a written value, as in a saved recipe, that was derived from values which a later layer changes."""
    keys = settings.derive().keys()
    if not (keys and below and above) or below is above:
        return
    was, now = (_following(type(settings), keys, node) for node in (below, above))
    for key in keys:
        written = above.at(key)
        if not written or written.value is None:  # null is derived anew by itself
            continue
        if written is below.at(key) and written.value == was.get(key) != now.get(key):
            value, key, follows = shown(written.value), join(kind, key), shown(now.get(key))
            reason = f"followed from what is changed; {key}=null makes it {follows}, {key}={value} keeps it"
            problems.add(written.origin, f"{key} = {value}: {reason}")


def _following(config: type[Settings], keys: Iterable[str], node: Node) -> dict[str, Any]:
    """The values of a section with `keys` left to `derive`; empty where the section is invalid."""
    given = {key: inner.plain() for key, inner in node.value.items() if key not in {"name", *keys}}
    try:
        return config.model_validate_json(json.dumps(given)).model_dump()
    except ValidationError:
        return {}


def configure(kind: str, name: str | None = None, overrides: Iterable[str] = ()) -> Any:
    """The `Config` of one section without a recipe: its defaults with `overrides` (`network.depth=4`) applied.

    Raises: UserError as `load` does.
    """
    register_all()
    problems, recipe = Problems(), Recipe()
    chosen = Node.of({kind: {"name": name} if name else {}}, OVERRIDE)
    tree = _over(chosen, read_overrides(overrides, problems))
    for key in tree.value.keys() - {kind}:
        problems.add(OVERRIDE, f"{key}: no such key; without a recipe there is only {kind}")
    _read_section(kind, tree.value[kind], recipe, problems)
    problems.raise_any()
    return recipe.settings[kind]


def _over(base: Node, top: Node) -> Node:
    """`top` on top of `base`, except that a section which changes its name starts afresh."""
    # An empty section, such as `batch:`, changes nothing
    top = Node({k: node for k, node in top.value.items() if k not in SECTIONS or node.value is not None}, top.origin)
    fresh = _renamed(base, top)
    return top.over(Node({k: node for k, node in base.value.items() if k not in fresh}, base.origin))


def _renamed(base: Node, top: Node) -> list[str]:
    """The sections for which `top` makes another choice than `base`."""

    def name(kind: str, tree: Node) -> Any:
        named = tree.at(kind, "name")
        return named and named.value

    old = {kind: name(kind, base) or default_name(kind) for kind in base.value if is_choice(kind)}
    return [kind for kind in old if old[kind] and name(kind, top) not in (None, old[kind])]


def _read_section(kind: str, node: Node, recipe: Recipe, problems: Problems) -> None:
    """Find the class of a section, then read its options."""
    classes, name = registered(kind), kind
    if not isinstance(node.value, dict):
        cure = f"; write {kind}: {{name: {node.value}}}" if is_choice(kind) and node.value in [*classes] else ""
        return problems.add(node.origin, f"{kind} = {shown(node.plain())}: must be a mapping of options{cure}")
    options, recipe.values[kind] = dict(node.value), {}
    if is_choice(kind):
        named = options.pop("name", None) or Node(default_name(kind), DEFAULT)
        name, choices = named.value, f"one of {', '.join(classes)}"
        if named.origin == DEFAULT and not name:
            return problems.add(node.origin, f"{kind}.name: required; {choices}")
        if name not in [*classes]:
            near = did_you_mean(str(name), classes)
            if other := next((other for other in SECTIONS if is_choice(other) and name in [*registered(other)]), None):
                near = f"write {other}.name: {name}; "
            return problems.add(named.origin, f"{kind}.name = {shown(named.plain())}: no such {kind}; {near}{choices}")
        recipe.values[kind]["name"], recipe.origins[f"{kind}.name"] = name, named.origin
    recipe.choices[kind] = classes[name]
    _keep(kind, name, classes[name].Config, Node(options, node.origin), recipe, problems)


def _keep(
    kind: str,
    name: str,
    config: type[Settings],
    node: Node,
    recipe: Recipe,
    problems: Problems,
    beside: Sequence[str] = (),
) -> None:
    settings = read_options(config, kind, name, node, problems, beside)
    if settings is None:
        return
    recipe.settings[kind or "run"] = settings
    recipe.origins.update(origins(settings, node, kind))
    values = recipe.values[kind] if kind else recipe.values
    values.update(as_written(settings.model_dump(mode="json"), node.plain()))


def _check(cls: Any, tree: Node, recipe: Recipe, problems: Problems) -> None:
    """What a class refuses about the recipe as a whole: `check(recipe)` yields (key, reason)."""
    if not hasattr(cls, "check"):
        return
    try:
        for key, reason in cls.check(recipe):
            section = key.partition(".")[0]
            named = key if key in recipe.origins else f"{section}.name"
            origin = recipe.origins.get(named)
            subject = f"{key} = {shown(recipe.value(named))}" if origin else key
            if origin in (DEFAULT, DERIVED):
                subject, origin = f"{subject} ({origin})", None
            problems.add(origin or (tree.at(section) or tree).origin, f"{subject}: {reason}")
    except NoSection:  # reported already, by the section itself
        if not problems:
            raise
