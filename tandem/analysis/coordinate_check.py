"""Does the scale of activations stay the same when a network is made wider? The test of width transfer.

The recipe's network is built at several widths, with more heads of the same width, and trained for a few steps at the
peak learning rate; then the root mean square of the residual stream after each block, and of the logits, is measured
on the next batch. This is done twice: with `network.base_width` (nn/init.py, training/optimiser.py) and without.

    width     64    128    256    512    largest / smallest
    with      0.31  0.30   0.32   0.31   1.07                  one learning rate serves them all
    without   0.31  0.52   1.1    2.9    9.4                   the best rate moves with the width

Cost: `steps` steps of the recipe and a forward pass at every width, twice.
Source: Yang et al. 2022, "Tensor Programs V", appendix D.1 (coordinate checking); Block-Based Double Decoders use the
parametrisation. docs/width_transfer.md.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, field_validator
from torch import Tensor, nn

from tandem.analysis.analysis import Analysis, Sums
from tandem.networks.network import Network
from tandem.nn.mlp import inner_width
from tandem.recipe import Recipe, Settings, UserError, changed, counted, register
from tandem.training.health import NotFinite
from tandem.training.loop import take_step
from tandem.training.run import Run

LOGITS = "logits"
POSITIONS = 512
"""Positions of a batch whose logits are measured: all logits would not fit."""


@contextlib.contextmanager
def watched(network: Network) -> Iterator[Sums]:
    """Squares of the outputs of `network`'s blocks and head in the context; a block in several passes adds them all."""
    squares, blocks = Sums(), {id(block) for block in network.blocks}

    def tell(name: str, x: Tensor) -> None:
        squares.add(name, x.detach().double().square())

    def tell_logits(_: nn.Module, __: Any, output: tuple[Tensor, Any]) -> None:
        rows = output[0].detach().flatten(0, -2)[:POSITIONS]
        tell(LOGITS, rows.float() @ network.head.detach().float().T)

    with contextlib.ExitStack() as hooks:
        for name, module in network.named_modules():
            if id(module) in blocks:
                hooks.enter_context(module.register_forward_hook(lambda _, __, x, name=name: tell(name, x)))
        hooks.enter_context(network.register_forward_hook(tell_logits))
        yield squares


def roots(squares: Sums) -> dict[str, float]:
    return {name: mean**0.5 for name, mean in squares.means().items() if mean is not None}


def coordinates(run: Run, step: int) -> dict[str, float]:
    """Root mean square of the output of every block and of the logits, on the batches of `step`."""
    with watched(run.network) as squares, run.autocast():  # with gradients: otherwise a mixture reports nothing
        for batch in run.batches(step):
            batch = batch.to(run.device.value)
            run.objective.loss(run.network, batch, run.objective.count(run.network, batch))
    return roots(squares)


def at_width(recipe: Recipe, width: int, base: int | None) -> Recipe:
    """`recipe` with a network of another width, whose heads are as wide as before.

    Raises: UserError where `width` does not give whole numbers of heads.
    """
    c = recipe.network
    given = {"width": width, "heads": c.heads * width / c.width, "key_heads": c.key_heads * width / c.width}
    if not all(float(value).is_integer() for value in given.values()):
        heads = f"{c.heads} heads and {c.key_heads} key heads for {c.width} channels"
        raise UserError(f"analysis.widths: {width}: no whole number of heads, as there are {heads}; take another width")
    derived = c.mlp_width == inner_width(c.mlp, c.width)
    options = {
        **{key: int(value) for key, value in given.items()},
        "head_width": c.head_width,
        "mlp_width": "null" if derived else round(c.mlp_width * width / c.width),
        "base_width": base or "null",
    }
    return changed(recipe, [f"network.{key}={value}" for key, value in options.items()])


def spread(by_width: dict[int, dict[str, float]]) -> dict[str, float]:
    """Largest over smallest of every coordinate."""
    names = next(iter(by_width.values()))
    return {name: max(c[name] for c in by_width.values()) / min(c[name] for c in by_width.values()) for name in names}


@register("analysis", "coordinate_check")
class CoordinateCheck(Analysis):
    """Scale of the residual stream and of the logits against width, with width transfer and without."""

    asks = "blocks"
    trained = False

    class Config(Settings):
        widths: list[Annotated[int, Field(ge=1)]] = Field([64, 128, 256, 512], min_length=2)
        """Widths at which the network is built, heads as wide as in the recipe; the first is the base width of the
        transfer, unless the recipe has one."""
        steps: int = Field(10, ge=0)
        """Updates before the scales are measured, all at the peak rate."""
        lr: float | None = Field(None, gt=0)
        """Peak rate at the base width; null: that of the recipe."""

        @field_validator("widths")
        @classmethod
        def _widths_differ(cls, widths):
            if len(set(widths)) < len(widths):
                raise ValueError("names a width twice; give each width once")
            return widths

    def measure(self, run: Run) -> dict[str, Any]:
        c, recipe = self.config, run.recipe
        base = recipe.network.base_width or c.widths[0]
        rate = c.lr or recipe.optimiser.lr
        plain = ["training.compile=false", "budget=1 steps", f"optimiser.lr={rate!r}"]
        recipe = changed(recipe, plain)
        recipes = {  # all of them before one is trained: each may be refused
            how: {width: at_width(recipe, width, of) for width in c.widths}
            for how, of in (("transferred", base), ("untransferred", None))
        }
        scales: dict[str, dict[int, dict[str, float]]] = {how: {} for how in recipes}
        for how, width in self.each([(how, width) for how in recipes for width in c.widths]):
            scales[how][width] = self.scales(recipes[how][width], run)
        record: dict[str, Any] = {"base_width": base, "lr": rate}
        for how, by_width in scales.items():
            ratios = spread(by_width)
            record[f"{how}_residual_ratio"] = max(ratio for name, ratio in ratios.items() if name != LOGITS)
            record[f"{how}_logits_ratio"] = ratios[LOGITS]
        return record | {"scales": {how: [*by_width.values()] for how, by_width in scales.items()}}

    def scales(self, recipe: Recipe, run: Run) -> dict[str, float]:
        """Coordinates of the network of `recipe` after `steps` updates. Raises: NotFinite where it has none."""
        other, found = Run(recipe, run.corpus, steps=max(1, self.config.steps)), {}
        other.schedule = lambda step: 1.0
        with contextlib.suppress(NotFinite):  # which names options of a run
            for step in range(self.config.steps):
                take_step(other, step)
            found = coordinates(other, self.config.steps)
        if not found or not all(map(math.isfinite, found.values())):
            raise NotFinite(
                f"analysis.lr = {recipe.optimiser.lr}: at width {recipe.network.width}, base width "
                f"{recipe.network.base_width}, numbers after {counted(self.config.steps, 'steps')} are not finite; try "
                "a lower one"
            )
        return found

    def draw(self, record: dict[str, Any], axes: Any) -> None:
        widths = record["options"]["widths"]
        for colour, (how, scales) in enumerate(record["scales"].items()):
            for name in scales[0]:
                style = {"linestyle": "--"} if name == LOGITS else {"alpha": 0.6}
                axes.plot(widths, [by[name] for by in scales], f"C{colour}", marker="o", markersize=3, **style)
            axes.plot([], [], f"C{colour}", label=f"{how}: {record[f'{how}_residual_ratio']:.2f} between widths")
        axes.plot([], [], "0.5", linestyle="--", label="logits")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(widths, widths)
        axes.set_xlabel("width")
        axes.set_ylabel(f"root mean square after {record['options']['steps']} steps, a line for each block")
        axes.legend(frameon=False)
