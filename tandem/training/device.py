"""What the machine offers, probed in one place; each automatic choice has a reason."""

import os
import shutil
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

import torch

from tandem.recipe import Settings, UserError, register

T = TypeVar("T")


class Choice(NamedTuple, Generic[T]):
    """A value, and why it was chosen."""

    value: T
    reason: str


@register("training")
class Training:
    """How steps are executed; none of it changes what is learned beyond rounding and the masks drawn for dropout."""

    class Config(Settings):
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """auto: CUDA where available."""
        precision: Literal["auto", "float32", "bfloat16"] = "auto"
        """Of matrix products; weights, softmax and losses stay float32. auto: bfloat16 where the device has it."""
        compile: bool | Literal["auto"] = "auto"
        """Compile every block. auto: where there is a compiler and the run is long enough to earn it back."""
        recompute: bool = False
        """Keep only the inputs of blocks and recompute the rest in the backward: less memory, a third more time."""
        parallel: Literal["auto", "ddp", "fsdp"] = "auto"
        """Under torchrun: weights and optimiser whole in every process (ddp), or a part in each (fsdp).
        auto: whole as long as they are small. Ignored with one process."""


COMPILE_AFTER_STEPS = 300
COMPILE_AFTER_SECONDS = 120
"""On a CPU, where compiling takes 12 to 24 s and saves a twentieth to a third of a step."""
CPU_FLOPS = 1e11
"""What two cores do in a second, roughly."""


def choose_device(config: Training.Config, local: int | None = None) -> Choice[torch.device]:
    """`local`: rank of this process on this machine, where there are several; each takes its own device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("training.device = cuda: PyTorch finds no CUDA device; write auto or cpu")
    if config.device == "cpu" or not torch.cuda.is_available():
        return Choice(torch.device("cpu"), "asked for" if config.device == "cpu" else "no CUDA device")
    if local is None:
        return Choice(torch.device("cuda"), torch.cuda.get_device_name())
    if local >= torch.cuda.device_count():
        raise UserError(
            f"process {local} of this machine finds no CUDA device of its own, there being "
            f"{torch.cuda.device_count()}: start as many (torchrun --nproc-per-node), or write training.device=cpu"
        )
    return Choice(torch.device("cuda", local), torch.cuda.get_device_name(local))


def choose_precision(config: Training.Config, device: torch.device) -> Choice[torch.dtype]:
    """Precision of matrix products on this device, with the reason."""
    if config.precision != "auto":
        return Choice(getattr(torch, config.precision), "asked for")
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has = bool({"avx512_bf16", "amx_bf16", "bf16"} & cpu_flags())
    return Choice(torch.bfloat16 if has else torch.float32, f"the device has {'' if has else 'no '}bfloat16")


def choose_compile(config: Training.Config, device: torch.device, steps: int | None, seconds: float) -> Choice[bool]:
    """`steps` is None where the budget is time; `seconds`: about what the run takes on a CPU, not compiled.

    Raises: UserError where compiling is asked for, and what it needs is not installed.
    """
    if config.compile is False:
        return Choice(False, "asked for")
    # What inductor looks for, and Triton on CUDA.
    (key, *names) = ("CXX", "g++") if device.type == "cpu" else ("CC", "gcc", "clang")
    missing = ""
    if not any(map(shutil.which, [os.environ[key]] if key in os.environ else names)):
        missing = f"no {'C++' if key == 'CXX' else 'C'} compiler; install {names[0]} to compile"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing = "no Python headers; install python3-dev to compile"
    elif device.type == "cpu" and " " in str(torch.__file__):  # its option -L is split there
        missing = (
            "PyTorch's linker cannot read its folder, which has a space in its path; install it elsewhere to compile"
        )
    if missing and config.compile is True:
        raise UserError(f"training.compile = true: {missing}, or write auto")
    if missing:
        return Choice(False, missing)
    if config.compile is True:
        return Choice(True, "asked for")
    if steps is not None and steps < COMPILE_AFTER_STEPS:
        return Choice(False, f"{steps} steps are too few to earn it back")
    if device.type == "cpu" and seconds < COMPILE_AFTER_SECONDS:
        return Choice(False, f"about {seconds:.0f} s of work are too few to earn it back")
    return Choice(True, "the run is long enough to earn it back")


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Context for matrix products in `dtype`; does nothing when that is float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def cpu_flags() -> set[str]:
    """Instruction sets of the processor, as Linux names them."""
    with open("/proc/cpuinfo") as lines:
        return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
