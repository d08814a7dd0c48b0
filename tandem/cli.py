"""The command `tandem`: every sub-command is a few lines around a function of the library.

Each command imports what it needs when it runs, so that `tandem --help` answers at once. User errors (`UserError`) and
disk errors, such as a full disk, are printed to standard error without a traceback and exit with code 2, as typer's
own errors do; a loss that is not finite exits with 3, Ctrl-C with 130. Any other exception is a bug and keeps its
traceback.
"""

import errno
import gc
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import tandem
from tandem.machine import compiler_without_folder, set_threads

set_threads()
gc.set_threshold(*gc.get_threshold()[:2], 1000)  # imports make a million objects that stay: rarely look at all again

CURES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room on the disk")
CURES |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it one that this user may read and write")
CURES |= {errno.ENAMETOOLONG: "take a shorter name"}
"""Remedies for disk errors, by errno; any other OSError may be a bug."""

NO_MEMORY = ("out of memory", "can't allocate memory", "Storage size calculation overflowed")
SMALLER = (
    "take fewer rows or a shorter context at a time or a smaller network; in training, batch.micro_batches and "
    "training.recompute=true need less memory for the same steps"
)


class _Group(TyperGroup):
    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except OSError as error:
            if error.errno not in CURES:
                raise
            cure = f"{CURES[error.errno]} and start the same command again"
            _tell(error, f"{error.filename or 'standard output or a file'}: {error.strerror}; {cure}")
            sys.exit(2)
        except (MemoryError, RuntimeError) as error:  # RuntimeError: PyTorch's, of any device
            if told := compiler_without_folder(error):
                _tell(error, told)
                sys.exit(2)
            first = (str(error).splitlines() or ["no memory"])[0]
            if not isinstance(error, MemoryError) and not any(words in first for words in NO_MEMORY):
                raise
            _tell(error, f"out of memory ({first}): {SMALLER}")
            sys.exit(2)
        except ValueError as error:
            from tandem.recipe import UserError

            if not isinstance(error, UserError):
                raise
            _tell(error, str(error))
            sys.exit(error.exit_code)


def _tell(error: Exception, words: str) -> None:
    """Print an error, unless another process of the run prints it."""
    if not getattr(error, "is_told_elsewhere", False):
        print(words, file=sys.stderr)


main = typer.Typer(
    cls=_Group, add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tandem {tandem.__version__}")
        raise typer.Exit


@main.callback()
def _tandem(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Pretrain language models in ways that split one job in two, and compare them. Start with `tandem show`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample may hold what this terminal does not


@main.command()
def show(
    what: Annotated[str | None, typer.Argument(help="A section, a choice, a recipe, a study, or `mask`.")] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="After a recipe: KEY=VALUE; after `mask`: a network or a recipe.")
    ] = None,
) -> None:
    """Show what there is to choose from, with all options.

    \b
    tandem show                       sections, their choices, recipes
    tandem show decoder               a choice and its options
    tandem show decoder/tiny          a recipe: every value and where it comes from
    tandem show studies/demo          a study: its arms, seeds, budget and rates
    tandem show mask decoder          which key each query may read, of a network or of a recipe
    """
    from tandem.recipe import explain, overview
    from tandem.recipe.document import names_study

    if what is None:
        print(overview())
    elif what == "mask":
        print(_masks(*(more or [])))
    elif names_study(what):
        from tandem.comparison.grid import load_grid

        for name, study in load_grid(what, more or []).cells.items():
            print((f"# {name}\n" if name else "") + study.to_yaml(), end="")
    else:
        print(explain(what, more or []))


def _masks(what: str = "", *overrides: str) -> str:
    """Every span of a network, drawn for an example row."""
    from tandem.nn.drawing import STARTS, draw_span
    from tandem.recipe import UserError, configure, did_you_mean, load, recipes, register_all, registered
    from tandem.recipe.document import names_recipe

    register_all()
    networks = registered("network")
    if what in networks:
        network, config = networks[what], configure("network", what, overrides)
    elif names_recipe(what):
        recipe = load(what, overrides)
        network, config = recipe.choice("network"), recipe.network
    else:
        near, asked = did_you_mean(what, [*networks, *recipes()]), f"show mask {what}".rstrip()
        raise UserError(f"{asked}: needs a network or a recipe; {near}networks: {', '.join(networks)}")
    parts = ["One line per query, one column per key: # is read, . is not. Two documents, a and b, in one row."]
    for title, span, keys in network.drawing(config, list(STARTS)):
        parts += [title, draw_span(span.lo[0].tolist(), span.hi[0].tolist(), keys)]
    return "\n\n".join(parts)


Overrides = Annotated[list[str] | None, typer.Argument(help="KEY=VALUE on top of the recipe.")]
Unfinished = Annotated[
    bool, typer.Option("--unfinished", help="Also allow a phase in which it is no language model yet.")
]
AtStep = Annotated[int | None, typer.Option("--step", min=0, help="Checkpoint to open; by default the last one.")]
RunPath = Annotated[Path, typer.Argument(help="Folder of a run, such as runs/first.")]
ModelPath = Annotated[Path, typer.Argument(help="Folder of a run or of an exported model.")]
RunsPath = Annotated[Path, typer.Option(help="Folder of the runs.")]
FreeSettings = Annotated[list[str] | None, typer.Argument(help="network.KEY=VALUE of a run; must shape no weight.")]


@main.command()
def prepare(
    recipe: str,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte against what was written.")] = False,
) -> None:
    """Turn the text of a recipe into a prepared corpus. `train` does it too. Interrupted, it goes on where it was."""
    from tandem.comparison.pretrain import prepared
    from tandem.recipe import counted, load

    corpus = prepared(load(recipe, overrides or []))
    for store in (corpus.train, corpus.validation):
        if verify:
            store.verify()
        size = f"{counted(len(store), 'documents')}, {len(store.tokens):,} tokens"
        print(f"{store.folder}: {size}, fingerprint {store.fingerprint}")


@main.command()
def plan(recipe: str, overrides: Overrides = None) -> None:
    """Show what a run would do and cost. It tells values and their origin, FLOPs, and measured memory and time."""
    from tandem.comparison.pretrain import plan as planned
    from tandem.recipe import load

    loaded = load(recipe, overrides or [])
    print("\n\n".join([planned(loaded), *loaded.notes]))


@main.command()
def train(
    recipe: str,
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; by default the recipe's and a hash.")] = None,
    runs: RunsPath = Path("runs"),
) -> None:
    """Train a recipe, or continue an interrupted run of it.

    \b
    torchrun --nproc-per-node N -m -- tandem train ...    on N processes, each with a GPU where there are any
    """
    from tandem.recipe import load

    name = Path(recipe).name.removesuffix(".yaml").removesuffix(".yml")
    _train(
        lambda: load(recipe, overrides or []),
        lambda loaded: _place(runs, run, f"{name}-{loaded.fingerprint}"),
    )


@main.command()
def convert(
    source: RunPath,
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE on top of that run's recipe.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the new run; by default the old one's and a hash.")] = None,
    runs: RunsPath = Path("runs"),
) -> None:
    """Make a trained decoder context-ready and train it further. At first it computes the same function."""
    from tandem.comparison.trained import converted

    _train(
        lambda: converted(source, overrides or []),
        lambda recipe: _place(runs, run, f"{source.absolute().name}-converted-{recipe.fingerprint}"),
    )


def _place(runs: Path, given: str | None, otherwise: str) -> Path:
    """The folder of a run by the name that is given, or otherwise, which must be that of one folder in `runs`."""
    from tandem.recipe import UserError

    name = otherwise if given is None else given
    if name in ("", "..") or Path(name).name != name:
        raise UserError(f"--run {name!r}: must be the name of one folder, without /; --runs says where it lies")
    return runs / name


def _train(recipe: Callable[[], Any], path: Callable[[Any], Path]) -> None:
    from tandem.comparison.pretrain import pretrain
    from tandem.training.parallel import joined

    with joined() as ranks:
        with ranks.together():
            loaded = recipe()
            target = path(loaded)
        for note in loaded.notes if ranks.is_first else ():
            print(note, file=sys.stderr)
        pretrain(loaded, target, ranks=ranks)


@main.command()
def compare(
    study: Annotated[str, typer.Argument(help="Name or path of a study.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE of the study, or of all its recipes.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs to train at a time; they share cores and GPUs.")] = 1,
    studies: Annotated[Path, typer.Option(help="Folder of the studies.")] = Path("studies"),
    list_only: Annotated[bool, typer.Option("--list", help="List what is done and what is missing.")] = False,
) -> None:
    """Train the arms of a study and compare them. The same command again continues, or shows the result.

    Started several times, on one machine or on many that share the folder, the commands divide the runs among them.
    """
    from tandem.comparison import grid

    loaded = grid.load_grid(study, overrides or [])
    for note in dict.fromkeys(note for cell in loaded.cells.values() for note in cell.notes):
        print(note, file=sys.stderr)
    if list_only:
        print(grid.status(loaded, studies / loaded.name))
    else:
        grid.compare(loaded, studies / loaded.name, processes)


@main.command()
def evaluate(
    run: ModelPath,
    overrides: FreeSettings = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Documents of each text; by default all.")] = None,
    texts: Annotated[list[str] | None, typer.Option(help="NAME=PATH: a further text; may be repeated.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks to run instead: names or paths of task files, separated by commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task; by default all.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Task prompts to read at a time.")] = None,
    unfinished: Unfinished = False,
    step: AtStep = None,
) -> None:
    """Score held-out text token by token, or run tasks.

    \b
    tandem evaluate RUN                                       nats per token, bits per byte
    tandem evaluate RUN --tasks hellaswag,piqa,ood            tasks and texts under $TANDEM_DATA
    tandem evaluate RUN --tasks hf:sciq --limit 200           a task that reads the hub
    tandem evaluate RUN network.score_passes=2                in two passes, however it was trained
    """
    from tandem.comparison import trained
    from tandem.comparison.tasks import judge_tasks
    from tandem.recipe import UserError

    other, taken = {"--limit": limit, "--rows": rows}, "without --tasks takes --documents, --texts"
    if tasks is not None:
        other, taken = {"--documents": documents, "--texts": texts}, "with --tasks takes --limit, --rows"
    if spare := [option for option, value in other.items() if value]:
        raise UserError(f"{', '.join(spare)}: evaluate {taken}")
    if tasks is not None:
        judge_tasks(run, tasks, limit, rows, unfinished, step, overrides or [])
    else:
        for line in trained.evaluate(run, documents, texts or [], unfinished, step, overrides or []):
            print(line, flush=True)


def _ranged(bounds: str, holds: Callable[[float], bool], told: str) -> Any:
    """An option for a number within bounds that typer's `min` and `max`, which let infinity pass, cannot express."""

    def check(value: float | None) -> float | None:
        if value is None or holds(value):
            return value
        raise typer.BadParameter(f"{value} is not in the range {bounds}.")

    return typer.Option(callback=check, metavar=bounds, help=told)


@main.command()
def generate(
    run: ModelPath,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Texts to continue, or none for a new document; network.KEY=VALUE.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 100,
    temperature: Annotated[
        float, _ranged("0<=T<inf", lambda t: 0 <= t < float("inf"), "0 always takes the most likely token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, _ranged("0<P<=1", lambda p: 0 < p <= 1, "Draw from the fewest tokens with probability P in all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same texts.")] = 0,
    file: Annotated[str | None, typer.Option(help="Prompts, one per line or .jsonl; - is standard input.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write a JSON line for each prompt, and read standard input as JSON lines.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Prompts to continue at a time; does not change the texts.")] = 16,
    unfinished: Unfinished = False,
    step: AtStep = None,
) -> None:
    """Continue texts, streaming the output.

    \b
    tandem generate RUN "Once upon a time"
    tandem generate RUN network.score_passes=2 "Once upon a time"    in two passes, however it was trained
    tandem generate RUN --file prompts.jsonl --json > texts.jsonl    keeps other keys of a prompt, such as an id
    """
    from tandem.comparison import trained
    from tandem.comparison.prompts import prompts_and_settings

    texts, overrides = prompts_and_settings(prompts or [], file, as_json)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    trained.continue_texts(run, texts, tokens, options, seed, unfinished, rows, as_json, step, overrides)


@main.command()
def analyse(
    name: Annotated[str, typer.Argument(help="An analysis; `tandem show` lists them.")],
    run: Annotated[Path, typer.Argument(help="Folder of a run; a recipe, if the analysis needs no weights.")],
    options: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE; `tandem show NAME` lists them. network.KEY=VALUE of RUN.")
    ] = None,
    unfinished: Unfinished = False,
    step: AtStep = None,
) -> None:
    """Run an analysis. Its record and picture go to RUN/analysis, or to ./analysis for a recipe."""
    from tandem.comparison import trained

    print(trained.analyse(name, run, options or [], unfinished, step))


@main.command("import")
def import_model(
    folder: Annotated[Path, typer.Argument(help="Folder of a Llama, Mistral, Qwen3 or GPT-2, by transformers.")],
    recipe: Annotated[str, typer.Argument(help="Recipe for everything but network and tokenizer.")],
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; by default the folder's and a hash.")] = None,
    runs: RunsPath = Path("runs"),
) -> None:
    """Make a run from a decoder trained elsewhere. It can be evaluated, converted, trained further and compared."""
    from tandem.comparison.imported import import_run

    def path(loaded: Any) -> Path:
        return _place(runs, run, f"{folder.absolute().name}-{loaded.fingerprint}")

    print(import_run(folder, recipe, overrides or [], path))


@main.command()
def export(
    run: RunPath, folder: Path, overrides: FreeSettings = None, unfinished: Unfinished = False, step: AtStep = None
) -> None:
    """Write a run's model as a folder that transformers reads. Tandem need not be installed to read it."""
    from tandem.comparison import trained

    print(trained.write_model(run, folder, unfinished, step, overrides or []))
