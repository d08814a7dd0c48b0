"""Realistic bugs, each with the test that must then fail: they keep the tests honest.

    python -m tandem.testing.mutations                   all of them, in some seconds each
    python -m tandem.testing.mutations --only pads       those whose name contains a word

Run it in a checkout. It copies package and tests to a temporary folder and there, one mutation at a time, applies the
mutation, runs its test, which passes without it, and reverts it. Tests run in forks of this process, which imports the
large libraries only once. Exit status 1 if any mutation survives. `applied` does the same inside a running process, for
mutations inside functions, and takes no time.
"""

import argparse
import contextlib
import functools
import importlib
import inspect
import os
import pkgutil
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import NoReturn

import pytest
import torch

from tandem.recipe import register_all, registered
from tandem.testing import bugs

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """Puts `replaced` for `text`, which occurs once in `file` of the package; then `test` must fail.

    test: the name of a check of the contract, or a test file and, after ::, a test in it.
    """

    name: str
    file: str
    text: str
    replaced: str
    test: str

    @property
    def mutated(self) -> str:
        """The file with its bug."""
        source = (PACKAGE / self.file).read_text("utf-8")
        assert source.count(self.text) == 1, f"{self.name}: {self.text!r} occurs {source.count(self.text)} times"
        return source.replace(self.text, self.replaced)

    @property
    def pytest_arguments(self) -> list[str]:
        if self.test.startswith("tests/"):
            return [self.test]
        return ["tests/networks/test_contract.py", "-k", f"test_network and -{self.test}]"]


MUTATIONS = [
    Mutation(name, file, text, replaced, test)
    for module in pkgutil.iter_modules(bugs.__path__, bugs.__name__ + ".")
    for file, rows in importlib.import_module(module.name).BUGS.items()
    for name, test, text, replaced in rows
]


@contextlib.contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Applies the bug in this process: functions and methods of the module keep their identity and get mutated code.

    Raises: AssertionError where the mutation is in no function.
    """
    module = importlib.import_module("tandem." + mutation.file.removesuffix(".py").replace("/", "."))
    codes = _codes(compile(mutation.mutated, str(module.__file__), "exec"))
    functions = [f for f in _functions(vars(module), module.__name__) if f.__qualname__ in codes]
    assert any(f.__code__ != codes[f.__qualname__] for f in functions), f"{mutation.name}: it lies in no function"
    sound = [function.__code__ for function in functions]
    try:
        for function in functions:
            function.__code__ = codes[function.__qualname__]
        yield
    finally:
        for function, code in zip(functions, sound, strict=True):
            function.__code__ = code


def of_network(name: str) -> Mutation:
    """A mutation of the file of a network that a check of the contract must catch. Raises: LookupError if none is."""
    file = inspect.getfile(registered("network")[name])
    for mutation in MUTATIONS:
        if file.endswith(mutation.file) and not mutation.test.startswith("tests/"):
            return mutation
    cure = f"put one of {file}, with the check of the contract that catches it, into a file of tandem/testing/bugs/"
    raise LookupError(f"network {name} has no bug that tests must notice; {cure}")


def _codes(code: CodeType) -> dict[str, CodeType]:
    """All code objects inside a module's code, by qualified name."""
    inside = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {c.co_qualname: c for c in inside} | {k: v for c in inside for k, v in _codes(c).items()}


def _functions(names: dict, module: str) -> Iterator[FunctionType]:
    """Functions and methods defined in a module, without their wrappers."""
    for value in names.values():
        if inspect.isclass(value) and value.__module__ == module:
            yield from _functions(dict(vars(value)), module)
        value = getattr(value, "fget", value)  # a property
        value = inspect.unwrap(getattr(value, "__func__", value))  # a classmethod; a decorator
        if inspect.isfunction(value) and value.__module__ == module and value.__name__ != "<lambda>":
            yield value


def main() -> int:
    parser = argparse.ArgumentParser("python -m tandem.testing.mutations", description="Bugs that tests must notice.")
    parser.add_argument("--only", default="", metavar="WORD", help="those whose name or file contains it")
    options = parser.parse_args()
    root = PACKAGE.parent
    if not (root / "tests").is_dir():
        parser.error(f"{root} has no tests: run this in a checkout")
    runpy.run_path(str(root / "conftest.py"))  # before register_all imports all else
    torch.set_num_threads(1)
    register_all()  # for the forks, which then need not load the libraries that this imports
    chosen = [m for m in MUTATIONS if options.only in m.name + m.file]
    if not chosen:
        parser.error(f"no mutation has {options.only} in its name or file; those of other packages are not known here")
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "corpora", "build", "dist")
        copy = shutil.copytree(root, Path(folder) / "copy", ignore=left_out)
        for mutation in chosen:
            killed = _is_killed(mutation, copy)
            print(f"{'killed  ' if killed else 'SURVIVED'}  {mutation.file:26} {mutation.name}", flush=True)
            survived += [] if killed else [mutation]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed")
    return 1 if survived else 0


def _is_killed(mutation: Mutation, copy: Path) -> bool:
    """Whether the test, which passes in `copy`, fails with the mutation applied there. Raises: as `_fails`, and
    RuntimeError where the test fails without it.
    """
    arguments = tuple(mutation.pytest_arguments)
    _require_pass(copy, arguments)
    file = copy / "tandem" / mutation.file
    sound = file.read_bytes()
    file.write_text(mutation.mutated, "utf-8")
    try:
        return _fails(copy, arguments)[0]
    finally:
        file.write_bytes(sound)


@functools.cache
def _require_pass(copy: Path, arguments: tuple[str, ...]) -> None:
    fails, said = _fails(copy, arguments)
    if fails:
        raise RuntimeError(f"{arguments[0]} fails without any mutation\n{said}")


def _fails(copy: Path, arguments: tuple[str, ...]) -> tuple[bool, str]:
    """Whether pytest fails, and what it said. Raises: RuntimeError where it could not run the test at all."""
    with tempfile.TemporaryFile("w+") as output:
        if not (child := os.fork()):
            _test(copy, arguments, output.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        said = output.read()[-3000:]
    if code not in (0, 1):
        raise RuntimeError(f"pytest {' '.join(arguments)} ended with {code}\n{said}")
    return code == 1, said


def _test(copy: Path, arguments: tuple[str, ...], output: int) -> NoReturn:
    """In a fork: runs pytest in `copy`, with its package in place of the loaded one, and exits with pytest's status."""
    code: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(copy)
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(copy))
        for name in [name for name in sys.modules if name.partition(".")[0] == "tandem"]:
            del sys.modules[name]
        sys.modules["__main__"] = ModuleType("__main__")  # the real one would be loaded again by a test's processes
        code = pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *arguments])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
