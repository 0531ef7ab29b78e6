"""The exchanges of one block on one step: tokens for heads, and back.

In: ``Send`` and ``Wait`` instructions. A send packs this rank's part for every other rank into one
buffer and issues one all-to-all; its wait unpacks what came and puts it where the next instructions
read it. Values in heads form are named ``name^``; see ``instructions.Transfer``.

A gradient travels with a flag that says whether there is one: where no rank has any, none arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.online_softmax import accumulator_dtype
from .attention import TileRunner
from .chunks import arrange
from .instructions import Transfer
from .layout import Range
from .parallel_schedule import in_heads
from .program import AttentionCall, BlockProgram
from .ranks import Exchange
from .step import Step

ALIGN = 16  # bytes; every part of a message starts at a multiple
Message = list[Tensor]


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    return padded(torch.Size(shape).numel() * dtype.itemsize)


def pack(messages: Sequence[Message], device: torch.device) -> tuple[Tensor, list[int]]:
    """One buffer of bytes with a message per rank, and the messages' sizes."""
    sizes = [sum(size_of(x.shape, x.dtype) for x in message) for message in messages]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    start = 0
    for x in (x for message in messages for x in message):
        part_of(buffer, start, x.shape, x.dtype).copy_(x)
        start += size_of(x.shape, x.dtype)
    return buffer, sizes


def part_of(
    buffer: Tensor, start: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    used = torch.Size(shape).numel() * dtype.itemsize
    return buffer[start : start + used].view(dtype).view(tuple(shape))


class BlockExchange:
    """One block's exchanges; ``runners`` are its attentions'."""

    def __init__(
        self,
        step: Step,
        block: BlockProgram,
        sequences: Sequence[int],
        runners: Sequence[TileRunner],
    ) -> None:
        self.step = step
        self.block = block
        self.runners = runners
        self.pending: dict[
            tuple[Transfer, int, int],
            tuple[Exchange, Callable[[list[Message]], None], Any],
        ] = {}
        # Per sequence the values attentions read, and per value every rank's heads.
        self.values: list[list[str]] = [[] for _ in block.symbols]
        self.heads: dict[str, list[Range]] = {}
        for call, source in zip(block.attentions, sequences, strict=True):
            self.note(0, call.q, [s.queries for s in call.shares])
            self.note(source, call.k, [s.keys for s in call.shares])
            self.note(source, call.v, [s.keys for s in call.shares])

    def note(self, sequence: int, name: str, heads: list[Range]) -> None:
        if name not in self.values[sequence]:
            self.values[sequence].append(name)
            self.heads[name] = heads

    @property
    def rank(self) -> int:
        return self.step.ranks.rank

    def send(self, what: Transfer, sequence: int, chunk: int) -> None:
        make = {
            Transfer.QKV: self.send_values,
            Transfer.OUT: self.send_out,
            Transfer.GRAD_OUT: self.send_out_grad,
            Transfer.GRAD_QKV: self.send_grads,
        }[what]
        messages, expected, unpack = make(sequence, chunk)
        step = self.step
        buffer, sizes = pack(messages, step.device)
        back = [sum(size_of(*part) for part in parts) for parts in expected]
        label = f"block {self.block.index}: {what.value}, sequence {sequence}, chunk {chunk}"
        exchange = step.ranks.all_to_all(label, what.name, buffer, sizes, back)
        self.pending[what, sequence, chunk] = (exchange, unpack, expected)

    def wait(self, what: Transfer, sequence: int, chunk: int) -> None:
        exchange, unpack, expected = self.pending.pop((what, sequence, chunk))
        buffer, start, messages = exchange.wait(), 0, []
        for parts in expected:
            message = []
            for shape, dtype in parts:
                message.append(part_of(buffer, start, shape, dtype))
                start += size_of(shape, dtype)
            messages.append(message)
        unpack(messages)

    def lengths(self, sequence: int, chunk: int) -> list[int]:
        """Tokens of a chunk, per rank."""
        layout = self.step.layouts[self.block.symbols[sequence]]
        return [b - a for a, b in layout.parts[chunk]]

    def own(self, name: str, sequence: int, chunk: int) -> Tensor:
        """A value in token form, which may have no tokens."""
        if self.lengths(sequence, chunk)[self.rank] == 0:
            return self.step.empty(name, 0)
        return self.step.value(name, chunk)

    # to heads -------------------------------------------------------------------

    def to_heads(
        self, tensors: Sequence[tuple[str, Tensor]], sequence: int, chunk: int
    ) -> tuple[list[Message], list[list[Any]]]:
        """Messages of every rank's heads of this rank's tokens, and what comes for this rank's
        heads. ``tensors`` are (whose heads, value)."""
        messages, expected = [], []
        for r, length in enumerate(self.lengths(sequence, chunk)):
            message, parts = [], []
            for name, x in tensors:
                a, b = self.heads[name][r]
                message.append(x[:, a:b])
                c, d = self.heads[name][self.rank]
                parts.append(((x.shape[0], d - c, length, x.shape[3]), x.dtype))
            messages.append(message)
            expected.append(parts)
        return messages, expected

    def send_values(self, sequence: int, chunk: int) -> tuple[Any, ...]:
        names = self.values[sequence]
        tensors = [(name, self.own(name, sequence, chunk)) for name in names]

        def unpack(messages: list[Message]) -> None:
            for i, name in enumerate(names):
                whole = torch.cat([message[i] for message in messages], 2)
                self.step.put(in_heads(name), chunk, whole)

        return (*self.to_heads(tensors, sequence, chunk), unpack)

    def trained(self) -> list[AttentionCall]:
        return [call for call in self.block.attentions if call.needs_grad]

    def send_out_grad(self, sequence: int, chunk: int) -> tuple[Any, ...]:
        step, calls = self.step, self.trained()
        flags, tensors = [], []
        for call in calls:
            grad = step.take_value_grad(call.name, chunk)
            flags.append(flag(grad is not None, step.device))
            if grad is None:
                length = self.lengths(sequence, chunk)[self.rank]
                grad = step.empty(call.name, length).zero_()
            tensors.append((call.q, grad))
        saved = step.saves[self.block.index] != "hidden"
        if saved:
            tensors += [(c.q, self.own(c.name, sequence, chunk)) for c in calls]
        messages, expected = self.to_heads(tensors, sequence, chunk)

        def unpack(messages: list[Message]) -> None:
            for i, call in enumerate(calls):
                if any(bool(message[i]) for message in messages):
                    whole = torch.cat([m[len(calls) + i] for m in messages], 2)
                    step.grads.add((in_heads(call.name), chunk), whole, owned=True)
                if saved:
                    whole = torch.cat([m[2 * len(calls) + i] for m in messages], 2)
                    step.put(in_heads(call.name), chunk, whole)

        return (*flagged(flags, messages, expected), unpack)

    # to tokens ------------------------------------------------------------------

    def to_tokens(
        self, tensors: Sequence[tuple[str, Tensor]], sequence: int, chunk: int
    ) -> tuple[list[Message], list[list[Any]]]:
        """Messages of every rank's tokens of this rank's heads, and what comes for its tokens."""
        messages, expected = [], []
        layout = self.step.layouts[self.block.symbols[sequence]]
        first, _ = layout.chunks[chunk]
        length = self.lengths(sequence, chunk)[self.rank]
        for r, (start, stop) in enumerate(layout.parts[chunk]):
            message, parts = [], []
            for name, x in tensors:
                message.append(x[:, :, start - first : stop - first])
                a, b = self.heads[name][r]
                parts.append(((x.shape[0], b - a, length, x.shape[3]), x.dtype))
            messages.append(message)
            expected.append(parts)
        return messages, expected

    def send_out(self, sequence: int, chunk: int) -> tuple[Any, ...]:
        step, calls = self.step, self.block.attentions
        tensors = [(c.q, step.value(in_heads(c.name), chunk)) for c in calls]

        def unpack(messages: list[Message]) -> None:
            if self.lengths(sequence, chunk)[self.rank] == 0:
                return
            for i, call in enumerate(calls):
                out = torch.cat([message[i] for message in messages], 1)
                step.put(call.name, chunk, arrange(out, (0, 2, 1, 3)))

        return (*self.to_tokens(tensors, sequence, chunk), unpack)

    def send_grads(self, sequence: int, chunk: int) -> tuple[Any, ...]:
        step = self.step
        names = [n for n in self.values[sequence] if step.program.needs_grad[n]]
        flags, tensors = [], []
        for name in names:
            grad = self.heads_grad(name, chunk)
            flags.append(flag(grad is not None, step.device))
            if grad is None:
                grad = torch.zeros_like(step.value(in_heads(name), chunk))
            tensors.append((name, grad))
        messages, expected = self.to_tokens(tensors, sequence, chunk)

        def unpack(messages: list[Message]) -> None:
            if self.lengths(sequence, chunk)[self.rank] == 0:
                return
            for i, name in enumerate(names):
                if any(bool(message[i]) for message in messages):
                    found = [m[len(names) + i] for m in messages]
                    grad = sum_heads(found, self.heads[name])
                    step.grads.add((name, chunk), grad, owned=True)

        return (*flagged(flags, messages, expected), unpack)

    def heads_grad(self, name: str, chunk: int) -> Tensor | None:
        """The finished gradient of a value in heads form, from all attentions that read it."""
        total: Tensor | None = None
        for call, runner in zip(self.block.attentions, self.runners, strict=True):
            if name == call.q:
                self.step.grads.drop((in_heads(call.name), chunk))
            roles = {"q": call.q, "k": call.k, "v": call.v}
            for which in (w for w, x in roles.items() if x == name):
                grad = runner.take_grad(which, chunk)
                if grad is not None:
                    grad = grad.to(self.step.program.specs[name].dtype)
                    total = grad if total is None else total + grad
        return total


def sum_heads(found: Sequence[Tensor], heads: Sequence[Range]) -> Tensor:
    """All heads' gradients from every rank's; ranks that hold the same head are summed, in fp32."""
    num_heads = max(stop for _, stop in heads)
    if sum(b - a for a, b in heads) == num_heads:
        return torch.cat(list(found), 1)
    like = found[0]
    shape = (like.shape[0], num_heads, *like.shape[2:])
    work = accumulator_dtype(like.dtype)
    total = torch.zeros(shape, dtype=work, device=like.device)
    for part, (a, b) in zip(found, heads, strict=True):
        total[:, a:b] += part
    return total.to(like.dtype)


def flag(value: bool, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.uint8, device=device)


def flagged(
    flags: list[Tensor], messages: list[Message], expected: list[list[Any]]
) -> tuple[list[Message], list[list[Any]]]:
    """Every message with the flags in front."""
    sizes = [(x.shape, x.dtype) for x in flags]
    return [[*flags, *m] for m in messages], [[*sizes, *e] for e in expected]
