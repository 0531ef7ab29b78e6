"""The ranks that share a sequence, and every collective between them.

In: a process group. Out: sums, gathers and all-to-alls over it, each with a name that its error
carries, counted and timed. One rank needs no group; its collectives do nothing.

Every collective is called in the same order on all ranks: what decides the order (the program, the
lengths) is compared at the start of a step, before the first exchange, see ``agreement``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import FpdtError


@dataclass(kw_only=True, slots=True)
class ExchangeCounters:
    """What moved between ranks. Bytes are those sent to other ranks.

    ``exposed_seconds`` is time spent waiting for asynchronous exchanges, ``in_flight_seconds`` from
    their issue to the end of the wait; ``blocking_seconds`` the time of sums and gathers.
    """

    exchanges: int = 0
    sent_bytes: dict[str, int] = field(default_factory=dict)
    exposed_seconds: float = 0.0
    in_flight_seconds: float = 0.0
    blocking_seconds: float = 0.0

    def sent(self, kind: str, num_bytes: int) -> None:
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A span of a timeline: seconds of ``time.perf_counter``."""

    lane: str
    label: str
    start: float
    end: float


@dataclass(slots=True)
class Exchange:
    """An all-to-all on its way. ``received`` may be read after ``wait``."""

    ranks: Ranks
    label: str
    received: Tensor
    sent: Tensor  # kept alive until the exchange is done
    work: Any
    issued: float

    def wait(self) -> Tensor:
        start = time.perf_counter()
        self.ranks.guarded(self.label, self.work.wait)
        end = time.perf_counter()
        counters = self.ranks.counters
        counters.exposed_seconds += end - start
        counters.in_flight_seconds += end - self.issued
        self.ranks.record("exchange", self.label, self.issued, end)
        self.ranks.record("wait", self.label, start, end)
        return self.received


class Ranks:
    """This process' place among the ranks that share a sequence."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.counters = ExchangeCounters()
        self.events: list[Event] | None = None  # recorded where it is a list
        self.weights_compared: dict[int, bool] = {}  # by program

    def record(self, lane: str, label: str, start: float, end: float) -> None:
        if self.events is not None:
            self.events.append(Event(lane=lane, label=label, start=start, end=end))

    def guarded(self, label: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a collective; its error says which one it was."""
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise FpdtError(
                f"{label}: rank {self.rank} of {self.size} got no answer from the others; one of "
                f"them failed or left ({error})"
            ) from error

    def blocking(self, label: str, call: Any, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        self.guarded(label, call, *args, group=self.group, **kwargs)
        end = time.perf_counter()
        self.counters.blocking_seconds += end - start
        self.record("collective", label, start, end)

    def all_to_all(
        self,
        label: str,
        kind: str,
        send: Tensor,
        sizes: Sequence[int],
        back: Sequence[int],
    ) -> Exchange:
        """Issue an exchange of bytes: ``sizes[r]`` of ``send`` to rank r, ``back[r]`` from it."""
        received = send.new_empty(sum(back))
        self.counters.exchanges += 1
        self.counters.sent(kind, sum(sizes) - sizes[self.rank])
        issued = time.perf_counter()
        work = self.guarded(
            label,
            dist.all_to_all_single,
            received,
            send,
            list(back),
            list(sizes),
            group=self.group,
            async_op=True,
        )
        return Exchange(self, label, received, send, work, issued)

    def sum(self, label: str, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            self.counters.sent("sum", value.nbytes)
            self.blocking(label, dist.all_reduce, value)
        return value

    def first(self, label: str, value: Tensor) -> Tensor:
        """Rank 0's value, in place."""
        if self.size > 1:
            source = dist.get_global_rank(self.group, 0)
            self.blocking(label, dist.broadcast, value, source)
        return value

    def gather(self, label: str, value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """All ranks' flat ``value``; ``sizes[r]`` elements are rank r's."""
        if self.size == 1:
            return [value]
        longest = max(sizes)
        padded = value.new_zeros(longest)
        padded[: value.numel()] = value.reshape(-1)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self.counters.sent("gather", value.nbytes * (self.size - 1))
        self.blocking(label, dist.all_gather, found, padded)
        return [x[:n] for x, n in zip(found, sizes, strict=True)]

    def sum_gradients(
        self,
        label: str,
        sums: dict[str, Tensor],
        like: Mapping[str, tuple[Any, torch.dtype]],
    ) -> None:
        """Sum gradients over ranks, in place; ``like`` gives (shape, dtype) of all there could be.

        A gradient that no rank has stays missing; one that some have counts as zero on the others.
        """
        if self.size == 1 or not like:
            return
        device = next((x.device for x in sums.values()), self.device)
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, (_, dtype) in like.items():
            by_dtype.setdefault(dtype, []).append(name)
        for dtype, names in by_dtype.items():
            sizes = [like[name][0].numel() for name in names]
            flat = torch.zeros(sum(sizes) + len(names), dtype=dtype, device=device)
            parts = flat.split([*sizes, len(names)])
            for i, name in enumerate(names):
                if name in sums:
                    parts[i].copy_(sums[name].reshape(-1))
                    parts[-1][i] = 1
            self.sum(label, flat)
            present = parts[-1].tolist()
            for i, name in enumerate(names):
                if present[i]:
                    sums[name] = parts[i].view(like[name][0])

    @property
    def device(self) -> torch.device:
        backend = dist.get_backend(self.group) if self.group is not None else "gloo"
        if backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
