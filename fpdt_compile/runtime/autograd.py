"""The program as a chain of autograd nodes: entry, one per block, head.

The nodes are linked by an empty token tensor; activations and their gradients stay in the step's
stores. Parameters enter at the node that uses them, so their gradients appear block by block in the
backward, where gradient hooks, DDP, FSDP and optimizer-in-backward look for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .._torch_private import get_keep_graph
from ..errors import FpdtError
from .block_shape import BlockShape, block_shape
from .executor import BlockExecutor, run_region, run_region_backward
from .forecast import Forecast, ForecastDone
from .gradients import grad_of
from .head import HeadExecutor
from .mixers import own_grad, whole_grad
from .program import ChunkProgram, OperandKind, OutputKind
from .step import Step


def differentiable_state(calls: Sequence[Any]) -> tuple[str, ...]:
    """Names of the graph inputs these regions (or mixers) compute gradients for."""
    names: dict[str, None] = {}
    for call in calls:
        for operand in call.operands if call is not None else ():
            if operand.kind is OperandKind.STATE and operand.needs_grad:
                names.setdefault(operand.name)
    return tuple(names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One autograd node: ``run`` its forward, ``differentiate`` its backward."""

    label: str
    inputs: tuple[str, ...]
    summed: tuple[str, ...]  # those whose gradient is a sum over chunks (and ranks)
    run: Callable[[Step], list[Tensor]]
    differentiate: Callable[[Step, Sequence[Tensor | None], bool], None]
    input_grad: Callable[[Step, str], Tensor | None]


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Bodies hold the casts of the autocast state they were captured in; none may be added."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class StageNode(torch.autograd.Function):
    """Outputs: the token, then the stage's results."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, step: Step, stage: Stage, token: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.stage = step, stage
        ctx.save_for_backward(*inputs)
        with no_autocast():
            results = stage.run(step)
        fixed = [
            r for r in results if not r.requires_grad and not r.is_floating_point()
        ]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return (token.new_empty(0), *results)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise FpdtError(
                "double backward: the chunked program recomputes its regions in backward and "
                "cannot be differentiated twice; call backward or grad without create_graph=True"
            )
        # Raises if the graph was freed, or a parameter was changed since the forward.
        _ = ctx.saved_tensors
        step, stage = ctx.step, ctx.stage
        if step.store.closed:
            raise FpdtError(
                "backward: an earlier backward of this step failed; run it anew"
            )
        step.keep_graph = get_keep_graph()
        with closed_on_error(step), no_autocast():
            stage.differentiate(step, grads[1:], step.keep_graph)
            step.sum_gradients(stage.label, stage.summed)
            found = []
            for name, needed in zip(stage.inputs, ctx.needs_input_grad[3:]):
                grad = stage.input_grad(step, name)
                found.append(grad if needed else None)
        if not step.keep_graph:
            step.pending_backwards -= 1
            if step.pending_backwards == 0:
                step.store.close()
        return (None, None, token_grad(ctx), *found)


@contextlib.contextmanager
def closed_on_error(step: Step) -> Iterator[None]:
    """A step that fails leaves no file and no thread behind, whoever holds on to its error."""
    try:
        yield
    except BaseException:
        step.store.close()
        raise


def token_grad(ctx: FunctionCtx) -> Tensor | None:
    return torch.empty(0) if ctx.needs_input_grad[2] else None


class StepRunner:
    """Runs a program: called with the graph's flat inputs, returns its flat outputs."""

    def __init__(
        self,
        program: ChunkProgram,
        make_step: Callable[[Sequence[Any]], Step],
        make_dropped: Callable[[Any, Step], Any],
        only_forecast: Callable[[], bool] = lambda: False,
    ) -> None:
        self.program = program
        self.make_step = make_step
        self.make_dropped = make_dropped
        self.only_forecast = only_forecast
        # What a block reads again in its backward may not be dropped by what comes after it.
        read = [
            {*b.state_in, *b.key_state, *(a.name for a in b.attentions)}
            for b in program.blocks
        ]
        last = {o.name for head in program.heads for o in head.operands}
        self.held: frozenset[str] = frozenset().union(*read)
        self.shapes: list[tuple[BlockShape, dict[str, str]]] = [
            block_shape(
                block,
                earlier=set().union(*read[: block.index]),
                later=last.union(*read[block.index + 1 :]),
            )
            for block in program.blocks
        ]

    def __call__(self, *inputs: Any) -> list[Any]:
        step = self.make_step(inputs)
        train = torch.is_grad_enabled() and any(self.program.needs_grad.values())
        with closed_on_error(step):
            self.reserve(step, train)
            results = self.run_stages(step, train)
        if not train or not step.pending_backwards:
            step.store.close()
        return results

    def reserve(self, step: Step, train: bool) -> None:
        """Take the disk space of the step now: a full disk is found before anything has changed."""
        asked = self.only_forecast()
        if asked or "disk" in step.placement.tiers:
            walk = Forecast(step, self.shapes, self.held, train, intermediates=asked)
            peaks = walk.peaks()
            if asked:
                raise ForecastDone(peaks)
            step.store.reserve("disk", walk.walker.file_peak)

    def run_stages(self, step: Step, train: bool) -> list[Any]:
        token = torch.empty(0)
        token, *_ = self.apply(step, self.entry_stage(), token, train)
        for index in range(len(self.program.blocks)):
            token, *_ = self.apply(step, self.block_stage(index, train), token, train)
        named: dict[str, Tensor] = {}
        for index, head in enumerate(self.program.heads):
            _, *results = self.apply(step, self.head_stage(index, train), token, train)
            named.update(zip((r.name for r in head.results), results, strict=True))
        return self.outputs(step, named)

    def apply(
        self, step: Step, stage: Stage, token: Tensor, train: bool
    ) -> tuple[Tensor, ...]:
        if not train:
            with torch.no_grad(), no_autocast():
                return (token, *stage.run(step))
        results = StageNode.apply(
            step, stage, token, *(step.inputs[name] for name in stage.inputs)
        )
        step.pending_backwards += results[0].requires_grad
        return results

    def entry_stage(self) -> Stage:
        program = self.program
        token_inputs = tuple(
            name
            for name in program.input_names
            if program.needs_grad.get(name) and name in program.axes
        )

        def run(step: Step) -> list[Tensor]:
            for call in program.entries:
                for chunk in range(len(step.bounds[call.symbol])):
                    run_region(step, call, chunk)
                    for result in call.results:
                        step.save_hidden(result.name, chunk)
            return []

        def differentiate(
            step: Step, grads: Sequence[Tensor | None], keep: bool
        ) -> None:
            for call in program.entries:
                if call.needs_backward:
                    count, ahead = len(step.bounds[call.symbol]), 0
                    for chunk in range(count):
                        while ahead < min(count, chunk + 1 + step.placement.lookahead):
                            for result in call.results:
                                step.prefetch(grad_of(result.name), ahead)
                            ahead += 1
                        run_region_backward(step, call, chunk)

        def input_grad(step: Step, name: str) -> Tensor | None:
            if name not in token_inputs:
                return step.parameter_grads.take(name, step.inputs[name])
            if name in step.local_inputs:
                return own_grad(step, name)
            return whole_grad(step, name)

        state = differentiable_state(program.entries)
        return Stage(
            label="entry",
            inputs=(*state, *token_inputs),
            summed=state,
            run=run,
            differentiate=differentiate,
            input_grad=input_grad,
        )

    def block_stage(self, index: int, train: bool) -> Stage:
        block, shape = self.program.blocks[index], self.shapes[index]

        def run(step: Step) -> list[Tensor]:
            BlockExecutor(step, block, *shape).forward(train=train)
            return []

        def differentiate(
            step: Step, grads: Sequence[Tensor | None], keep: bool
        ) -> None:
            BlockExecutor(step, block, *shape).backward(keep=keep)

        state = differentiable_state(block.calls)
        return Stage(
            label=f"block {index}",
            inputs=state,
            summed=state,
            run=run,
            differentiate=differentiate,
            input_grad=lambda step, name: step.parameter_grads.take(
                name, step.inputs[name]
            ),
        )

    def head_stage(self, index: int, train: bool) -> Stage:
        call = self.program.heads[index]
        one_pass = self.program.one_pass[index] and train
        others = [h for i, h in enumerate(self.program.heads) if i != index]
        held = self.held.union(o.name for head in others for o in head.operands)
        sums: dict[str, Tensor] = {}

        def run(step: Step) -> list[Tensor]:
            results = HeadExecutor(step, index, call, held).forward(
                one_pass=one_pass, train=train
            )
            for result, value in zip(call.results, results, strict=True):
                step.result_shapes[result.name] = (
                    value.shape,
                    value.dtype,
                    value.device,
                )
            if one_pass:
                sums.update(step.parameter_grads.sums)
                step.parameter_grads.sums.clear()
            return results

        def differentiate(
            step: Step, grads: Sequence[Tensor | None], keep: bool
        ) -> None:
            if not one_pass:
                HeadExecutor(step, index, call, held).backward(grads, keep=keep)
                return
            (scale,) = [g for g in grads if g is not None]
            step.unit_scales[index] = scale
            for name, total in sums.items():
                factor = scale.to(total.dtype)
                step.parameter_grads.sums[name] = (
                    total * factor if keep else total.mul_(factor)
                )
            if not keep:
                sums.clear()

        state = differentiable_state([call])
        return Stage(
            label="head",
            inputs=state,
            summed=state,
            run=run,
            differentiate=differentiate,
            input_grad=lambda step, name: step.parameter_grads.take(
                name, step.inputs[name]
            ),
        )

    def outputs(self, step: Step, named: dict[str, Tensor]) -> list[Any]:
        program, whole = self.program, {}
        if program.epilogue is not None:
            values = program.epilogue({**step.inputs, **step.vectors, **named})
            whole = dict(zip(program.epilogue_outputs, values, strict=True))
        flat = []
        for spec in program.outputs:
            if spec.kind is OutputKind.CONSTANT:
                flat.append(spec.constant)
            elif spec.kind is OutputKind.DROPPED:
                flat.append(self.make_dropped(spec, step))
            elif spec.kind is OutputKind.TOKEN:
                flat.append(named[spec.name])
            else:
                flat.append(whole[spec.name])
        return flat
