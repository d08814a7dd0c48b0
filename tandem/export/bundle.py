"""The source that a network needs, gathered from Tandem into modules that need only torch, numpy and transformers.

    bundle({"tandem.networks.sps": {"SPS"}})      {"tandem_networks_sps.py": "...", "tandem_nn_block.py": "...", ...}

Starting from the given names, a module keeps, as they are written, the statements that define what is needed, with
their comments; classes leave out methods that only training and tests use (AT_HOME). So the exported code is the very
code that trained the network, and a new network needs no export code of its own. Only imports are rewritten: within
Tandem they become relative, because `transformers` copies the files that a model's file imports from beside it; and
pydantic, which reads recipes, is replaced by export/plain.py.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HOUSE = "tandem"
PLAIN = f"{HOUSE}.export.plain"
STAND_INS = {("pydantic", "Field"): (PLAIN, "Field"), (f"{HOUSE}.recipe.settings", "Settings"): (PLAIN, "Settings")}
"""(module, name) -> what exported code uses in its place."""

AT_HOME = {"view", "scoring", "prompt", "check", "drawing", "degenerate", "tiny", "start_from"}
"""Methods that read a corpus or serve the contract tests: exported code only reads the ids that it is given."""

ROOT = Path(__file__).parents[1]
Import = ast.Import | ast.ImportFrom


@dataclass
class Source:
    """A module of Tandem. `statements` are (first line, end line, node); `defined` are their numbers by name.

    A statement begins where the previous one ends, so it includes the comments above it.
    """

    name: str
    text: str
    statements: list[tuple[int, int, ast.stmt]] = field(default_factory=list)
    defined: dict[str, int] = field(default_factory=dict)

    @classmethod
    @functools.cache
    def of(cls, name: str) -> "Source":
        if name.split(".")[0] != HOUSE:
            raise LookupError(
                f"{name} is no module of {HOUSE}, whose source alone is exported: move it to {HOUSE}/networks/"
            )
        text = _path(name).read_text("utf-8")
        source, end = cls(name, text), 0
        for node in ast.parse(text).body:
            if _is_text(node) and source.statements:  # describes the option or constant above it
                first, _, before = source.statements.pop()
                source.statements.append((first, node.end_lineno or 0, before))
            else:
                source.statements.append((end, node.end_lineno or 0, node))
                source.defined |= dict.fromkeys(_bound(node), len(source.statements) - 1)
            end = node.end_lineno or 0
        return source

    def lines(self, number: int) -> str:
        """The source text of a statement."""
        first, end, _ = self.statements[number]
        return "".join(self.text.splitlines(keepends=True)[first:end])


def bundle(wanted: Mapping[str, set[str]], names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Source files by name, with everything that the `wanted` names of modules need.

    `names` gives the names of modules in the bundle that differ from the default.
    Raises: LookupError if something outside Tandem is wanted, or without a stand-in, such as another part of pydantic.
    """
    gathered = _Gathered(dict(names or {}))
    for module, words in wanted.items():
        for word in words:
            gathered.need(module, word)
    return {f"{gathered.flat(module)}.py": gathered.written(module) for module in gathered.kept}


class _Gathered:
    def __init__(self, names: dict[str, str]):
        self.names = names
        self.kept: dict[str, set[int]] = {}
        self.aliases: dict[str, set[str]] = defaultdict(set)
        """For each module, the names that its own import statements have to import."""

    def flat(self, module: str) -> str:
        return self.names.get(module, module.replace(".", "_"))

    def need(self, module: str, name: str) -> None:
        """Keeps what defines `name` in `module`, and everything that this needs in turn."""
        source = Source.of(module)
        if name not in source.defined:
            raise LookupError(f"{module} has no {name}, which an exported network needs")
        number = source.defined[name]
        node = source.statements[number][2]
        if isinstance(node, Import) and name not in self.aliases[module]:
            self.aliases[module].add(name)
            self._keep_import(node, name)
        if number not in self.kept.get(module, ()):
            self._keep(source, number)

    def _keep(self, source: Source, number: int) -> None:
        if source.name not in self.kept:
            self.kept[source.name] = set()
            for nameless in set(range(len(source.statements))) - {*source.defined.values()}:
                self._keep(source, nameless)
        self.kept[source.name].add(number)
        node = source.statements[number][2]
        if replaced := _stands_in(source.name, node):
            self.need(*replaced)
        if replaced or isinstance(node, Import):
            return
        for inner in _walked(node):
            if isinstance(inner, Import):
                self._keep_import(inner)
            elif (name := _named(inner)) in source.defined and source.defined[name] != number:
                self.need(source.name, name)

    def _keep_import(self, node: Import, only: str | None = None) -> None:
        for alias in node.names:
            if only in (None, alias.asname or alias.name):
                module, name = _found(node, alias)
                if module and name:
                    self.need(module, name)
                elif module:
                    for every in Source.of(module).defined:
                        self.need(module, every)

    def written(self, module: str) -> str:
        """The source of one module of the bundle."""
        source, parts = Source.of(module), []
        for number in sorted(self.kept[module]):
            node = source.statements[number][2]
            if isinstance(node, Import) and any(_bound(node)):
                used = [alias for alias in node.names if _top(node, alias) in self.aliases[module]]
                parts += [f"{line}\n" for line in self._imports(node, used)]
            elif replaced := _stands_in(module, node):
                parts.append(f"from .{self.flat(replaced[0])} import {replaced[1]}\n")
            else:
                parts.append(self._with_imports(source, number) + "\n" * _is_text(node))
        return "".join(parts)

    def _with_imports(self, source: Source, number: int) -> str:
        """The source text of a statement, with its imports rewritten and without methods of AT_HOME."""
        text, node = source.lines(number), source.statements[number][2]
        for method in _left_at_home(node):
            text = text.replace(_lines_of(source.text, method), "")
        for inner in _walked(node):
            if isinstance(inner, Import):
                written = ast.get_source_segment(source.text, inner)
                assert written is not None
                text = text.replace(written, "; ".join(self._imports(inner, inner.names)))
        return text

    def _imports(self, node: Import, aliases: list[ast.alias]) -> list[str]:
        """Lines that import these names of an import statement within the bundle."""
        if isinstance(node, ast.Import):
            return [ast.unparse(ast.Import([alias])) for alias in aliases]
        lines, names = [], defaultdict(list)
        for alias in aliases:
            module, name = _found(node, alias)
            if module is None:
                names[node.module].append(alias)
            elif name:
                known = alias.asname or alias.name
                names[f".{self.flat(module)}"].append(ast.alias(name, known if known != name else None))
            else:  # transformers finds the files to copy by what stands between "from ." and "import"
                flat = self.flat(module)
                lines.append(f"from .{flat} import __name__ as _; from . import {flat} as {alias.asname or alias.name}")
        return [ast.unparse(ast.ImportFrom(module, few, 0)) for module, few in names.items()] + lines


def _left_at_home(node: ast.stmt) -> list[ast.stmt]:
    """Methods of a class that are not exported."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [inner for inner in body if isinstance(inner, ast.FunctionDef) and inner.name in AT_HOME]


def _walked(node: ast.stmt) -> Iterator[ast.AST]:
    """All nodes of a statement that are exported with it."""
    left = _left_at_home(node)
    for inner in ast.iter_child_nodes(node):
        if inner not in left:
            yield from ast.walk(inner)


def _lines_of(text: str, method: ast.stmt) -> str:
    """The source text of a method, with its decorators and the empty line before it, if there is one."""
    assert isinstance(method, ast.FunctionDef)
    first = min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)])
    lines = text.splitlines(keepends=True)
    return "".join(lines[first - 2 + bool(lines[first - 2].strip()) : method.end_lineno])


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif not isinstance(node, ast.For) and getattr(node, "module", "") != "__future__":  # both are always kept
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
            elif isinstance(inner, Import):
                yield from (_top(inner, alias) for alias in inner.names)


def _top(node: Import, alias: ast.alias) -> str:
    """The name under which an import is known."""
    return alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)


def _named(node: ast.AST) -> str:
    """The name that a node uses, or spells out in an annotation."""
    if isinstance(node, ast.Name):
        return node.id
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _stands_in(module: str, node: ast.stmt) -> tuple[str, str] | None:
    return STAND_INS.get((module, node.name)) if isinstance(node, ast.ClassDef) else None


def _found(node: Import, alias: ast.alias) -> tuple[str | None, str | None]:
    """(module of Tandem, name in it) that an import refers to, through packages that re-export it.

    The name is None for a module itself, and both are None for imports from outside Tandem.
    """
    if isinstance(node, ast.Import):
        if alias.name.split(".")[0] in (HOUSE, "pydantic"):
            raise LookupError(f"import {alias.name}: write `from {alias.name} import ...`, which is rewritten")
        return None, None
    if node.level:
        raise LookupError(f"{ast.unparse(node)}: name the module in full, from {HOUSE} on, to have it rewritten")
    module, name = str(node.module), alias.name
    if module == "pydantic":
        if (module, name) not in STAND_INS:
            raise LookupError(f"exported code cannot use pydantic's {name}; give it a stand-in in {PLAIN}")
        return STAND_INS[module, name]
    if module.split(".")[0] != HOUSE:
        return None, None
    if _path(f"{module}.{name}").is_file():
        return f"{module}.{name}", None
    source = Source.of(module)
    if name in source.defined:
        handed = source.statements[source.defined[name]][2]
        if isinstance(handed, Import):
            return _found(handed, next(a for a in handed.names if (a.asname or a.name) == name))
    return STAND_INS.get((module, name), (module, name))
