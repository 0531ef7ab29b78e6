"""The head: final norm, LM head and loss, in pieces of its own length.

With one differentiable total (the usual training step) each piece's gradients are taken right
after its forward, for a unit gradient of the total, and scaled later by the gradient that arrives:
logits exist for one piece at a time and are computed once. Otherwise the pieces are recomputed in
the backward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .chunks import empty_whole, join_axis, paste, scalar_dtype, split_axis
from .gradients import grad_of
from .program import GradForm, OperandKind, RegionCall
from .sharing import gather_tokens
from .step import Step, unit_grad


class HeadExecutor:
    """Runs one of the program's head regions on one step."""

    def __init__(
        self, step: Step, index: int, call: RegionCall, held: frozenset[str]
    ) -> None:
        self.step = step
        self.index = index
        self.call = call
        self.dtypes = [step.program.specs[r.name].dtype for r in call.results]
        self.held = held  # exit state that a block's backward or another head reads too

    def forward(self, *, one_pass: bool, train: bool) -> list[Tensor]:
        """The results, totals summed and token values whole, in the order of ``call.results``."""
        step, call = self.step, self.call
        sums: list[Tensor | None] = [None] * len(call.results)
        for chunk, bounds in enumerate(step.own[call.symbol]):
            self.arrive(chunk)
            start = time.perf_counter()
            buffers: dict[str, Tensor] = {}
            for piece in step.head_pieces(bounds):
                inputs = step.operands(call, chunk, piece)
                if one_pass:
                    flat = call.body.forward_backward(inputs)
                    self.keep_unit_grads(chunk, piece, flat, buffers)
                else:
                    flat = call.body.forward(inputs)
                for i in range(len(call.results)):
                    sums[i] = self.collect(sums[i], i, flat[i], chunk, piece)
                del flat
            self.record("head", chunk, start)
            for name, buffer in buffers.items():
                key = unit_grad(name, chunk, self.index)
                step.store.put(key, buffer)
                step.save_hidden(*key)
            self.leave(chunk, drop=one_pass or not train)
        return [self.finished(i, total) for i, total in enumerate(sums)]

    def collect(
        self,
        have: Tensor | None,
        index: int,
        part: Tensor,
        chunk: int,
        piece: tuple[int, int],
    ) -> Tensor:
        step, result = self.step, self.call.results[index]
        if result.axis is not None:
            symbol = result.axis.symbol
            layout, rank = step.layouts[symbol], step.ranks.rank
            if have is None:
                have = empty_whole(
                    part, result.axis, step.symbols, layout.num_tokens(rank)
                )
                self.dtypes[index] = part.dtype
            start = layout.local(rank)[chunk][0] + piece[0] - step.own[symbol][chunk][0]
            paste(have, part, result.axis, step.symbols, start)
            return have
        if have is None:
            self.dtypes[index] = part.dtype
            return part.to(scalar_dtype(part.dtype))
        return have + part

    def finished(self, index: int, total: Tensor | None) -> Tensor:
        """A result from this rank's part of it: totals summed over ranks, values per token gathered
        (with sharded inputs each rank keeps its own)."""
        step, result = self.step, self.call.results[index]
        if total is None:  # a rank without tokens
            total = step.empty(result.name, 0)
            if result.axis is None:
                total = total.zero_().to(scalar_dtype(total.dtype))
        if result.axis is not None:
            if step.sharded:
                return total
            return gather_tokens(step, f"gathering {result.name}", total, result.axis)
        return step.ranks.sum(f"sum of {result.name}", total).to(self.dtypes[index])

    def record(self, label: str, chunk: int, start: float) -> None:
        self.step.ranks.record(
            "compute", f"{label}[{chunk}]", start, time.perf_counter()
        )

    def state(self) -> list[str]:
        """The values the head starts from."""
        operands = self.call.operands
        return [o.name for o in operands if o.kind is OperandKind.TOKEN]

    def arrive(self, chunk: int) -> None:
        """Start bringing back the chunks that come next."""
        step = self.step
        count = len(step.own[self.call.symbol])
        first = chunk + step.placement.lookahead if chunk else 0
        for i in range(first, min(count, chunk + step.placement.lookahead + 1)):
            for name in self.state():
                step.prefetch(name, i)

    def leave(self, chunk: int, *, drop: bool) -> None:
        """A chunk's state has been read."""
        for name in self.state():
            if drop and name not in self.held:
                self.step.drop(name, chunk)
            else:
                self.step.release(name, chunk)

    def keep_unit_grads(
        self,
        chunk: int,
        piece: tuple[int, int],
        flat: Sequence[Tensor],
        buffers: dict[str, Tensor],
    ) -> None:
        """Sum parameter gradients; lay value gradients of the piece into the chunk's buffer."""
        step, call = self.step, self.call
        for slot in call.body.slots("forward_backward"):
            operand = call.operands[slot.operand]
            if operand.kind is OperandKind.STATE:
                step.parameter_grads.add(
                    operand.name, step.whole(operand.name), slot, flat
                )
            elif slot.form is not GradForm.NONE:
                self.write_piece(
                    buffers, operand.name, chunk, piece, flat[slot.results[0]]
                )

    def write_piece(
        self,
        buffers: dict[str, Tensor],
        name: str,
        chunk: int,
        piece: tuple[int, int],
        grad: Tensor,
    ) -> None:
        step = self.step
        axis = step.program.axes[name]
        if name not in buffers:
            start, end = step.own[axis.symbol][chunk]
            joined = join_axis(grad, axis)
            buffers[name] = empty_whole(joined, axis, step.symbols, end - start)
        target, dim = split_axis(buffers[name], axis, step.symbols)
        offset = piece[0] - step.own[axis.symbol][chunk][0]
        target.narrow(dim, offset, piece[1] - piece[0]).copy_(grad)

    def backward(self, grads: Sequence[Tensor | None], *, keep: bool) -> None:
        """Recompute each piece and differentiate it for the gradients of its results."""
        step, call = self.step, self.call
        wanted = [(i, r) for i, r in enumerate(call.results) if r.needs_grad]
        arrived = {r.name for i, r in wanted if grads[i] is not None}
        grads = fill_grads(step, call, grads)
        slots = [
            s for s in call.body.slots("backward") if call.has_grad(s.operand, arrived)
        ]
        for chunk, bounds in enumerate(step.own[call.symbol]):
            self.arrive(chunk)
            start = time.perf_counter()
            buffers: dict[str, Tensor] = {}
            for piece in step.head_pieces(bounds):
                inputs = step.operands(call, chunk, piece)
                upstream = [
                    self.piece_grad(grads[i], i, chunk, piece) for i, _ in wanted
                ]
                flat = call.body.backward(inputs, upstream)
                for slot in slots:
                    operand = call.operands[slot.operand]
                    if operand.kind is OperandKind.STATE:
                        step.parameter_grads.add(
                            operand.name, step.whole(operand.name), slot, flat
                        )
                    elif slot.form is not GradForm.NONE:
                        self.write_piece(
                            buffers, operand.name, chunk, piece, flat[slot.results[0]]
                        )
            self.record("head backward", chunk, start)
            for name, buffer in buffers.items():
                step.grads.add((name, chunk), buffer, owned=True)
                step.save_hidden(grad_of(name), chunk)
            self.leave(chunk, drop=not keep)

    def piece_grad(
        self, grad: Tensor | None, index: int, chunk: int, piece: tuple[int, int]
    ) -> Tensor:
        step, axis = self.step, self.call.results[index].axis
        assert grad is not None
        if axis is None:
            return grad.contiguous()
        split, dim = split_axis(grad, axis, step.symbols)
        moved = step.outside[axis.symbol][chunk][0] - step.own[axis.symbol][chunk][0]
        part = split.narrow(dim, piece[0] + moved, piece[1] - piece[0])
        return join_axis(part, axis).contiguous()


def fill_grads(
    step: Step, call: RegionCall, grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Zeros for results whose gradient nobody asked for."""
    filled: list[Tensor | None] = []
    for result, grad in zip(call.results, grads, strict=True):
        if grad is None and result.needs_grad:
            shape, dtype, device = step.result_shapes[result.name]
            grad = torch.zeros(shape, dtype=dtype, device=device)
        filled.append(grad)
    return filled
