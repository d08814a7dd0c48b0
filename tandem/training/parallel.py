"""Many processes train as one: the same batches, the same losses, one of them writes.

    torchrun --nproc-per-node 2 -m -- tandem train RECIPE      (the -- keeps torchrun from reading --run as its own)

    rows of a step    | rank 0, micro-batch 0 | rank 0, micro-batch 1 | rank 1, micro-batch 0 | rank 1, micro-batch 1 |
    targets           counted, added over ranks before any backward: one small message a step, stop signals with it
    losses            each a share of the step's mean, so gradients ADD over ranks (both libraries divide unless told)

`ddp` keeps weights and optimiser whole in every process; `fsdp` (FSDP2) shards them over the processes, gathers a
block when it is computed, and scatters its gradient. Both wrap one module whose forward is the objective's loss, so
that their hooks surround everything that an objective does with a network.

A process that dies ends the others: torchrun stops them; without it gloo fails at once (but for once in a thousand
kills, when it sends just then), NCCL after TIMEOUT.
Cost for N processes and P parameters: ddp sends 2 P gradients a step; fsdp 2 P weights for every micro-batch and
P gradients, all float32. What is written and printed comes from rank 0.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tandem import machine
from tandem.networks.network import Network
from tandem.recipe import UserError, counted
from tandem.training.device import Choice, Training
from tandem.training.health import SIGNALS

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)
"""How long a process waits for another one that is gone, or that is writing or preparing something."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "imed out")
"""What gloo, NCCL and the store say where another process is gone, or has not come for TIMEOUT."""

STATES = 16
"""Bytes per parameter in training: its weight, its gradient and AdamW's two means, float32. Muon has one mean."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, seen from one: its rank, how many there are, its rank on its machine.

    With one process every method is trivial, and none communicates.
    """

    rank: int = 0
    count: int = 1
    local: int = 0

    @property
    def is_first(self) -> bool:
        """True in the process that writes and prints."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """A UserError or OSError in one process is raised in all, also in those that wait in a `gather` inside the
        block, and printed by the first."""
        error: Exception | None = None
        try:
            yield
        except (UserError, OSError) as raised:
            if getattr(raised, "raised_in_all_of", None) == self:
                raise
            error = raised
        self._exchange(None, error)

    def gather(self, mine: T) -> list[T]:
        """The values of all processes, by rank. Raises: the error of a process that has failed in `together`."""
        return self._exchange(mine, None)

    def _exchange(self, mine: T, error: Exception | None) -> list[T]:
        found: list[Any] = [(mine, error)] * self.count
        if self.count > 1:
            dist.all_gather_object(found, (mine, error))
        if failed := next((e for _, e in found if e is not None), None):
            failed.is_told_elsewhere, failed.raised_in_all_of = not self.is_first, self
            raise failed
        return [value for value, _ in found]

    def first(self, action: Callable[[], T]) -> T:
        """The result of `action`, which only the first process runs."""
        value: Any = None
        with self.together():
            if self.is_first:
                value = action()
        return self.gather(value)[0]

    def require_alike(self, mine: Mapping[str, Any]) -> None:
        """Raises: UserError naming the processes that differ in what each has chosen or found by itself."""
        found, lines = self.gather(mine), []
        for key in dict.fromkeys(key for theirs in found for key in theirs):
            where: dict[str, list[int]] = {}
            for rank, theirs in enumerate(found):
                where.setdefault(f"{theirs.get(key, 'absent')} in processes ", []).append(rank)
            if len(where) > 1:
                lines.append(f"  {key}: " + ", ".join(f"{value}{ranks}" for value, ranks in where.items()))
        if lines:
            cure = "Give all the same recipe, texts and packages; write in the recipe what no machine is to choose"
            raise UserError("\n".join([f"the processes of this run differ. {cure}", *lines]))

    def total_counts(self, counts: Mapping[str, int], asked: int | None) -> tuple[dict[str, int], int | None]:
        """Counts added over all processes, and a signal, if any, that asked one to stop."""
        if self.count == 1:
            return dict(counts), asked
        total = torch.tensor([*counts.values(), *(asked == number for number in SIGNALS)])
        dist.all_reduce(total)
        signals = total[len(counts) :].tolist()
        asked = next((int(number) for number, times in zip(SIGNALS, signals, strict=True) if times), None)
        return dict(zip(counts, total.tolist(), strict=False)), asked

    def total_sums(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars added over all processes, in float64."""
        if self.count == 1:
            return dict(sums)
        total = torch.stack([value.detach().double() for value in sums.values()])
        dist.all_reduce(total)
        return dict(zip(sums, total.unbind(), strict=True))

    def largest(self, value: float) -> float:
        """The maximum over all processes."""
        return max(self.gather(value))


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that torchrun started, as one group while the block runs; or this one alone."""
    rank, count, local = (int(os.environ.get(key, "0")) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if count < 2:
        yield ALONE
        return
    cuda = torch.cuda.is_available() and local < torch.cuda.device_count()
    if cuda:
        torch.cuda.set_device(local)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
        yield Ranks(rank, count, local)
    except RuntimeError as error:
        if not any(words in str(error) for words in LOST):
            raise
        raise UserError(
            f"process {rank} of {count} has lost another one ({str(error).splitlines()[0]}): see what that said; "
            "the same command goes on from the last checkpoint"
        ) from error
    # Only without an error: after one, others may wait for this process, which must not wait for them.
    dist.destroy_process_group()


def choose_parallel(config: Training.Config, ranks: Ranks, device: torch.device, parameters: int) -> Choice[str]:
    """`ddp` as long as weights, gradients and optimiser take at most a quarter of the memory of a process."""
    if ranks.count == 1:
        return Choice("none", "one process")
    if config.parallel != "auto":
        return Choice(config.parallel, "asked for")
    share, words = share_of_states(ranks, device, parameters)
    if 4 * share <= 1:
        return Choice("ddp", f"{words}: each holds them whole")
    return Choice("fsdp", f"{words}: each holds its part")


def share_of_states(ranks: Ranks, device: torch.device, parameters: int) -> tuple[float, str]:
    """What weights, gradients and optimiser take of the memory of a process that holds them whole; and in words."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = machine.memory() // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.count))
    states = STATES * parameters
    words = f"weights, gradients and optimiser take up to {states / 2**30:.2f} of {memory / 2**30:.2f} GiB a process"
    return states / memory, words


class StepLoss(nn.Module):
    """An objective and its network as one module, for `wrapped`."""

    def __init__(self, network: Network, objective: Any):
        super().__init__()
        self.network, self.objective = network, objective

    def forward(self, batch: Any, counts: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.objective.loss(self.network, batch, counts)


def wrapped(loss: StepLoss, how: str) -> nn.Module:
    """`loss` with gradients added over processes; fsdp shards the parameters of its network in place."""
    if how == "ddp":
        model = DistributedDataParallel(loss, gradient_as_bucket_view=True)
        model.register_comm_hook(None, _add)
        return model
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        mesh = init_device_mesh(next(loss.parameters()).device.type, (dist.get_world_size(),))
        for block in loss.network.shards:
            fully_shard(block, mesh=mesh)
        fully_shard(loss, mesh=mesh)
        for module in loss.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo supports no other
    return loss


def _add(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: the sum of gradients, which DDP would divide by the number of processes."""
    sent = dist.all_reduce(bucket.buffer(), async_op=True)
    assert sent is not None
    return sent.get_future().then(lambda done: done.value()[0])


def adding(model: nn.Module, is_last: bool) -> AbstractContextManager:
    """Context of a micro-batch: only the last of a step sends gradients."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered; any other tensor as it is."""
    return getattr(tensor, "full_tensor", lambda: tensor)()  # DTensor's; its module takes a second to import


def cut_like(value: Tensor, tensor: Any) -> Tensor:
    """A tensor that every process has whole, sharded like `tensor`; as it is where `tensor` is not sharded."""
    if not hasattr(tensor, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)  # None: sends nothing


def require_divisible(rows: int, micro_batches: int, ranks: Ranks, divisor: int = 1) -> None:
    """Raises: UserError where the rows of a step, or rows / divisor in some phase, cannot be divided evenly."""
    share = micro_batches * divisor
    parts = ranks.count * share
    if rows % parts:
        fewer = f" x {divisor}, by which a phase divides its rows" if divisor > 1 else ""
        processes = f", or start {counted(math.gcd(rows // share, ranks.count), 'processes')}" * (rows % share == 0)
        raise UserError(
            f"batch.rows = {rows}: must be a multiple of {parts} = {counted(ranks.count, 'processes')} x "
            f"batch.micro_batches {micro_batches}{fewer}; write batch.rows={math.ceil(rows / parts) * parts}{processes}"
        )
