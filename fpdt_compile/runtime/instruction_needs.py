"""What one instruction needs in memory while it runs, besides the values that are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.online_softmax import accumulator_dtype
from .block_shape import key_region
from .gradients import sum_dtype
from .instructions import Attend, AttendBackward, Finish, Instruction, Run, RunBackward
from .program import AttentionCall, BlockProgram, OperandKind, RegionCall
from .step import Step

Piece = tuple[int, int]


class Needs:
    """Bytes of regions of a step, and what it keeps on the way: vectors and parameter gradients."""

    def __init__(self, step: Step, intermediates: bool) -> None:
        self.step = step
        self.intermediates = intermediates  # False: count what is stored only
        vectors = [x for x in step.vectors.values() if isinstance(x, Tensor)]
        found = {x.untyped_storage()._cdata: x.untyped_storage() for x in vectors}
        given = [x for x in step.inputs.values() if isinstance(x, Tensor)]
        for x in given:
            found.pop(x.untyped_storage()._cdata, None)
        self.vector_bytes = sum(x.nbytes() for x in found.values())
        self.stage: dict[str, int] = {}  # sums of gradients of the stage that runs
        self.grads: dict[str, int] = {}  # of those that have ended
        self.known: dict[tuple[str, str, int], tuple[int, int]] = {}

    @property
    def kept_bytes(self) -> int:
        return self.vector_bytes + sum(self.stage.values()) + sum(self.grads.values())

    def end_stage(self) -> None:
        """Its sums become the parameters' gradients; a second sum is added to the first."""
        self.grads.update(self.stage)
        self.stage = {}

    def of_region(
        self, call: RegionCall, form: str, chunk: int, piece: Piece | None = None
    ) -> int:
        """Bytes of a region's intermediates and results, until these are stored."""
        if not self.intermediates:
            return 0
        start, end = self.step.own[call.symbol][chunk] if piece is None else piece
        key = (call.body.key, form, end - start)
        if key not in self.known:
            inputs = self.step.operands(call, chunk, piece, fake=True)
            found = call.body.live_bytes(form, inputs)
            self.known[key] = found.peak, found.results + found.copies
        return max(self.known[key])

    def note_gradients(self, call: RegionCall) -> None:
        """From here on there are the sums that a region's backward adds to."""
        for operand in call.operands:
            if operand.kind is OperandKind.STATE and operand.needs_grad:
                parameter = self.step.inputs[operand.name]
                width = sum_dtype(parameter.dtype).itemsize
                self.stage.setdefault(operand.name, parameter.numel() * width)


class BlockNeeds:
    """Bytes that the instructions of a block need."""

    def __init__(self, needs: Needs, block: BlockProgram) -> None:
        self.needs = needs
        self.block = block
        self.regions = {"pre": block.pre, "post": block.post}
        self.regions.update((key_region(n), x) for n, x in enumerate(block.keys, 1))

    def of(self, x: Instruction) -> int:
        match x:
            case Run(region, chunk):
                return self.region(region, "forward", chunk)
            case RunBackward(region, chunk):
                return self.region(region, "backward", chunk)
            case Attend(a, i, _):
                # The running output, this tile's, and the weights of the two.
                return self.out_bytes(a, i, running=True) + self.out_bytes(a, i)
            case Finish(a, i):
                return self.out_bytes(a, i, running=True) + self.out_bytes(a, i)
            case AttendBackward(a, i, j, _):
                call = self.block.attentions[a]
                rows = self.rows(call.q, i), self.rows(call.k, j), self.rows(call.v, j)
                return sum(rows)
        return 0

    def region(self, name: str, form: str, chunk: int) -> int:
        call, step = self.regions[name], self.needs.step
        if call is None or chunk not in step.own_chunks(call.symbol):
            return 0
        if form == "backward" and not call.needs_backward:
            return 0
        more = self.needs.of_region(call, form, chunk)
        if form == "backward":
            self.needs.note_gradients(call)
        return more

    def rows(self, name: str, chunk: int) -> int:
        """Bytes of a chunk of a value, all tokens of this rank's share."""
        value = self.needs.step.empty(name, self.length(name, chunk), "meta")
        return value.numel() * value.element_size()

    def length(self, name: str, chunk: int) -> int:
        start, end = self.needs.step.own[self.needs.step.program.axes[name].symbol][
            chunk
        ]
        return end - start

    def out_bytes(self, attention: int, chunk: int, *, running: bool = False) -> int:
        """Output and logsumexp of a query chunk; the running ones are in the accumulator type."""
        call: AttentionCall = self.block.attentions[attention]
        value = self.needs.step.empty(call.name, self.length(call.q, chunk), "meta")
        work: torch.dtype = accumulator_dtype(call.dtype)
        width = work.itemsize if running else call.dtype.itemsize
        lse = value.numel() // value.shape[-1] * work.itemsize
        return value.numel() * width + (1 if running else 3) * lse
