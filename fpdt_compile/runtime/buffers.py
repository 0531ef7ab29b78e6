"""Buffers in main memory that copies go through, used again as soon as nobody reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch_private import storage_users

Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


def form_of(value: Tensor) -> Form:
    """What it takes to see a storage as this tensor."""
    return value.shape, value.stride(), value.dtype


def shaped(buffer: Tensor, form: Form) -> Tensor:
    """A tensor of that form in a buffer of bytes."""
    shape, stride, dtype = form
    return torch.empty(0, dtype=dtype, device=buffer.device).set_(
        buffer.untyped_storage(), 0, shape, stride
    )


class BufferPool:
    """Hands out buffers of bytes; one comes free when no tensor outside uses its storage.

    A tensor that shares memory with a buffer (a gradient that is passed through, a view) keeps it
    from being used again, whoever holds it.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self.buffers: dict[int, list[Tensor]] = {}
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        known = self.buffers.setdefault(num_bytes, [])
        for buffer in known:
            if storage_users(buffer) == 1:
                return buffer.view(-1)
        buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.pinned)
        known.append(buffer)
        self.num_bytes += num_bytes
        return buffer.view(-1)

    def clear(self) -> None:
        self.buffers.clear()
        self.num_bytes = 0
