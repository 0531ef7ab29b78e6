"""Run a block's instructions, and the head, on a :class:`Step`.

The executor looks nothing up and chooses nothing: each instruction names its region, values and
chunks; see ``schedule`` for what they mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..graph import TileKind
from .chunks import (
    arrange,
    cut,
    empty_whole,
    join_axis,
    paste,
    same_storage,
)
from .instructions import (
    Attend,
    AttendBackward,
    Drop,
    Finish,
    Instruction,
    Mix,
    MixBackward,
    Prefetch,
    Run,
    RunBackward,
    Save,
)
from .program import (
    BlockProgram,
    GradForm,
    GradSlot,
    MixerCall,
    OperandKind,
    RegionCall,
)
from .schedule import (
    BlockShape,
    backward_schedule,
    forward_schedule,
    key_region,
)
from .step import Step

# Pure functions of hashable arguments; few entries, because a long sequence's list is long.
forward_schedule = lru_cache(maxsize=8)(forward_schedule)
backward_schedule = lru_cache(maxsize=8)(backward_schedule)


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

    def forward(self, *, train: bool) -> None:
        self.run(
            forward_schedule(
                self.shape,
                self.counts,
                self.tables,
                train=train,
                save_attention=self.step.save_attention,
            )
        )

    def backward(self, *, keep: bool) -> None:
        self.run(
            backward_schedule(
                self.shape,
                self.counts,
                self.tables,
                save_attention=self.step.save_attention,
                keep=keep,
            )
        )
        for runner in self.runners:
            for name, grad in runner.parameter_grads.items():
                self.step.parameter_grads.add_dense(name, self.step.whole(name), grad)

    def run(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Run(region, chunk):
                    run_region(self.step, self.regions[region], chunk)
                case RunBackward(region, chunk):
                    self.hand_attention_grads(region, chunk)
                    if self.regions[region] is not None:
                        run_region_backward(self.step, self.regions[region], chunk)
                case Attend(attention, query, key, kind):
                    self.attend(attention, query, key, kind)
                case Finish(attention, query):
                    self.finish(attention, query)
                case AttendBackward(attention, query, key, kind):
                    self.attend_backward(attention, query, key, kind)
                case Mix(mixer):
                    mix(self.step, self.block.mixers[mixer])
                case MixBackward(mixer):
                    mix_backward(self.step, self.block.mixers[mixer])
                case Save(name, chunk):
                    self.step.save(self.names[name], chunk)
                case Prefetch(name, chunk):
                    self.step.prefetch(self.names[name], chunk)
                case Drop(name, chunk):
                    self.step.drop(self.names[name], chunk)

    def attend(self, attention: int, query: int, key: int, kind: TileKind) -> None:
        step, call = self.step, self.block.attentions[attention]
        self.runners[attention].attend(
            query,
            kind,
            step.bounds_of(call.q)[query],
            step.bounds_of(call.k)[key],
            step.value(call.q, query),
            step.value(call.k, key),
            step.value(call.v, key),
        )

    def finish(self, attention: int, query: int) -> None:
        step, call = self.step, self.block.attentions[attention]
        runner = self.runners[attention]
        out, lse = runner.finish(query, step.value(call.q, query))
        step.put(call.name, query, arrange(out, (0, 2, 1, 3)))
        step.put(call.lse, query, lse)

    def attend_backward(
        self, attention: int, query: int, key: int, kind: TileKind
    ) -> None:
        step, call = self.step, self.block.attentions[attention]
        if not call.needs_grad:
            return
        grad_key = (call.name, query)
        if grad_key not in step.grads.grads:
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
                self.step.grads.grads[grad_key],
                step.value(call.q, query),
                step.value(call.k, key),
                step.value(call.v, key),
                step.value(call.name, query),
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
                step.grads.take((call.name, chunk))
                values["q"] = call.q
            if region == key_region(self.shape.key_sequences[a]):
                values.update(k=call.k, v=call.v)
            if not any(runner.has_grad(which, chunk) for which in values):
                continue
            for which, name in values.items():
                grad = runner.take_grad(which, chunk, step.value(name, chunk))
                if step.program.needs_grad[name]:
                    step.grads.add((name, chunk), grad, owned=True)


def run_region(step: Step, call: RegionCall | None, chunk: int) -> None:
    """Compute a region's values for one chunk."""
    assert call is not None
    outputs = call.body.forward(step.operands(call, chunk))
    for result, value in zip(call.results, outputs, strict=True):
        step.put(result.name, chunk, value)


def run_region_backward(step: Step, call: RegionCall | None, chunk: int) -> None:
    """Recompute and differentiate a region on one chunk."""
    assert call is not None
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


# mixers -----------------------------------------------------------------------


def mixer_inputs(step: Step, call: MixerCall) -> list[Any]:
    flat = []
    for operand in call.operands:
        if operand.kind is OperandKind.TOKEN:
            flat.append(gather(step, operand.name))
        elif operand.kind is OperandKind.SYMBOL:
            flat.append(int(operand.size.subs(step.symbols)))
        else:
            value = step.whole(operand.name)
            flat.append(value.detach() if isinstance(value, Tensor) else value)
    return flat


def chunks_of(step: Step, name: str) -> range:
    return range(len(step.bounds_of(name)))


def gather(step: Step, name: str) -> Tensor:
    """A whole tensor from its chunks."""
    if name in step.inputs:
        return step.inputs[name].detach()
    return assemble(step, name, [step.value(name, i) for i in chunks_of(step, name)])


def assemble(step: Step, name: str, pieces: Sequence[Tensor]) -> Tensor:
    axis = step.program.axes[name]
    whole = empty_whole(pieces[0], axis, step.symbols, step.symbols[axis.symbol])
    for piece, (start, _) in zip(pieces, step.bounds[axis.symbol], strict=True):
        paste(whole, piece, axis, step.symbols, start)
    return whole


def whole_grad(step: Step, name: str) -> Tensor | None:
    """The gradient of a whole value from its chunks'; None if no chunk has one."""
    found = [step.take_value_grad(name, i) for i in chunks_of(step, name)]
    if all(grad is None for grad in found):
        return None
    pieces = [
        torch.zeros_like(step.value(name, i)) if grad is None else grad
        for i, grad in enumerate(found)
    ]
    return assemble(step, name, pieces)


def scatter(step: Step, name: str, whole: Tensor) -> list[Tensor]:
    axis = step.program.axes[name]
    return [
        join_axis(cut(whole, axis, step.symbols, start, end), axis)
        for start, end in step.bounds[axis.symbol]
    ]


@contextlib.contextmanager
def repeated_randomness(step: Step, call: MixerCall) -> Iterator[None]:
    """The first run of a mixer in a step draws its random numbers; later runs draw the same."""
    device = next(
        (x.device for x in step.inputs.values() if isinstance(x, Tensor)),
        torch.device("cpu"),
    )
    states = step.random_states.get(call.name)
    if states is None:
        step.random_states[call.name] = (
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], device)
        yield


def mix(step: Step, call: MixerCall) -> None:
    with torch.no_grad(), repeated_randomness(step, call):
        outputs = call.run(mixer_inputs(step, call))
    for result, whole in zip(call.results, outputs, strict=True):
        for chunk, piece in enumerate(scatter(step, result.name, whole)):
            step.put(result.name, chunk, piece)


def mix_backward(step: Step, call: MixerCall) -> None:
    flat = mixer_inputs(step, call)
    wanted = [i for i, o in enumerate(call.operands) if o.needs_grad]
    used = [i for i, r in enumerate(call.results) if r.needs_grad]
    if not wanted or not used:
        return
    for i in wanted:
        flat[i] = flat[i].requires_grad_()
    with torch.enable_grad(), repeated_randomness(step, call):
        outputs = call.run(flat)
    pairs = [
        (outputs[i], whole_grad(step, call.results[i].name))
        for i in used
        if outputs[i].requires_grad
    ]
    pairs = [(out, grad) for out, grad in pairs if grad is not None]
    if not pairs:
        return
    grads = torch.autograd.grad(
        [out for out, _ in pairs],
        [flat[i] for i in wanted],
        [grad for _, grad in pairs],
        allow_unused=True,
    )
    for i, grad in zip(wanted, grads):
        operand = call.operands[i]
        if grad is None:
            continue
        if operand.kind is OperandKind.TOKEN:
            for chunk, piece in enumerate(scatter(step, operand.name, grad)):
                step.grads.add((operand.name, chunk), piece, owned=False)
        else:
            step.parameter_grads.add_dense(operand.name, step.whole(operand.name), grad)
