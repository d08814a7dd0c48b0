"""Generated text to train on: sentences of common words in which the next word can be learned."""

import random
from pathlib import Path

import pytest
import typed

from tandem.recipe import register_all

SENTENCE = "the cat dog bird sees hears likes a small large red blue house tree river and then sleeps runs"
WORDS = SENTENCE.split()


def pytest_collection() -> None:
    """Registers all that a recipe can name where tests run; the process that distributes them does not wait for it."""
    register_all()


@pytest.fixture(scope="session", autouse=True)
def undrawn():
    """Runs draw no picture of their losses, which is a third of the time of a tiny one."""
    from tandem.comparison import pretrain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "plot_losses", lambda *_: None)
        yield


def story(number: int) -> str:
    draw = random.Random(number)
    sentences = []
    for _ in range(draw.randint(2, 12)):
        start = draw.randrange(len(WORDS))
        sentences.append(" ".join(WORDS[(start + step * step) % len(WORDS)] for step in range(draw.randint(4, 14))))
    return ". ".join(sentence.capitalize() for sentence in sentences) + "."


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A folder of 400 short text files."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(400):
        (folder / f"{number:03}.txt").write_text(story(number))
    return folder


@pytest.fixture(scope="session")
def small_corpus(texts, tmp_path_factory) -> list[str]:
    """Overrides by which any recipe reads these texts, prepared once for all tests."""
    prepared = tmp_path_factory.mktemp("prepared")
    return [
        f"corpus.texts=[{texts}]",
        "corpus.vocabulary=400",
        "corpus.validation=0.1",
        f"corpus.folder={prepared}",
    ]


@pytest.fixture(scope="session")
def trained(small_corpus, tmp_path_factory) -> Path:
    """The folder of a finished run, to be read, not changed."""
    runs = tmp_path_factory.mktemp("trained")
    shape = ["budget=4 steps", "batch.rows=2", "batch.context=32", "network.depth=1", "network.width=16"]
    done = typed.tandem("train", "decoder/tiny", "--run", "mine", "--runs", runs, *shape, *small_corpus)
    assert done.exit_code == 0, done.output
    return runs / "mine"
