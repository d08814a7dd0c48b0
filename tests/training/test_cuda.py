"""Training on a CUDA device: the same losses as on the CPU, and none of the CPU's data left behind."""

import pytest
import torch

from tandem.corpus import prepare
from tandem.recipe import load
from tandem.training.loop import take_step
from tandem.training.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SIZE = ["network.depth=2", "network.width=64", "batch.rows=4", "batch.context=64", "budget=20 steps"]


@pytest.mark.parametrize(("precision", "apart"), [("float32", 2e-3), ("bfloat16", 5e-2)])
def test_cuda_trains_as_the_cpu_does(small_corpus, precision, apart):
    losses = {}
    for device in ("cpu", "cuda"):
        recipe = load(
            "decoder/tiny", [*SIZE, *small_corpus, f"training.device={device}", f"training.precision={precision}"]
        )
        run = Run(recipe, prepare(recipe.corpus))
        losses[device] = [take_step(run, step).means()["nll"] for step in range(20)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=apart)


def test_cuda_compiled_blocks_train_as_eager_ones(small_corpus):
    losses = []
    for compiled in ("false", "true"):
        recipe = load("decoder/tiny", [*SIZE, *small_corpus, f"training.compile={compiled}"])
        run = Run(recipe, prepare(recipe.corpus))
        losses.append([take_step(run, step).means()["nll"] for step in range(20)])
    assert losses[0] == pytest.approx(losses[1], abs=5e-2)
