"""The command answers at once, tells mistakes without a traceback, and never hides a bug."""

import errno
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pydantic import Field
from torch._inductor.exc import InductorError
from typer.testing import CliRunner

from tandem import cli, recipe
from tandem.recipe import Settings, UserError, recipes, register, settings


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command over a small registry of its own, in an empty directory; gives (exit code, output, errors)."""
    monkeypatch.setattr(settings, "_registry", {})
    monkeypatch.setattr(settings, "_default_names", {})
    monkeypatch.chdir(tmp_path)

    class Span:
        """As a network draws it: tensors are anything with `tolist`."""

        def __init__(self, lo, hi):
            self.lo, self.hi = [Listed(lo)], [Listed(hi)]

    class Listed(list):
        def tolist(self):
            return list(self)

    @register("network", "decoder")
    class Decoder:
        """The plain decoder."""

        class Config(Settings):
            depth: int = Field(2, ge=1)
            """Number of blocks."""

        @classmethod
        def drawing(cls, config, starts):
            return [(f"tokens at depth {config.depth}", Span(starts, range(1, 13)), 12)]

    def run(*args):
        result = CliRunner().invoke(cli.main, args)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    (tmp_path / "mine.yaml").write_text("# Mine.\nbudget: 3 steps\nnetwork:\n  name: decoder\n")
    return run


def test_help_takes_less_than_0_4_seconds_of_a_core():
    def spent():
        of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return of_children.ru_utime + of_children.ru_stime

    def seconds():
        before = spent()
        subprocess.run([sys.executable, "-m", "tandem", "--help"], check=True, capture_output=True)
        return spent() - before

    assert min(seconds() for _ in range(5)) < 0.4


@pytest.mark.parametrize(("given", "spins"), [({}, "10000"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")])
def test_threads_wait_briefly_unless_the_environment_says_how(given, spins):
    waiting = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import os, tandem.cli; print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT'))"
    told = subprocess.check_output([sys.executable, "-c", code], env=waiting | given, text=True)
    assert told.split() == ["PASSIVE", spins]


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_loads_none_of_the_heavy_libraries(args):
    code = f"""
import sys, atexit
heavy = {{"torch", "numpy", "pydantic", "yaml", "rich"}}
atexit.register(lambda: print("loaded:", sorted(heavy & set(sys.modules))))
sys.argv = ["tandem", *{args}]
from tandem.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_help_shows_the_first_sentence_of_every_command_whole(command):
    _, out, _ = command("--help")
    commands = out.partition("Commands:\n")[2].splitlines()
    assert len(commands) >= 10 and all(len(line) <= 80 and not line.endswith("...") for line in commands), out


@pytest.mark.parametrize(
    ("option", "value", "bounds"),
    [("--top-p", value, "0<P<=1") for value in ("0.0", "1.5", "nan")]
    + [("--temperature", value, "0<=T<inf") for value in ("-1.0", "inf", "nan")],
)
def test_bounds_of_sampling_are_told_with_their_option(command, option, value, bounds):
    code, _, errors = command("generate", "nowhere", option, value)
    assert code == 2 and f"'{option}': {value} is not in the range {bounds}." in errors


def test_show_lists_what_there_is(command):
    code, out, _ = command("show")
    assert code == 0
    assert ["decoder", "The", "plain", "decoder."] in [line.split() for line in out.splitlines()]
    assert all(name in out for name in recipes())


def test_show_lists_what_cannot_be_read(command, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "odd.yaml").write_bytes(b"# \xff\n")
    (tmp_path / "recipes" / "gone.yaml").symlink_to("nowhere.yaml")
    code, out, _ = command("show")
    assert code == 0 and "\n  odd " in out and "\n  gone\n" in out
    assert "gone.yaml  cannot be read: No such file" in command("show", "gone")[2]


def test_show_explains_a_choice_and_a_recipe(command):
    assert "network.depth = 2  a whole number >= 1\n    Number of blocks." in command("show", "decoder")[1]
    _, out, _ = command("show", "mine.yaml", "network.depth=3")
    assert out.splitlines()[0] == "mine.yaml  Mine."
    assert "network.depth  3          override" in out
    assert 'network.name   "decoder"  mine.yaml:4' in out


def test_show_notes_what_an_override_does_not_keep(command, tmp_path):
    @register("network", "flat")
    class Flat:
        class Config(Settings):
            depth: int = 1

    (tmp_path / "deep.yaml").write_text("budget: 3 steps\nnetwork: {name: decoder, depth: 5}\n")
    assert "afresh, without network.depth=5" in command("show", "deep.yaml", "network.name=flat")[1]


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["train", "own/0.5m"], "0.5m"),
        (["train", "own/0.5m.yaml"], "0.5m"),
        (["train", "mine.yml"], "mine"),
        (["convert", "runs/0.5m"], "0.5m-converted"),
        (["convert", "."], "here-converted"),
    ],
)
def test_a_run_is_called_after_what_it_is_made_from(monkeypatch, tmp_path, args, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(cli, "_train", lambda recipe, path: print(path(SimpleNamespace(fingerprint="123"))))
    assert CliRunner().invoke(cli.main, args).stdout == f"runs/{name}-123\n"


@pytest.mark.parametrize("what", [["decoder", "network.depth=3"], ["mine.yaml", "network.depth=3"]])
def test_show_mask_draws_a_network_or_that_of_a_recipe(command, what):
    code, out, _ = command("show", "mask", *what)
    assert code == 0
    assert "tokens at depth 3" in out
    assert "\nb1  .......##...\n" in out


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["show", "decodr"], "decodr: nothing has this name; did you mean decoder? `tandem show` lists what there is"),
        (
            ["show", "demo"],
            "demo: nothing has this name; did you mean studies/demo? `tandem show` lists what there is",
        ),
        (["show", "none.yaml"], '"none.yaml": no such file; did you mean mine.yaml? `tandem show` lists recipes'),
        (["show", "mine.yaml", "seed=-1"], "override  seed = -1: must be a whole number >= 0"),
        (["show", "mask"], "show mask: needs a network or a recipe; networks: decoder"),
        (
            ["show", "mask", "decodr"],
            "show mask decodr: needs a network or a recipe; did you mean decoder? networks: decoder",
        ),
        (["show", "mask", "decoder", "network.depth=0"], "override  network.depth = 0: must be a whole number >= 1"),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_exit_code_2(command, args, line):
    assert command(*args) == (2, "", line + "\n")


@pytest.mark.parametrize("args", [["sho"], ["show", "--colour"]])
def test_wrong_usage_is_exit_code_2_too(command, args):
    code, out, errors = command(*args)
    assert (code, out) == (2, "")
    assert "Error: No such" in errors


def raising(error):
    def overview():
        raise error

    return overview


def test_what_a_terminal_has_no_character_for_is_told_by_its_number(monkeypatch):
    monkeypatch.setattr(recipe, "overview", lambda: "na\u00efve \u6771\u4eac")
    done = CliRunner(charset="latin-1").invoke(cli.main, ["show"])
    assert done.exit_code == 0 and done.stdout_bytes == b"na\xefve \\u6771\\u4eac\n"


def test_an_interrupt_is_one_line_and_exit_code_130(command, monkeypatch):
    monkeypatch.setattr(recipe, "overview", raising(KeyboardInterrupt()))
    assert command("show") == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENAMETOOLONG]
)
def test_what_a_disk_refuses_is_told_with_its_cure(command, monkeypatch, number):
    monkeypatch.setattr(recipe, "overview", raising(OSError(number, "not here", "runs/mine/plan.json")))
    code, out, errors = command("show")
    assert (code, out) == (2, "") and errors.startswith("runs/mine/plan.json: not here; ")
    assert ("; take a shorter name" if number == errno.ENAMETOOLONG else "; make ") in errors
    assert errors.endswith(" and start the same command again\n")


@pytest.mark.parametrize(
    "said", ["g++:\nx.s: No space left on device\n", "x.so: failed to map segment from shared object"]
)
def test_a_compiler_without_a_folder_to_write_to_is_told_with_its_cure(command, monkeypatch, said):
    monkeypatch.setattr(recipe, "overview", raising(InductorError(RuntimeError(said), None)))
    code, out, errors = command("show")
    assert (code, out) == (2, "") and errors.startswith("blocks cannot be compiled (") and errors.count("\n") == 1
    assert errors.endswith("whose files may be executed, or write training.compile=false\n")
    monkeypatch.setattr(recipe, "overview", raising(InductorError(RuntimeError("a bug"), None)))
    with pytest.raises(InductorError, match="a bug"):
        command("show")


BUGS = [ValueError("a bug"), KeyError("a bug"), AssertionError("a bug"), OSError(errno.EINVAL, "a bug")]


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_not_hidden(command, monkeypatch, bug):
    monkeypatch.setattr(recipe, "overview", raising(bug))
    with pytest.raises(type(bug), match="a bug"):
        command("show")


def test_a_message_of_several_lines_is_printed_whole(command, monkeypatch):
    monkeypatch.setattr(recipe, "overview", raising(UserError("one\ntwo")))
    assert command("show") == (2, "", "one\ntwo\n")
