"""Rows of pointer chasing against the paper's example, a resolver that reads them, and what a window shows."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from tandem.analysis import pointer_chasing
from tandem.analysis.pointer_chasing import (
    BLOCK,
    EQUALS,
    FIRST_VALUE,
    PUBLISHED,
    QUERY,
    PointerChasing,
    Task,
    accuracies,
    learn,
    settings,
    solved,
)
from tandem.corpus import IGNORE
from tandem.networks.context_ready import ContextReady
from tandem.networks.decoder import Decoder
from tandem.training.health import NotFinite
from tandem.training.optimiser import AdamW

PAPER = [
    *["v3", "=", "A", "v0", "=", "B", "v8", "=", "C", "|", *"QAQBQC", "|"],
    *[*"A=DB=EC=F", "|", *"QDQEQF", "|", *"D=GE=HF=I", "|", *"QGQHQI", "|", *"QG"],
]


def task(n, k, v, **options):
    return Task(Task.Config(tables=n, keys=k, values=v, **options))


def ids(words, values):
    fixed = {"Q": 0, "=": 1, "|": 2}
    return [fixed.get(w, 3 + int(w[1:]) if w[0] == "v" else 3 + values + ord(w[0]) - ord("A")) for w in words]


def resolve(row, task):
    """The answer at every queried position of one row, by reading it and following its pointers one by one."""
    points_to, answers = {}, {}
    for i, token in enumerate(row):
        if token == EQUALS:
            points_to[row[i + 1]] = row[i - 1]
        elif token == QUERY:
            found = row[i + 1]
            while found >= FIRST_VALUE + task.config.values:
                found = points_to[found]
            answers[i + 1] = found
    return answers


def test_a_step_in_parts_is_the_same_step():
    weights = []
    for rows in (None, 3):
        ours = task(2, 2, 4, rows=8, rows_at_once=rows)
        network = Decoder(Decoder.Config(width=16, heads=2, depth=1), ours.vocabulary, ours.length,
                          torch.Generator().manual_seed(0)).double()  # fmt: skip
        learn(network, ours, seed=0, steps=2, lr=1e-3)
        weights.append(torch.cat([x.detach().flatten() for x in network.parameters()]))
    batch = ours.batch(0, "step 0")
    parts = list(pointer_chasing.parts_of(batch, 3))
    assert [(part.row, len(part.tokens)) for part in parts] == [(0, 3), (3, 3), (6, 2)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-9)


def test_the_example_of_the_paper():
    ours, row = task(3, 3, 10), ids(PAPER, 10)
    assert ours.length == len(row) == 53
    assert ours.asked == [[11, 13, 15], [28, 30, 32], [45, 47, 49], [52]]
    v3, v0, v8 = 6, 3, 11
    assert resolve(row, ours) == dict(zip(chain(*ours.asked), [v3, v0, v8] * 3 + [v3], strict=True))
    drawn = ours.batch(0, "test", 200).tokens
    for i, word in enumerate(PAPER[:-1]):  # keys are listed in order, so all but what is looked up is as in the paper
        if word in "Q=|" or PAPER[i - 1] in "Q=":
            assert (drawn[:, i] == row[i]).all(), (i, word)
    assert {*drawn[:, -1].tolist()} == {*ids("GHI", 10)}


@pytest.mark.parametrize(
    ("size", "length", "vocabulary", "targets"),
    [("main", 272, 63, 51), ("progression", 522, 123, 101), ("hops20", 842, 179, 161)],
)
def test_sizes_of_the_published_tasks(size, length, vocabulary, targets):
    ours, _, _ = settings(size)
    batch = ours.batch(0, "test", 2)
    assert (ours.length, ours.vocabulary) == (length, vocabulary)
    assert batch.tokens.shape == (2, length) and int(batch.tokens.max()) == vocabulary - 1
    assert (batch.targets != IGNORE).sum(1).tolist() == [targets] * 2


@pytest.mark.parametrize("answers", [False, True])
def test_a_thousand_rows_are_resolved_by_reading_them(answers):
    ours = task(4, 3, 5, answers_in_input=answers)
    batch = ours.batch(3, "test", 1000)
    for row, wanted in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        assert resolve(row, ours) == {i: answer for i, answer in enumerate(wanted) if answer != IGNORE}
    values = (batch.tokens >= 3) & (batch.tokens < 8)
    assert values[:, 9:].any() == answers  # else a value stands in the first table only
    assert batch.tokens[:, 9:].unique().numel() > 12
    for i in range(3):
        assert set(batch.tokens[:, 3 * i].tolist()) == set(range(3, 8))
    drawn = batch.tokens[:, 0:9:3].sort(1).values  # values with replacement: three of five differ in 12 of 25 rows
    assert (drawn.diff() > 0).all(1).double().mean().item() == pytest.approx(12 / 25, abs=0.05)
    table = batch.tokens[:, ours.level : ours.level + 9 : 3].sort(1).values  # while tables are one to one
    assert (table == torch.tensor([8, 9, 10])).all()


def test_answers_in_the_input_add_one_token_a_query():
    plain, easy = task(4, 3, 10), task(4, 3, 10, answers_in_input=True)
    assert easy.length == plain.length + 4 * 3 and easy.vocabulary == plain.vocabulary
    a, b = (t.batch(1, "test", 5) for t in (plain, easy))
    answers = [p + 1 for column in easy.asked[:-1] for p in column]
    kept = [i for i in range(easy.length) if i not in answers]
    assert torch.equal(b.tokens[:, kept], a.tokens) and torch.equal(b.targets[:, kept], a.targets)


def test_rows_are_a_function_of_seed_and_purpose():
    ours = task(3, 3, 10)
    same, other, later = (ours.batch(seed, p).tokens for seed, p in ((1, "step 0"), (2, "step 0"), (1, "step 1")))
    assert torch.equal(ours.batch(1, "step 0").tokens, same)
    assert not torch.equal(same, other) and not torch.equal(same, later)


def test_windows_show_what_the_published_sizes_rely_on():
    ours, options, _ = settings("main")
    first_table = range(3 * 5)
    for level, column in enumerate(ours.asked[:-1]):
        for number, i in enumerate(column):
            seen = range(max(0, i + 1 - options["window"]), i + 1)
            if level >= 2:
                assert not set(seen) & set(first_table)
            if level >= 1 and number == 4:  # the last query: its table, all queries before, and the bar before those
                assert seen.start == (level - 1) * ours.level + 3 * 5
    ours, options, _ = settings("progression")
    for level, column in enumerate(ours.asked[1:-1], 1):
        before = ours.asked[level - 1]
        for number, i in enumerate(column):
            shown = [j for j in before if j - 1 > i - options["window"] and j <= i]  # Q and its key
            assert shown == before[number + 1 :] if number + 1 < 10 else not shown, (level, number)


HOP = {"tables": 2, "keys": 2, "values": 4, "rows": 32}
"""The smallest task with a hop, learnt in seconds. WINDOW hides the values of the first table from later levels."""
WINDOW = 16


def one_block(cls, vocabulary, length, **options):
    """Of the shape of the paper's, at step 0."""
    config = cls.Config(**BLOCK, width=64, heads=2, depth=1, window=WINDOW, **options)
    return cls(config, vocabulary, length, torch.Generator().manual_seed(0))


def test_one_recurrent_block_learns_a_hop_and_a_watcher_ends_it():
    ours, found = Task(Task.Config(**HOP)), []
    assert ours.asked[1][0] - WINDOW >= 3  # the place of the last value
    network = one_block(ContextReady, ours.vocabulary, ours.length, unroll="bptt")

    def watch(step, loss, columns):
        found.append(columns)
        return solved(columns) == 3

    taken = learn(network, ours, seed=0, steps=150, lr=5e-3, every=25, watch=watch)
    assert solved(found[-1]) == 3 and taken == 25 * len(found)
    assert accuracies(network, ours, seed=0, purpose=f"look at {taken}") == found[-1]
    assert min(accuracies(network, ours, seed=0)) > 0.95  # on other rows


def test_one_plain_block_learns_no_hop_and_what_is_analysed_is_a_new_network():
    trained = one_block(Decoder, 100, 64)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    run: Any = SimpleNamespace(network=trained, device=SimpleNamespace(value=torch.device("cpu")))
    analysis = PointerChasing(PointerChasing.Config(**HOP, steps=100, lr=5e-3))
    found = analysis.measure(run)
    assert found["solved"] == 1 and found["trained_steps"] == 100
    levels, reached = zip(*(row.values() for row in found["levels"]), strict=True)
    assert levels == ("0", "1", "last query") and max(reached[1:]) < 0.5  # by chance 0.25
    analysis.draw(found, axes := Figure().subplots())
    assert [bar.get_height() for bar in axes.patches] == list(reached)
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())


def test_a_rate_at_which_training_fails_is_no_result():
    ours = Task(Task.Config(**HOP))
    network = one_block(Decoder, ours.vocabulary, ours.length)
    with pytest.raises(NotFinite, match=r"analysis\.lr = 1e\+30: the gradient of step 2 is not finite; try"):
        learn(network, ours, seed=0, steps=3, lr=1e30)


def test_every_look_and_the_final_figure_are_over_rows_of_their_own(monkeypatch):
    drawn, draw = {}, Task.batch

    def watched(task, seed, purpose, rows=None):
        batch = draw(task, seed, purpose, rows)
        if rows:  # not those of a step
            drawn[purpose] = batch.tokens
        return batch

    monkeypatch.setattr(Task, "batch", watched)
    ours = Task(Task.Config(**HOP))
    network = one_block(Decoder, ours.vocabulary, ours.length)
    learn(network, ours, seed=0, steps=6, lr=1e-3, every=2)
    accuracies(network, ours, seed=0)
    assert [len(tokens) for tokens in drawn.values()] == [256] * 4
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn.values()}) == 4


@pytest.mark.parametrize("loudest", ["the answer", "a key", "Q"])
def test_the_answer_has_to_be_the_likeliest_of_all_tokens(loudest):
    ours = task(2, 2, 4)
    targets = ours.batch(0, "evaluation", 8).targets

    class Told:
        """A session that knows the answers, with one more token made likelier yet."""

        column = 0

        def prefill(self, prompts):
            return self.step(None)

        def step(self, tokens):
            logits = torch.zeros(8, ours.vocabulary)
            logits.scatter_(1, targets[:, self.column, None].clamp_min(0), 1.0)
            if loudest != "the answer":
                logits[:, {"a key": -1, "Q": 0}[loudest]] = 2.0
            self.column += 1
            return logits

    network: Any = SimpleNamespace(head=torch.zeros(1), session=lambda rows: Told())
    assert accuracies(network, ours, seed=0, rows=8) == [float(loudest == "the answer")] * 3


def test_solved_counts_up_to_the_first_failure():
    assert [solved(f) for f in ([1.0, 1.0], [0.99, 0.98, 1.0], [0.5])] == [2, 1, 0]
    assert set(PUBLISHED) == {"small", "main", "progression", "hops20"}


def test_the_published_tasks_are_those_of_the_paper():
    columns = {"main": (10, 5, 10, 256, 38, 1e-4), "progression": (10, 10, 20, 128, 52, 1e-3)}
    columns["hops20"] = (20, 8, 16, 512, None, 1e-4)  # at 1e-3 it does not train
    for size, (tables, keys, values, width, window, lr) in columns.items():
        ours, network, rate = settings(size)
        wanted = Task.Config(tables=tables, keys=keys, values=values, rows=64, answers_in_input=False)
        assert ours.config.model_copy(update={"rows_at_once": None}) == wanted
        assert ours.config.rows_at_once == (8 if size == "hops20" else None)  # 1.5 GB a row through time
        assert network == {**BLOCK, "width": width, "heads": 4, "window": window} and rate == lr


def test_it_is_trained_by_adam_with_clipped_gradients_and_in_training(monkeypatch):
    asked, clipped, modes, ours = [], [], [], Task(Task.Config(**HOP))

    class Watched(AdamW):
        def __init__(self, config, network):
            asked.append(config)
            super().__init__(config, network)

        def step(self, multiplier):
            gradients = [parameter.grad.flatten() for parameter in self.parameters]
            clipped.append((torch.cat(gradients).norm().item(), multiplier))
            return super().step(multiplier)

    monkeypatch.setattr(pointer_chasing, "AdamW", Watched)
    network = one_block(Decoder, ours.vocabulary, ours.length)
    network.register_forward_hook(lambda module, *_: modes.append(module.training))
    learn(network, ours, seed=0, steps=2, lr=5e-3, every=1)  # accuracies in between are asked in evaluation
    adam = {"betas": (0.9, 0.999), "weight_decay": 0.0, "max_norm": 1.0}
    assert asked == [AdamW.Config(lr=5e-3, **adam)]
    assert len(clipped) == 2 and all(norm <= 1.0001 and multiplier == 1.0 for norm, multiplier in clipped)
    assert modes == [True, True]
