"""The tiers that values are copied to: pinned main memory for a CUDA device, and disk.

A tier copies a value's storage as bytes, so strides and offsets survive. ``write`` gives back where
the copy will be and a copy under way; ``read`` a copy under way, whose ``wait`` is the value on the
compute device. Reads of a place come after its writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .buffers import BufferPool, Form, shaped
from .disk import StepFile
from .lanes import Lane, LaneTimes, Record


class Copy(Protocol):
    """A copy under way. ``held`` is what it reads, None once it is done."""

    num_bytes: int
    held: Any

    @property
    def done(self) -> bool: ...

    def wait(self) -> Any: ...

    def result(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A value's copy in a tier: where it is, and what it takes to see it as the value again."""

    place: Any
    form: Form
    num_bytes: int
    device: torch.device


class Tier(Protocol):
    """Where values can be copied to."""

    def reserve(self, num_bytes: int) -> None:
        """Make sure that so many bytes fit, or raise StoreError."""

    def place(self, num_bytes: int) -> Any:
        """A place for so many bytes."""

    def write(self, label: str, value: Tensor, place: Any) -> Copy:
        """Copy a value's storage to a place."""

    def read(self, label: str, stored: Stored, after: Copy) -> Copy:
        """Bring a value back, once ``after``, its writing, is done."""

    def free(self, place: Any) -> None:
        """Nobody reads the place any more; what is under way is finished first."""

    def close(self) -> None:
        """Give up everything, waiting only for what is being copied now."""


def bytes_of(value: Tensor) -> Tensor:
    """A tensor's storage as bytes."""
    num_bytes = value.untyped_storage().nbytes()
    return shaped(value, (torch.Size([num_bytes]), (1,), torch.uint8))


class DiskTier:
    """A file per step, read and written by a worker thread each.

    A value on a GPU goes through pinned buffers, on a stream of its own.
    """

    def __init__(self, directory: str | None, times: LaneTimes, record: Record) -> None:
        self.directory = directory
        self.file: StepFile | None = None
        self.writer = Lane("offload", times, record)
        self.reader = Lane("reload", times, record)
        self.pool = BufferPool()  # a pool serves one thread
        self.staging = BufferPool(pinned=True)
        self.arriving = BufferPool(pinned=True)
        self.streams: dict[str, torch.cuda.Stream] = {}

    def reserve(self, num_bytes: int) -> None:
        if self.file is None:
            self.file = StepFile(self.directory, num_bytes)
        else:
            self.file.reserve(num_bytes)

    def place(self, num_bytes: int) -> int:
        self.reserve(0)
        assert self.file is not None
        return self.file.take(num_bytes)

    def write(self, label: str, value: Tensor, place: int) -> Copy:
        file = self.file
        assert file is not None
        on_gpu = value.device.type == "cuda"
        ready = (
            torch.cuda.current_stream(value.device).record_event() if on_gpu else None
        )

        def work(held: Tensor) -> None:
            if ready is None:
                file.write(place, held)
                return
            raw = bytes_of(held)
            pinned = self.staging.take(raw.numel())
            with torch.cuda.stream(self.stream("offload", held.device)) as stream:
                stream.wait_event(ready)
                pinned.copy_(raw, non_blocking=True)
            stream.synchronize()
            file.write(place, pinned)

        return self.writer.submit(label, value.untyped_storage().nbytes(), work, value)

    def read(self, label: str, stored: Stored, after: Copy) -> Copy:
        file = self.file
        assert file is not None
        on_gpu = stored.device.type == "cuda"
        pool = self.arriving if on_gpu else self.pool
        buffer = pool.take(stored.num_bytes)

        def work(buffer: Tensor) -> Tensor:
            after.result()
            file.read(stored.place, buffer)
            if on_gpu:
                stream = self.stream("reload", stored.device)
                with torch.cuda.stream(stream):
                    buffer = buffer.to(stored.device, non_blocking=True)
                stream.synchronize()
            return shaped(buffer, stored.form)

        return self.reader.submit(label, stored.num_bytes, work, buffer)

    def stream(self, lane: str, device: torch.device) -> torch.cuda.Stream:
        if lane not in self.streams:
            self.streams[lane] = torch.cuda.Stream(device)
        return self.streams[lane]

    def free(self, place: int) -> None:
        # A later write to the same bytes runs after the writes before it, in the same thread; a
        # read of the old value that is still under way has no reader any more.
        if self.file is not None:
            self.file.give(place)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        for pool in (self.pool, self.staging, self.arriving):
            pool.clear()
        if self.file is not None:
            self.file.close()


@dataclass(slots=True, eq=False)
class StreamCopy:
    """A copy on a CUDA stream. The host does not wait for it: the stream that uses it does."""

    num_bytes: int
    held: Any
    loaded: Tensor
    event: torch.cuda.Event

    @property
    def done(self) -> bool:
        if self.event.query():
            self.held = None
            return True
        return False

    def result(self) -> Tensor:
        return self.loaded

    def wait(self) -> Tensor:
        stream = torch.cuda.current_stream()
        stream.wait_event(self.event)
        if self.loaded.device.type == "cuda":
            self.loaded.record_stream(stream)
        return self.loaded


class HostTier:
    """Pinned buffers of main memory, copied on a stream of its own."""

    def __init__(self) -> None:
        self.pinned = BufferPool(pinned=True)
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def reserve(self, num_bytes: int) -> None:
        """Main memory is taken as it is needed."""

    def place(self, num_bytes: int) -> Tensor:
        return self.pinned.take(num_bytes)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def write(self, label: str, value: Tensor, place: Tensor) -> Copy:
        stream = self.stream(value.device)
        stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(stream):
            place.copy_(bytes_of(value), non_blocking=True)
        value.record_stream(stream)
        return StreamCopy(place.numel(), value, place, stream.record_event())

    def read(self, label: str, stored: Stored, after: Copy) -> Copy:
        stream = self.stream(stored.device)
        with torch.cuda.stream(stream):
            loaded = stored.place.to(stored.device, non_blocking=True)
        value = shaped(loaded, stored.form)
        return StreamCopy(stored.num_bytes, stored.place, value, stream.record_event())

    def free(self, place: Tensor) -> None:
        # Copies from and to it are on one stream, in order, and a buffer is only used again for
        # another copy on that stream.
        del place

    def close(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()
        self.pinned.clear()
