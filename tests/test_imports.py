"""The house rules that can be read off the source: imports go one way, files stay short, names are nouns."""

import ast
import importlib
from pathlib import Path

import pytest

import tandem

PACKAGE = Path(__file__).parents[1] / "tandem"
MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}

FLOORS = [  # a module may import from its own part of the house and from floors below
    {"machine"},
    {"recipe"},
    {"disk"},
    {"corpus"},
    {"nn"},
    {"networks"},
    {"objectives"},
    {"training"},
    {"generation"},
    {"analysis", "evaluation", "export"},
    {"testing"},
    {"comparison"},
    {"cli"},
]
FORBIDDEN = {"utils", "util", "helpers", "helper", "misc", "common", "manager", "managers"}
LONGEST = 400


def part(name: str) -> str:
    """The part of the house to which a file or a module `tandem.x.y` belongs."""
    return name.removeprefix("tandem.").split(".")[0].split("/")[0].removesuffix(".py")


def floor(name: str) -> int:
    return next(level for level, parts in enumerate(FLOORS) if part(name) in parts)


def imported(tree: ast.AST) -> set[str]:
    """Full names of modules of the house that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used here"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= parts if node.module == "tandem" else {node.module}
    return {name for name in found if name and name.split(".")[0] == "tandem"} - {"tandem.__version__"}


def imported_at_start(tree: ast.Module) -> set[str]:
    """First and whole names of what importing the module imports: what is not inside a function or for types only."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(name for alias in node.names for name in (alias.name, alias.name.split(".")[0]))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, node.module.split(".")[0]))
            if node.module.split(".")[0] == "tandem":
                names = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                found.update(names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if part(name) not in ("__init__", "__main__")])
def test_imports_go_down_the_house(module):
    for name in imported(MODULES[module]):
        if name == "tandem":
            continue
        same_or_below = part(name) == part(module) or floor(name) < floor(module)
        assert same_or_below, f"tandem/{module} imports {name}, which lies on its floor or above"


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_longer_than_a_sitting(module):
    lines = len((PACKAGE / module).read_text("utf-8").splitlines())
    assert lines <= LONGEST, f"tandem/{module} has {lines} lines: split it where it turns to another subject"


@pytest.mark.parametrize("module", MODULES)
def test_module_names_are_nouns_of_the_subject(module):
    assert not FORBIDDEN & set(Path(module).with_suffix("").parts)


def test_what_takes_a_second_to_import_waits_until_a_checkpoint_or_shards_need_it():
    for module in MODULES:
        slow = [
            name
            for name in imported_at_start(MODULES[module])
            if name == "tandem.training.stored"
            or name.startswith(("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.dev"))
        ]
        assert not slow or module == "training/stored.py", f"tandem/{module} imports {slow} at its start"


def test_the_command_starts_without_torch_and_numpy():
    """By following what cli imports at its start, and what that imports in turn."""
    todo, seen = ["cli.py", "recipe/__init__.py", "recipe.py", "__init__.py"], set()
    while todo:
        module = todo.pop()
        if module in seen or module not in MODULES:
            continue
        seen.add(module)
        names = imported_at_start(MODULES[module])
        assert not names & {"torch", "numpy"}, f"tandem/{module} imports torch or numpy when the command starts"
        for name in names:
            path = name.removeprefix("tandem.").replace(".", "/")
            todo += [f"{path}.py", f"{path}/__init__.py"] if name.startswith("tandem.") else []
    assert seen & {"cli.py", "recipe.py", "recipe/__init__.py"}


def test_the_names_of_the_package_are_those_that_type_checkers_see():
    (checked,) = (node for node in MODULES["__init__.py"].body if isinstance(node, ast.If))
    seen = {
        alias.asname: part.module for part in checked.body if isinstance(part, ast.ImportFrom) for alias in part.names
    }
    assert seen == tandem._HOMES and {*dir(tandem)} >= seen.keys()
    for name, home in seen.items():
        assert getattr(tandem, name) is getattr(importlib.import_module(str(home)), name)
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        tandem.lode  # noqa: B018
