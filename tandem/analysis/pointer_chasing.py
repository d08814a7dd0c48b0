"""Pointer chasing: a task that takes one more sequential step with every level.

A row holds n tables. The first maps its keys to values, every later one maps its keys one-to-one onto those of the
table before. After each table all its keys are queried for the value at the end of their chain, and at the very end one
key of the last table. Below, n = 3 tables of k = 3 keys; the answers, predicted at the queried keys, are not inputs:

    v3 = A  v0 = B  v8 = C |  Q A  Q B  Q C |       asks v3 v0 v8
    A = D   B = E   C = F  |  Q D  Q E  Q F |       asks v3 v0 v8, through A B C
    D = G   E = H   F = I  |  Q G  Q H  Q I |       asks v3 v0 v8, through D E F and A B C
    Q G                                             asks v3

With windowed attention no query of a later level sees the first table: it has to be carried forward, level by level.
A stack of blocks takes a fixed number of steps and solves only so many levels; a recurrence has no such limit. With
`answers_in_input` (Q A v3 ...) every level is the same short look-up, and the difference disappears.

    task = Task(Task.Config())
    learn(network, task, seed=0, steps=1500, lr=1e-3)
    accuracies(network, task, seed=0)                   # by column: levels 0 .. n-1, and the last query
    tandem analyse pointer_chasing decoder/tiny         # all of that, for a new network of a recipe, or of a run

Ids: 0 Q, 1 =, 2 |, then the v values, then n k keys, level by level.
Source: The Context-Ready Transformer (arXiv 2606.27538), section on pointer chasing; rows and ids are our own.
Shapes: B rows, T = n (5k + 2) + 2 tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pydantic import Field

from tandem.analysis.analysis import Analysis
from tandem.corpus import IGNORE, Batch
from tandem.networks.network import Network
from tandem.objectives.next_token import NextToken
from tandem.recipe import Settings, UserError, register
from tandem.training.health import NotFinite
from tandem.training.optimiser import AdamW
from tandem.training.run import Run, keyed

QUERY, EQUALS, BAR, FIRST_VALUE = range(4)
SOLVED = 0.99
"""Accuracy from which a column counts as solved."""

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # name: (task, network, learning rate)
    "small": ({"tables": 4, "keys": 3, "values": 10}, {"width": 64, "heads": 4, "window": 24}, 1e-3),
    "main": ({"tables": 10, "keys": 5, "values": 10}, {"width": 256, "heads": 4, "window": 38}, 1e-4),
    "progression": ({"tables": 10, "keys": 10, "values": 20}, {"width": 128, "heads": 4, "window": 52}, 1e-3),
    "hops20": (
        {"tables": 20, "keys": 8, "values": 16, "rows_at_once": 8},
        {"width": 512, "heads": 4, "window": None},
        1e-4,
    ),
}
"""The paper's three tasks with their networks (one block, or the plain decoder's several), and one for a CPU."""
BLOCK = {"norm": "layer", "mlp": "gelu", "bias": True, "tied": False, "init": "torch"}
"""The block of the paper's networks."""


class Task:
    """Rows of pointer chasing; those of a step are a pure function of (seed, step)."""

    class Config(Settings):
        tables: int = Field(4, ge=1)
        """n, tables of a row."""
        keys: int = Field(3, ge=1)
        """k, keys of a table."""
        values: int = Field(10, ge=1)
        """v, values that a chain can end in."""
        answers_in_input: bool = False
        """The answer follows each queried key except the last."""
        rows: int = Field(64, ge=1)
        """B, rows of a step."""
        rows_at_once: int | None = Field(None, ge=1)
        """Rows of one backward pass, which through time keeps caches of every position; null: all of a step."""

    def __init__(self, config: Config):
        self.config = c = config
        self.vocabulary = FIRST_VALUE + c.values + c.tables * c.keys
        self.query = 3 if c.answers_in_input else 2
        """Tokens of a query."""
        self.level = 3 * c.keys + 1 + self.query * c.keys + 1
        """Tokens of a table and its queries."""
        self.length = c.tables * self.level + 2
        """T."""

    @property
    def asked(self) -> list[list[int]]:
        """Positions by column: those of the queried keys, level by level, then that of the last query."""
        c, first = self.config, 3 * self.config.keys + 2
        levels = [[level * self.level + first + self.query * i for i in range(c.keys)] for level in range(c.tables)]
        return [*levels, [self.length - 1]]

    def batch(self, seed: int, purpose: str, rows: int | None = None) -> Batch:
        """Rows (B, T) drawn from a generator keyed by (seed, purpose), each one document."""
        c, B = self.config, rows or self.config.rows
        generator = torch.Generator().manual_seed(keyed(seed, f"pointer chasing/{purpose}"))
        keys = FIRST_VALUE + c.values + torch.arange(c.tables * c.keys).view(c.tables, c.keys)
        tokens, targets = [], []
        for level in range(c.tables):
            if level == 0:
                looked_up = answers = FIRST_VALUE + torch.randint(c.values, (B, c.keys), generator=generator)
            else:
                order = torch.rand(B, c.keys, generator=generator).argsort(1)
                looked_up, answers = keys[level - 1][order], answers.gather(1, order)
            mine = keys[level].expand(B, -1)
            query = [torch.full_like(mine, QUERY), mine, *([answers] if c.answers_in_input else [])]
            table = torch.stack([looked_up, torch.full_like(mine, EQUALS), mine], dim=2)
            bar = torch.full((B, 1), BAR)
            tokens += [table.flatten(1), bar, torch.stack(query, dim=2).flatten(1), bar]
            targets.append(answers)
        last = torch.randint(c.keys, (B, 1), generator=generator)
        tokens += [torch.full((B, 1), QUERY), keys[-1][last]]
        targets.append(answers.gather(1, last))
        row = torch.cat(tokens, dim=1)
        wanted = torch.full_like(row, IGNORE)
        for positions, answer in zip(self.asked, targets, strict=True):
            wanted[:, positions] = answer
        return Batch(row, wanted, torch.zeros_like(row), key=keyed(seed, f"pointer chasing/{purpose}/drawn"))


def learn(
    network: Network,
    task: Task,
    *,
    seed: int,
    steps: int,
    lr: float,
    every: int = 100,
    watch: Callable[[int, float, list[float]], bool] = lambda step, loss, accuracies: False,
) -> int:
    """Trains with Adam at a constant rate, gradients clipped to 1; returns the steps taken.

    Every `every` steps `watch` is called with steps, loss in nats and accuracies by column, on rows drawn for this look
    alone; if True, training ends.
    Raises: NotFinite for a gradient that is not: the network would then answer the first id to every question.
    """
    adam: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.0, "max_norm": 1.0}
    optimiser = AdamW(AdamW.Config(**adam), network)
    objective, device = NextToken(NextToken.Config()), network.head.device
    for step in range(steps):
        batch, loss = task.batch(seed, f"step {step}").to(device), 0.0
        counts = objective.count(network, batch)
        for part in parts_of(batch, task.config.rows_at_once):
            of_part, _ = objective.loss(network, part, counts)
            of_part.backward()
            loss += of_part.item()
        if not optimiser.clip().isfinite():
            raise NotFinite(f"analysis.lr = {lr}: the gradient of step {step + 1} is not finite; try a lower one")
        optimiser.step(1.0)
        if (step + 1) % every == 0:
            found = accuracies(network, task, seed, purpose=f"look at {step + 1}")
            if watch(step + 1, loss, found):
                return step + 1
    return steps


def parts_of(batch: Batch, rows: int | None) -> Iterator[Batch]:
    """The batch, `rows` rows at a time."""
    tensors = batch.tokens, batch.targets, batch.starts
    for part, (tokens, targets, starts) in enumerate(zip(*(x.split(rows or len(x)) for x in tensors), strict=True)):
        yield Batch(tokens, targets, starts, batch.key, part * (rows or 0))


@torch.no_grad()
def accuracies(network: Network, task: Task, seed: int, rows: int = 256, purpose: str = "evaluation") -> list[float]:
    """Share of right answers by column, levels 0 .. n-1 and the last query, on the rows of (seed, purpose).

    The answer is the likeliest of all tokens. A session reads the rows token by token, as in generation.
    """
    batch = task.batch(seed, purpose, rows).to(network.head.device)
    session, right = network.session(rows), {}
    for i in range(task.length):
        logits = session.step(batch.tokens[:, i]) if i else session.prefill(batch.tokens[:, :1].tolist())
        right[i] = (logits.argmax(-1) == batch.targets[:, i]).double().mean().item()
    return [sum(right[i] for i in positions) / len(positions) for positions in task.asked]


def solved(found: list[float]) -> int:
    """Number of columns solved before the first that is not."""
    return next((column for column, accuracy in enumerate(found) if accuracy < SOLVED), len(found))


@register("analysis", "pointer_chasing")
class PointerChasing(Analysis):
    """How many levels a new network of the same settings learns to solve."""

    asks = "session"
    trained = False

    class Config(Task.Config):
        steps: int = Field(3000, ge=1)
        """Steps of training, at most; it ends once all columns are solved."""
        lr: float = Field(1e-3, gt=0)
        """Learning rate."""
        seed: int = Field(0, ge=0)
        """Determines the weights and the rows."""

    def measure(self, run: Run) -> dict[str, Any]:
        """Steps taken, columns solved and the accuracy by column."""
        c, task, network = self.config, Task(self.config), run.network
        if network.suffixes_only:
            told = "answers stand within a row, and this network writes after contexts"
            raise UserError(f"analyse pointer_chasing: {told}")
        if hasattr(network, "partition"):
            told = "a session reads a row as one block, without context, and this network learns from rows of several"
            raise UserError(f"analyse pointer_chasing: {told}")
        generator = torch.Generator().manual_seed(c.seed)
        fresh: Any = type(network)(network.config, task.vocabulary, task.length, generator)  # type: ignore[call-arg]
        fresh.to(run.device.value)

        def watch(step: int, loss: float, found: list[float]) -> bool:
            self.told(step, c.steps)
            return solved(found) == len(found)

        steps = learn(fresh, task, seed=c.seed, steps=c.steps, lr=c.lr, watch=watch)
        found = accuracies(fresh, task, c.seed)
        named = zip([*map(str, range(c.tables)), "last query"], found, strict=True)
        rows = [{"level": level, "accuracy": accuracy} for level, accuracy in named]
        return {"trained_steps": steps, "solved": solved(found), "levels": rows}

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        """Accuracy by level."""
        axes.bar([row["level"] for row in record["levels"]], [row["accuracy"] for row in record["levels"]])
        axes.axhline(SOLVED, color="0.6", linewidth=1)
        axes.set(xlabel="level", ylabel=f"accuracy after {record['trained_steps']:,} steps")


def settings(size: str, **options: Any) -> tuple[Task, dict[str, Any], float]:
    """(task, options of the network, learning rate) of one of PUBLISHED; `options` are the network's own."""
    task, network, lr = PUBLISHED[size]
    return Task(Task.Config(**task)), {**BLOCK, **network, **options}, lr
