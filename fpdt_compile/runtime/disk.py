"""A file for one step's values: space in it, and reading and writing at offsets.

The file lies in a directory the user names and is locked (``flock``) as long as its process lives.
A process that dies leaves its file without a lock; whoever opens a file in the same directory next
removes it. Space for a step is reserved when the file is made, so that a full disk is found out
before the step has changed anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile
from bisect import insort
from pathlib import Path

from torch import Tensor

from ..errors import StoreError

PREFIX, SUFFIX = "fpdt-", ".store"
ALIGN = 4096


def padded(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGN) * ALIGN


def raw(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a CPU tensor's storage."""
    storage = tensor.untyped_storage()
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


class Space:
    """Free ranges of a file: first fit, neighbours joined."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # (start, end), sorted
        self.used: dict[int, int] = {}
        self.end = 0

    def take(self, num_bytes: int) -> int:
        """The offset of so many unused bytes, beyond ``end`` if there is no gap for them."""
        size = padded(num_bytes)
        for index, (start, end) in enumerate(self.free):
            if end - start >= size:
                self.free[index : index + 1] = (
                    [(start + size, end)] if end - start > size else []
                )
                break
        else:
            start = self.end
            if self.free and self.free[-1][1] == self.end:
                start, _ = self.free.pop()
            self.end = start + size
        self.used[start] = size
        return start

    def give(self, start: int) -> None:
        end = start + self.used.pop(start)
        insort(self.free, (start, end))
        joined: list[tuple[int, int]] = []
        for a, b in self.free:
            if joined and joined[-1][1] == a:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        self.free = joined


class StepFile:
    """One step's file. Offsets come from ``take``; reads and writes may be in any thread."""

    def __init__(self, directory: str | None, num_bytes: int) -> None:
        self.directory = Path(directory or tempfile.gettempdir())
        self.space = Space()
        self.size = 0
        remove_left_over(self.directory)
        self.path, self.fd = self.create()
        self.reserve(num_bytes)

    def create(self) -> tuple[Path, int]:
        while True:
            try:
                fd, name = tempfile.mkstemp(SUFFIX, PREFIX, self.directory)
            except OSError as error:
                raise self.failed("cannot make a file", 0, error) from error
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Another process may have taken it for a left-over before it was locked.
            if os.fstat(fd).st_nlink:
                return Path(name), fd
            os.close(fd)

    def failed(self, what: str, num_bytes: int, error: OSError) -> StoreError:
        needed = f"; it needs {num_bytes} bytes" if num_bytes else ""
        return StoreError(
            f"offload to disk: {what} in {self.directory}{needed} ({error.strerror}). Free space "
            f"there, or name another directory with offload_dir="
        )

    def reserve(self, num_bytes: int) -> None:
        """Make the file at least so long, with space on the disk for it."""
        if num_bytes <= self.size:
            return
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, self.size, num_bytes - self.size)
            else:
                os.ftruncate(self.fd, num_bytes)
        except OSError as error:
            self.close()
            raise self.failed("no space", num_bytes, error) from error
        self.size = num_bytes

    def take(self, num_bytes: int) -> int:
        start = self.space.take(num_bytes)
        self.reserve(self.space.end)
        return start

    def give(self, start: int) -> None:
        self.space.give(start)

    def write(self, start: int, tensor: Tensor) -> None:
        """Write a CPU tensor's storage at ``start``."""
        view, done = memoryview(raw(tensor)).cast("B"), 0
        while done < len(view):
            try:
                done += os.pwrite(self.fd, view[done:], start + done)
            except OSError as error:
                raise self.failed("cannot write", len(view), error) from error

    def read(self, start: int, buffer: Tensor) -> None:
        """Fill a CPU tensor's storage from ``start``."""
        view, done = memoryview(raw(buffer)).cast("B"), 0
        while done < len(view):
            try:
                count = os.preadv(self.fd, [view[done:]], start + done)
            except OSError as error:
                raise self.failed("cannot read", len(view), error) from error
            if count == 0:
                cut_short = OSError(errno.EIO, "the file ends early")
                raise self.failed("cannot read", len(view), cut_short)
            done += count

    def close(self) -> None:
        """Remove the file; may be called more than once."""
        if self.fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):  # the directory may be gone
            self.path.unlink()
        os.close(self.fd)
        self.fd = -1


def remove_left_over(directory: Path) -> None:
    """Remove files of processes that died: those nobody holds a lock on."""
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # removed meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass  # in use
        finally:
            os.close(fd)
