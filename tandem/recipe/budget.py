"""How much a run may spend, in one of four units."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from tandem.recipe.settings import UserError

_UNITS = {  # singular, as written -> unit, how many of it
    **{"token": ("tokens", 1), "flop": ("flops", 1), "second": ("seconds", 1), "step": ("steps", 1)},
    **{"minute": ("seconds", 60), "hour": ("seconds", 3600)},
}
_EXAMPLE = 'write "5e9 tokens" (units: tokens, flops, seconds, minutes, hours, steps)'
LARGEST = 1e30
"""Far beyond any run; products with it are still floats."""


@dataclass(frozen=True)
class Budget:
    """`amount` of `unit`: tokens of text, training FLOPs, seconds of training, or optimisation steps."""

    amount: float
    unit: str

    def __str__(self) -> str:
        return f"{self.amount!r} {self.unit}".replace(".0 ", " ")


def parse_budget(text: str) -> Budget:
    """Read "5e6 tokens". Minutes and hours become seconds. Raises UserError saying what to write instead."""
    number, _, unit = " ".join(text.split()).partition(" ")
    if not unit:
        raise UserError(f"it has no unit; {_EXAMPLE}")
    if unit.lower().removesuffix("s") not in _UNITS:
        raise UserError(f'unknown unit "{unit}"; {_EXAMPLE}')
    unit, size = _UNITS[unit.lower().removesuffix("s")]
    try:
        amount = float(number) * size
    except ValueError:
        raise UserError(f'"{number}" is not a number; {_EXAMPLE}') from None
    if not 0 < amount <= LARGEST:
        raise UserError(f"must be > 0 and at most {LARGEST:g}")
    if unit in ("tokens", "steps") and amount % 1:
        raise UserError(f"{unit} come whole")
    return Budget(amount, unit)


BudgetText = Annotated[str, BeforeValidator(lambda text: str(parse_budget(str(text))))]
"""A budget as an option: read by `parse_budget`, kept as text in its one spelling."""
