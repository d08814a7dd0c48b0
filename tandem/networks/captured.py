"""A session whose steps are one CUDA graph: the host launches a whole step at once, not kernel by kernel.

    session = CapturedSession(network.session(rows), capacity=4096)
    logits = session.prefill(prompts)           # as ever
    logits = session.step(logits.argmax(-1))    # the first one captures, all others are replayed

A graph repeats the same kernels on the same memory. So caches are moved to memory that stays in place (`fix`). The
column that a step reads and the spans are numbers on the device, which the host writes before each replay (`ready`).
The number of keys changes no kernel: the decoding kernel divides whatever keys the spans cover.

A step then takes the device's time alone. For a small network that is less than the host needs to launch the kernels.
After `network.compile()`, a step runs the compiled blocks, in fewer kernels.
Kept: `capacity` entries of each cache that has no window, from the end of the prompt on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.networks.network import Ids
from tandem.nn.attention import Plan
from tandem.nn.cache import Cache, FixedCache

WARM_UPS = 3


class FixedSteps:
    """A session that can be fixed: it counts its `columns`, and `_fixed_plan` says what the newest of them reads.

    A step of a fixed session has a host part, `ready`, and a device part, `step`, which a graph can capture.
    """

    clock: Tensor | None = None
    """In a fixed session: the column that a step reads, on the device."""
    state: tuple[Tensor, ...] = ()
    """In a fixed session: what a step changes, except cache entries, which a repeated step only overwrites."""
    columns: int
    caches: list[Any]
    plan: Any

    def ready(self) -> None:
        """The host part of the next step of a fixed session: which column it reads, and through which spans."""
        assert self.clock is not None
        self.clock.fill_(self.columns)
        self.columns += 1
        fresh = self._fixed_plan()
        if self.plan is None:
            self.plan = fresh
        for plan, new in zip(self._plans(self.plan), self._plans(fresh), strict=True):
            plan.fused.take_over(new.fused)

    def _stand_still(self, capacity: int) -> None:
        """Moves the caches, which hold all columns read so far, to memory that never moves."""
        self.clock = torch.zeros(1, dtype=torch.long, device=self.caches[0].kv.device)
        self.caches = self._fixed(self.caches, capacity)
        self.plan = None

    def _fixed(self, caches: list[Cache], capacity: int) -> list[Any]:
        assert self.clock is not None
        return [FixedCache.of(cache, self.columns, capacity, self.clock) for cache in caches]

    def _fixed_plan(self) -> Any:
        raise NotImplementedError

    def _plans(self, plan: Any) -> tuple[Plan, ...]:
        return (plan,)


class CapturedSession:
    """Reads one token a row at a time; cannot fork, since a graph is bound to its memory.

    Args:
        session: a new session of a network whose session can be fixed.
        capacity: the most tokens that a row can have, prompt included.
    Raises: ValueError where there is no CUDA device, or the session cannot be fixed, with the reason.
    """

    def __init__(self, session: Any, capacity: int):
        if not torch.cuda.is_available():
            raise ValueError(
                "a step is captured on CUDA only: on a CPU nothing is launched that a graph could save; "
                "use the session as it is"
            )
        if not hasattr(session, "fix"):
            raise ValueError(f"{type(session).__name__} has no fixed form: its steps cannot be captured")
        self.session, self.capacity = session, capacity
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Ids]) -> Tensor:
        """As in any session, with prompts of up to `capacity` tokens."""
        longest = max(map(len, prompts))
        if longest > self.capacity:
            raise ValueError(f"a prompt of {longest} tokens in a session of {self.capacity}; give it more capacity")
        logits = self.session.prefill(prompts)
        self.session.fix(self.capacity)
        self.rows, self.taken, self.device = len(prompts), longest, logits.device
        return logits

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Appends tokens (B,); logits (B, V) of what follows."""
        if tokens.shape != (self.rows,):
            raise ValueError(f"a captured step takes tokens of shape ({self.rows},), not {tuple(tokens.shape)}")
        if self.taken >= self.capacity:
            raise ValueError(f"all {self.capacity} places of this session are taken; give it more capacity")
        self.taken += 1
        with torch.cuda.device(self.device):  # streams and graphs are those of the current device
            self.session.ready()
            if self.graph is None:
                self._capture(tokens.to(self.device))
            assert self.graph is not None
            self.tokens.copy_(tokens)
            self.graph.replay()
            return self.logits.clone()

    @property
    def bytes(self) -> int:
        return self.session.bytes

    def _capture(self, tokens: Tensor) -> None:
        self.tokens = tokens.clone()
        before = [x.clone() for x in self.session.state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and libraries set up outside the graph
            for _ in range(WARM_UPS):
                self.session.step(self.tokens)
        torch.cuda.current_stream().wait_stream(stream)
        for x, was in zip(self.session.state, before, strict=True):
            x.copy_(was)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self.session.step(self.tokens)
        self.graph = graph
