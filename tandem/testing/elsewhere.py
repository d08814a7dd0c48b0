"""A make-believe device, on which a network can be tried without owning another than the CPU.

    with elsewhere() as device:
        network.to(device)          # its tensors say that they are on `device`, and hold their numbers on the host
        network.score(batch)        # RuntimeError: tensors of two devices; batch.to(device) is what it needs

Where CUDA refuses to mix tensors of two devices, so does this. As there, tensors without dimensions and indices may
be read from the host. It shows no more than that: kernels and their speed need the real device.

The device takes PyTorch's place for backends of others (PrivateUse1) for the rest of the process, and saving to disk
would then ask for its streams. So `forked` runs a function in a process of its own.
"""

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten: Any = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


def forked(function: Callable[..., object], *arguments: Any) -> None:
    """Runs the function in a fork of this process, on one thread. Raises: AssertionError with what it raised."""
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_told, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        raised = receiver.recv()
    except EOFError:
        raised = "the process ended"
    process.join()
    assert not raised, raised


def _told(sender: Connection, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        function(*arguments)
    except BaseException:
        sender.send(traceback.format_exc())
    else:
        sender.send("")


@contextlib.contextmanager
def elsewhere() -> Iterator[torch.device]:
    """The device; tensors are made on it and moved to it within this context."""
    device, future = _registered(), torch.__future__
    overwrites = future.get_overwrite_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion(True)  # a parameter of the host cannot become one of these
    try:
        # Threads of autograd know real devices alone
        with _Mode(), _Lists(), torch.autograd.set_multithreading_enabled(False):
            yield device
    finally:
        future.set_overwrite_module_params_on_conversion(overwrites)


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


@cache
def _registered() -> torch.device:
    _setup_privateuseone_for_python_backend("elsewhere", _Backend())
    return torch.device("elsewhere", 0)


class _Elsewhere(Tensor):
    """A tensor of the device; `here` has its numbers."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor):
        told = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        with torch.inference_mode(here.is_inference()):
            made = Tensor._make_wrapper_subclass(cls, here.size(), **told, device=_registered())
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})

    def tolist(self):
        return self.here.tolist()

    def __repr__(self) -> str:
        return f"elsewhere: {self.here!r}"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Lists(TorchFunctionMode):
    """Moves what is made from lists: PyTorch makes it on a device below the dispatch that `_Mode` sees."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if function in (torch.tensor, torch.as_tensor) else None
        made = function(*args, **kwargs)
        return made if device is None else made.to(device)


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = _tensors((*args, *kwargs.values()))
    there = [x for x in tensors if isinstance(x, _Elsewhere)]
    asked = kwargs.get("device")
    is_there = bool(there) if asked is None else torch.device(asked) == _registered()
    if not there and not is_there:
        return function(*args, **kwargs)
    written = args[0] if function._schema.name.endswith("_") else kwargs.get("out")
    checked = _tensors((args[0], *args[2:])) if function in INDEXING else tensors
    host = [x for x in checked if not isinstance(x, _Elsewhere)]
    if there and function not in COPIES and any(x.ndim or x is written for x in host):
        shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        raise RuntimeError(f"{function}: tensors of two devices: {shapes}")
    if function is aten._fused_sdp_choice.default:
        return 0  # plain products: the fused kernels are those of real devices
    found = function(*_each(_here, args), **{key: _each(_here, x) for key, x in kwargs.items()})
    if not is_there:
        return found
    moved = _each(lambda x: _Elsewhere(x) if isinstance(x, Tensor) else x, found)
    return return_and_correct_aliasing(function, args, kwargs, moved) if there else moved


def _tensors(x: Any) -> list[Tensor]:
    # An operator's arguments and results nest in lists and tuples alone; PyTorch's pytree takes twice the time.
    if isinstance(x, (list, tuple)):
        return [tensor for y in x for tensor in _tensors(y)]
    return [x] if isinstance(x, Tensor) else []


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    return type(x)(_each(change, y) for y in x) if isinstance(x, (list, tuple)) else change(x)


def _here(x: Any) -> Any:
    return x.here if isinstance(x, _Elsewhere) else torch.device("cpu") if isinstance(x, torch.device) else x
