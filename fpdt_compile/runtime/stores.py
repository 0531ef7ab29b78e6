"""Where chunk values live between their uses, and how many bytes that is.

A value ``(name, chunk)`` is put into a tier and read back with ``get``. Tiers:

- ``device``: the compute device's memory;
- ``host``: main memory. On a CUDA device values are copied to pinned buffers on a stream of their
  own and copied back by ``prefetch`` ahead of use; on a CPU device main memory *is* the device's
  memory, so a host value is kept as it is, without a copy.

Contract: what ``get`` returns equals what was put, whatever its strides or offset were. A value
that is a view of a larger tensor is copied, so that it does not keep the larger one alive and its
bytes are counted once. Nothing is freed or overwritten while a copy of it is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Key = tuple[str, int]


@dataclass(kw_only=True, slots=True)
class StoreCounters:
    """Bytes: held now and at most, and moved in total, by tier."""

    held_bytes: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})
    peak_bytes: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})
    put_bytes: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0})
    copied_bytes: int = 0


@dataclass(slots=True)
class _Entry:
    tensor: Tensor
    tier: str
    num_bytes: int
    device: torch.device
    copied: torch.cuda.Event | None = None
    loaded: Tensor | None = None
    loaded_event: torch.cuda.Event | None = None


def compact(value: Tensor) -> Tensor:
    """``value``, copied if it shares a larger storage."""
    used = value.numel() * value.element_size()
    if value.untyped_storage().nbytes() > used:
        return value.clone(memory_format=torch.preserve_format)
    return value


class ValueStore:
    """The chunk values of one step."""

    def __init__(self) -> None:
        self.entries: dict[Key, _Entry] = {}
        self.counters = StoreCounters()
        self._stream: torch.cuda.Stream | None = None

    def __contains__(self, key: Key) -> bool:
        return key in self.entries

    def put(self, key: Key, value: Tensor, tier: str = "device") -> None:
        """Keep ``value`` in ``tier`` under ``key``; a value put twice replaces the first."""
        if key in self.entries:
            self.drop(key)
        value = compact(value.detach())
        num_bytes = value.untyped_storage().nbytes()
        entry = _Entry(value, tier, num_bytes, value.device)
        if tier == "host" and value.device.type == "cuda":
            self._copy_out(entry, value)
        counters = self.counters
        counters.put_bytes[tier] += num_bytes
        counters.held_bytes[tier] += num_bytes
        counters.peak_bytes[tier] = max(
            counters.peak_bytes[tier], counters.held_bytes[tier]
        )
        self.entries[key] = entry

    def move(self, key: Key, tier: str) -> None:
        """Move a value to ``tier``."""
        if self.entries[key].tier != tier:
            self.put(key, self.get(key), tier)

    def get(self, key: Key) -> Tensor:
        """The value on its compute device; waits for a copy that is on its way."""
        entry = self.entries[key]
        if entry.copied is None:
            return entry.tensor
        self.prefetch(key)
        assert entry.loaded is not None and entry.loaded_event is not None
        torch.cuda.current_stream(entry.device).wait_event(entry.loaded_event)
        entry.loaded.record_stream(torch.cuda.current_stream(entry.device))
        return entry.loaded

    def prefetch(self, key: Key) -> None:
        """Start bringing a host value back to the device."""
        entry = self.entries[key]
        if entry.copied is None or entry.loaded is not None:
            return
        stream = self._copy_stream(entry.device)
        stream.wait_event(entry.copied)
        with torch.cuda.stream(stream):
            entry.loaded = entry.tensor.to(entry.device, non_blocking=True)
            entry.loaded_event = stream.record_event()
        self.counters.copied_bytes += entry.num_bytes

    def release(self, key: Key) -> None:
        """Give up the device copy of a host value (the value stays in the store)."""
        entry = self.entries[key]
        if entry.copied is not None:
            entry.loaded = entry.loaded_event = None

    def drop(self, key: Key) -> None:
        """Forget a value."""
        entry = self.entries.pop(key)
        if entry.copied is not None:
            entry.copied.synchronize()  # the pinned buffer may not be reused before
        self.counters.held_bytes[entry.tier] -= entry.num_bytes

    def clear(self) -> None:
        for key in list(self.entries):
            self.drop(key)

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _copy_out(self, entry: _Entry, value: Tensor) -> None:
        stream = self._copy_stream(value.device)
        stream.wait_stream(torch.cuda.current_stream(value.device))
        pinned = torch.empty_like(value, device="cpu", pin_memory=True)
        with torch.cuda.stream(stream):
            pinned.copy_(value, non_blocking=True)
        value.record_stream(stream)
        entry.tensor, entry.copied = pinned, stream.record_event()
        self.counters.copied_bytes += entry.num_bytes
