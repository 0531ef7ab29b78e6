"""Where chunk values live between their uses, and how many bytes that is.

A value ``(name, chunk)`` is put, and stays on the compute device until it is saved to a tier. From
there ``prefetch`` brings it back ahead of its use and ``release`` gives its device copy up again. A
value that ``get`` finds only in its tier is brought back then, and that wait is counted. Tiers:

- ``device``: the compute device's memory;
- ``host``: main memory, pinned for a CUDA device. On a CPU device main memory *is* the device's
  memory, so such a value is kept as it is, without a copy;
- ``disk``: a file, see ``disk``. Worker threads read and write it.

Contract: what ``get`` returns equals what was put, whatever its strides or offset were. A value
that is a view of a larger tensor is copied, so that it does not keep the larger one alive and its
bytes are counted once. Nothing is freed or overwritten while a copy of it is in flight.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import FpdtError
from .buffers import Form, form_of
from .lanes import LaneTimes, Record
from .tiers import Copy, DiskTier, HostTier, Stored, Tier

Key = tuple[str, int]
TIERS = ("device", "host", "disk")
# Bytes that may wait to be written at a time; who saves more waits for the oldest.
MAX_UNWRITTEN = 64 << 20


def per_tier() -> dict[str, int]:
    return dict.fromkeys(TIERS, 0)


@dataclass(kw_only=True, slots=True)
class StoreCounters:
    """Bytes by tier: held now and at most, saved there in total, and copied there and back.

    A value is held by its tier, and by the device too while a copy of it is there. ``times`` are
    the seconds of copies in worker threads, and those that the compute waited for them.
    """

    held_bytes: dict[str, int] = field(default_factory=per_tier)
    peak_bytes: dict[str, int] = field(default_factory=per_tier)
    put_bytes: dict[str, int] = field(default_factory=per_tier)
    written_bytes: dict[str, int] = field(default_factory=per_tier)
    read_bytes: dict[str, int] = field(default_factory=per_tier)
    times: LaneTimes = field(default_factory=LaneTimes)

    def hold(self, tier: str, num_bytes: int) -> None:
        self.held_bytes[tier] += num_bytes
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.held_bytes[tier])


@dataclass(slots=True, eq=False)
class _Entry:
    """``tensor``: the device copy. ``stored``: the copy in ``tier``, which is older than the device
    copy where ``dirty``."""

    form: Form
    num_bytes: int
    device: torch.device
    tensor: Tensor | None
    tier: str = "device"
    stored: Stored | None = None
    dirty: bool = False
    writing: Copy | None = None
    reading: Copy | None = None

    @property
    def on_device(self) -> bool:
        """Whether the device has a copy, or memory for one that is on its way."""
        return self.tensor is not None or self.reading is not None


def compact(value: Tensor) -> Tensor:
    """``value``, copied if it shares a larger storage."""
    used = value.numel() * value.element_size()
    if value.untyped_storage().nbytes() > used:
        return value.clone(memory_format=torch.preserve_format)
    return value


def ignore(lane: str, label: str, start: float, end: float) -> None:
    """Record nothing."""


class ValueStore:
    """The chunk values of one step. ``directory`` is where the disk tier's file goes."""

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        directory: str | None = None,
        record: Record = ignore,
    ) -> None:
        self.entries: dict[Key, _Entry] = {}
        self.counters = StoreCounters()
        self.unwritten: list[Copy] = []
        self.closed = False
        self.tiers: dict[str, Tier] = {
            "disk": DiskTier(directory, self.counters.times, record)
        }
        if device is not None and device.type == "cuda":
            self.tiers["host"] = HostTier()
        # Files and threads do not outlive the step, however it ends.
        self.finalizer = weakref.finalize(self, close_all, [*self.tiers.values()])

    def __contains__(self, key: Key) -> bool:
        return key in self.entries

    def reserve(self, tier: str, num_bytes: int) -> None:
        """Make sure that a tier has room for so many bytes in all."""
        if tier in self.tiers and num_bytes:
            self.tiers[tier].reserve(num_bytes)

    def put(self, key: Key, value: Tensor, tier: str = "device") -> None:
        """Keep ``value`` under ``key``, in ``tier``; a value put twice replaces the first."""
        if self.closed:
            raise FpdtError("this step has ended or failed: its values are gone")
        if key in self.entries:
            self.drop(key)
        value = compact(value.detach())
        num_bytes = value.untyped_storage().nbytes()
        self.entries[key] = _Entry(form_of(value), num_bytes, value.device, value)
        self.counters.hold("device", num_bytes)
        self.counters.put_bytes["device"] += num_bytes
        self.save(key, tier)

    def save(self, key: Key, tier: str) -> None:
        """Move a value to ``tier``. Its device copy is given up as soon as it has been written."""
        entry, counters = self.entries[key], self.counters
        if tier not in self.tiers:
            if entry.tier != tier and not entry.stored:
                counters.hold(entry.tier, -entry.num_bytes)
                counters.hold(tier, entry.num_bytes)
                counters.put_bytes[tier] += entry.num_bytes
                entry.tier = tier
            return
        if entry.stored is None:
            if entry.tier != "device":  # main memory, so far
                self.save(key, "device")
            place = self.tiers[tier].place(entry.num_bytes)
            entry.tier, entry.dirty = tier, True
            entry.stored = Stored(place, entry.form, entry.num_bytes, entry.device)
            counters.hold(tier, entry.num_bytes)
            counters.put_bytes[tier] += entry.num_bytes
        if entry.dirty:
            self.write(key, entry)
        self.release(key)

    def write(self, key: Key, entry: _Entry) -> None:
        assert entry.tensor is not None and entry.stored is not None
        waiting = [x for x in self.unwritten if not x.done]
        while sum(x.num_bytes for x in waiting) + entry.num_bytes > MAX_UNWRITTEN:
            if not waiting:
                break
            waiting.pop(0).wait()
        tier = self.tiers[entry.tier]
        entry.writing = tier.write(label_of(key), entry.tensor, entry.stored.place)
        self.unwritten = [*waiting, entry.writing]
        self.counters.written_bytes[entry.tier] += entry.num_bytes
        entry.dirty = False

    def release(self, key: Key) -> None:
        """Give up the device copy of a value that is in a tier as it is."""
        entry = self.entries[key]
        if entry.stored is None or entry.dirty:
            return
        if entry.on_device:
            self.counters.hold("device", -entry.num_bytes)
        entry.tensor = entry.reading = None

    def prefetch(self, key: Key) -> None:
        """Start bringing a value back to the device."""
        entry = self.entries[key]
        if entry.on_device:
            return
        self.counters.hold("device", entry.num_bytes)
        assert entry.stored is not None and entry.writing is not None
        still = entry.writing.held
        if isinstance(still, Tensor) and still.device == entry.device:
            entry.tensor = still  # not written yet: the device copy is still there
            return
        tier = self.tiers[entry.tier]
        entry.reading = tier.read(label_of(key), entry.stored, entry.writing)
        self.counters.read_bytes[entry.tier] += entry.num_bytes

    def get(self, key: Key) -> Tensor:
        """The value on its compute device; waits for a copy that is on its way. Not to be written
        to, see :meth:`update`."""
        entry = self.entries[key]
        if entry.tensor is None:
            self.prefetch(key)
        if entry.tensor is None:
            assert entry.reading is not None
            entry.tensor = entry.reading.wait()
            entry.reading = None
        assert entry.tensor is not None
        return entry.tensor

    def update(self, key: Key) -> Tensor:
        """The value, to be changed in place."""
        value, entry = self.get(key), self.entries[key]
        if entry.stored is not None:
            assert entry.writing is not None
            if not entry.writing.done:
                entry.writing.wait()
            entry.dirty = True
        return value

    def pop(self, key: Key) -> Tensor | None:
        """The value, given away; None if there is none."""
        if key not in self.entries:
            return None
        value = self.get(key)
        self.drop(key)
        return value

    def drop(self, key: Key) -> None:
        """Forget a value."""
        entry = self.entries.pop(key)
        if entry.stored is None:
            self.counters.hold(entry.tier, -entry.num_bytes)
            return
        if entry.on_device:
            self.counters.hold("device", -entry.num_bytes)
        self.counters.hold(entry.tier, -entry.num_bytes)
        self.tiers[entry.tier].free(entry.stored.place)

    def clear(self) -> None:
        for key in list(self.entries):
            self.drop(key)

    def close(self) -> None:
        """Forget all values; remove files and end threads. Nothing can be put afterwards."""
        if not self.closed:
            self.closed = True
            self.clear()
            self.finalizer()


def label_of(key: Key) -> str:
    return f"{key[0]}[{key[1]}]"


def close_all(tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        tier.close()
