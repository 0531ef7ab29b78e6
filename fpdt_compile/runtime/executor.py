"""Run a block's instructions, and the head, on a :class:`Step`.

The executor looks nothing up and chooses nothing: each instruction names its region, values and
chunks; see ``schedule`` for what they mean.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph import TileKind
from .block_schedule import block_schedule
from .block_shape import BlockShape, key_region
from .chunks import arrange, join_axis, same_storage
from .copies import computes, split_name
from .exchange import BlockExchange
from .instructions import (
    Attend,
    AttendBackward,
    Drop,
    Finish,
    Instruction,
    Mix,
    MixBackward,
    Prefetch,
    Release,
    Run,
    RunBackward,
    Save,
    Send,
    Wait,
)
from .mixers import mix, mix_backward
from .parallel_schedule import in_heads
from .program import (
    AttentionCall,
    BlockProgram,
    GradForm,
    GradSlot,
    OperandKind,
    RegionCall,
)
from .step import Step


class BlockExecutor:
    """Runs one block's schedules on one step."""

    def __init__(
        self, step: Step, block: BlockProgram, shape: BlockShape, names: dict[str, str]
    ) -> None:
        self.step = step
        self.block = block
        self.shape = shape
        self.names = names
        self.tables = tuple(step.table(a) for a in block.attentions)
        self.runners = [step.tile_runner(a) for a in block.attentions]
        self.regions = {"pre": block.pre, "post": block.post}
        for n, call in enumerate(block.keys, 1):
            self.regions[key_region(n)] = call
        self.counts = tuple(len(step.bounds[symbol]) for symbol in block.symbols)
        self.moves = BlockExchange(step, block, shape.key_sequences, self.runners)

    def attended(self, name: str) -> str:
        """The form of a value that attention reads or writes."""
        return in_heads(name) if self.step.parallel else name

    def forward(self, *, train: bool) -> None:
        self.run(self.schedule(train=train))

    def schedule(self, **choices: Any) -> tuple[Instruction, ...]:
        step = self.step
        return block_schedule(
            self.shape,
            self.counts,
            self.tables,
            step.placement,
            step.overlap if step.parallel else None,
            save=step.saves[self.block.index],
            **choices,
        )

    def backward(self, *, keep: bool) -> None:
        self.run(self.schedule(keep=keep, order=self.step.order))
        for runner in self.runners:
            for name, grad in runner.parameter_grads.items():
                self.step.parameter_grads.add_dense(name, self.step.whole(name), grad)

    def run(self, instructions: Sequence[Instruction]) -> None:
        ranks = self.step.ranks
        if ranks.events is None:
            for instruction in instructions:
                self.execute(instruction)
            return
        for instruction in instructions:
            start = time.perf_counter()
            self.execute(instruction)
            if computes(instruction):
                ranks.record("compute", str(instruction), start, time.perf_counter())

    def execute(self, instruction: Instruction) -> None:
        step = self.step
        match instruction:
            case Run(region, chunk):
                run_region(step, self.regions[region], chunk)
            case RunBackward(region, chunk):
                if not step.parallel:
                    self.hand_attention_grads(region, chunk)
                if self.regions[region] is not None:
                    run_region_backward(step, self.regions[region], chunk)
            case Attend(attention, query, key, kind):
                self.attend(attention, query, key, kind)
            case Finish(attention, query):
                self.finish(attention, query)
            case AttendBackward(attention, query, key, kind):
                self.attend_backward(attention, query, key, kind)
            case Send(what, sequence, chunk):
                self.moves.send(what, sequence, chunk)
            case Wait(what, sequence, chunk):
                self.moves.wait(what, sequence, chunk)
            case Mix(mixer):
                mix(step, self.block.mixers[mixer])
            case MixBackward(mixer):
                mix_backward(step, self.block.mixers[mixer])
            case Save(name, chunk, tier):
                step.save(self.real_name(name), chunk, tier)
            case Prefetch(name, chunk):
                step.prefetch(self.real_name(name), chunk)
            case Release(name, chunk):
                step.release(self.real_name(name), chunk)
            case Drop(name, chunk):
                step.drop(self.real_name(name), chunk)

    def real_name(self, name: str) -> str:
        """The value that a name of the schedule stands for."""
        own, suffix = split_name(name)
        return self.names[own] + suffix

    def attention_values(
        self, call: AttentionCall, query: int, key: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a tile."""
        step = self.step
        return (
            step.value(self.attended(call.q), query),
            step.value(self.attended(call.k), key),
            step.value(self.attended(call.v), key),
        )

    def attend(self, attention: int, query: int, key: int, kind: TileKind) -> None:
        step, call = self.step, self.block.attentions[attention]
        if call.shares[step.ranks.rank].num_queries == 0:
            return
        self.runners[attention].attend(
            query,
            kind,
            step.bounds_of(call.q)[query],
            step.bounds_of(call.k)[key],
            *self.attention_values(call, query, key),
        )

    def finish(self, attention: int, query: int) -> None:
        step, call = self.step, self.block.attentions[attention]
        runner = self.runners[attention]
        out, lse = runner.finish(query, step.value(self.attended(call.q), query))
        if not step.parallel:
            out = arrange(out, (0, 2, 1, 3))
        step.put(self.attended(call.name), query, out)
        step.put(call.lse, query, lse)

    def attend_backward(
        self, attention: int, query: int, key: int, kind: TileKind
    ) -> None:
        step, call = self.step, self.block.attentions[attention]
        if not call.needs_grad or call.shares[step.ranks.rank].num_queries == 0:
            return
        grad_key = (self.attended(call.name), query)
        if grad_key not in step.grads:
            if step.parallel:
                return  # no rank has one
            grad = step.take_value_grad(call.name, query)
            if grad is None:
                return
            step.grads.add(grad_key, grad, owned=False)
        self.runners[attention].attend_backward(
            query,
            key,
            kind,
            step.bounds_of(call.q)[query],
            step.bounds_of(call.k)[key],
            (
                step.grads.get(grad_key),
                *self.attention_values(call, query, key),
                step.value(self.attended(call.name), query),
                step.value(call.lse, query),
            ),
        )

    def hand_attention_grads(self, region: str, chunk: int) -> None:
        """Chunk's dq, dk or dv are complete: hand those of ``region`` to the values they are of."""
        step = self.step
        for a, (call, runner) in enumerate(
            zip(self.block.attentions, self.runners, strict=True)
        ):
            values = {}
            if region == "pre":
                step.grads.drop((call.name, chunk))
                values["q"] = call.q
            if region == key_region(self.shape.key_sequences[a]):
                values.update(k=call.k, v=call.v)
            if not any(runner.has_grad(which, chunk) for which in values):
                continue
            for which, name in values.items():
                grad = runner.take_grad(which, chunk)
                if grad is None:
                    grad = torch.zeros_like(step.value(name, chunk))
                if step.program.needs_grad[name]:
                    grad = grad.to(step.program.specs[name].dtype)
                    step.grads.add((name, chunk), grad, owned=True)


def run_region(step: Step, call: RegionCall | None, chunk: int) -> None:
    """Compute a region's values for one chunk, where this rank has tokens of it."""
    assert call is not None
    if chunk not in step.own_chunks(call.symbol):
        return
    outputs = call.body.forward(step.operands(call, chunk))
    for result, value in zip(call.results, outputs, strict=True):
        step.put(result.name, chunk, value)


def run_region_backward(step: Step, call: RegionCall | None, chunk: int) -> None:
    """Recompute and differentiate a region on one chunk."""
    assert call is not None
    if chunk not in step.own_chunks(call.symbol):
        return
    inputs = step.operands(call, chunk)
    wanted = [i for i, r in enumerate(call.results) if r.needs_grad]
    found = [step.take_value_grad(call.results[i].name, chunk) for i in wanted]
    if all(grad is None for grad in found):
        return  # nothing behind it is differentiable: its parameters get no gradient
    arrived = {
        call.results[i].name
        for i, g in zip(wanted, found, strict=True)
        if g is not None
    }
    if any(grad is None for grad in found):
        values = call.body.forward(inputs)
        found = [
            torch.zeros_like(values[i]) if grad is None else grad
            for i, grad in zip(wanted, found)
        ]
    grads = [grad.contiguous() for grad in found if grad is not None]
    results = call.body.backward(inputs, grads)
    slots = [
        s for s in call.body.slots("backward") if call.has_grad(s.operand, arrived)
    ]
    hand_out(step, call, chunk, inputs, grads, results, slots)


def hand_out(
    step: Step,
    call: RegionCall,
    chunk: int,
    inputs: Sequence[Any],
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    slots: Sequence[GradSlot],
) -> None:
    """Add a backward body's results to the sums they belong to."""
    for slot in slots:
        operand = call.operands[slot.operand]
        if operand.kind is OperandKind.STATE:
            step.parameter_grads.add(
                operand.name, step.whole(operand.name), slot, results
            )
        elif slot.form is not GradForm.NONE:
            grad = results[slot.results[0]]
            others = [x for i, x in enumerate(results) if i != slot.results[0]]
            others += [x for x in (*inputs, *grads) if isinstance(x, Tensor)]
            owned = not any(same_storage(grad, x) for x in others)
            if operand.axis is not None:
                grad = join_axis(grad, operand.axis)
            step.grads.add((operand.name, chunk), grad, owned=owned)
