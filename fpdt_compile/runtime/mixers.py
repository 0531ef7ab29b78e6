"""Mixers: operators that run whole, on gathered inputs, and whole values made of chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .chunks import cut, join_axis
from .program import MixerCall, OperandKind
from .sharing import gather_tokens, join_own, same_randomness
from .step import Step


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


def own_chunks(step: Step, name: str) -> list[int]:
    return step.own_chunks(step.program.axes[name].symbol)


def gather(step: Step, name: str) -> Tensor:
    """A whole tensor from its chunks (and from all ranks)."""
    if name in step.inputs and name not in step.local_inputs:
        return step.inputs[name].detach()
    own = join_own(step, name, {i: step.value(name, i) for i in own_chunks(step, name)})
    return gather_tokens(step, f"gathering {name}", own, step.program.axes[name])


def own_grad(step: Step, name: str) -> Tensor | None:
    """The gradient of this rank's tokens of a value from its chunks'; None if no rank has one."""
    found = {i: step.take_value_grad(name, i) for i in own_chunks(step, name)}
    present = any(grad is not None for grad in found.values())
    if step.parallel:
        label = f"gradient of {name}"
        count = torch.tensor([float(present)], device=step.ranks.device)
        present = bool(step.ranks.sum(label, count))
    if not present:
        return None
    pieces = {
        i: torch.zeros_like(step.value(name, i)) if grad is None else grad
        for i, grad in found.items()
    }
    return join_own(step, name, pieces)


def whole_grad(step: Step, name: str) -> Tensor | None:
    """The gradient of a whole value."""
    own = own_grad(step, name)
    if own is None:
        return None
    label = f"gathering the gradient of {name}"
    return gather_tokens(step, label, own, step.program.axes[name])


def scatter(step: Step, name: str, whole: Tensor) -> dict[int, Tensor]:
    """This rank's part of every chunk of a whole tensor."""
    axis = step.program.axes[name]
    bounds = step.own[axis.symbol]
    return {
        i: join_axis(cut(whole, axis, step.symbols, *bounds[i]), axis)
        for i in own_chunks(step, name)
    }


@contextlib.contextmanager
def repeated_randomness(step: Step, call: MixerCall) -> Iterator[None]:
    """The first run of a mixer in a step draws its random numbers; later runs draw the same."""
    device = next(
        (x.device for x in step.inputs.values() if isinstance(x, Tensor)),
        torch.device("cpu"),
    )
    states = step.random_states.get(call.name)
    if states is None:
        with same_randomness(step):
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
        for chunk, piece in scatter(step, result.name, whole).items():
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
            for chunk, piece in scatter(step, operand.name, grad).items():
                step.grads.add((operand.name, chunk), piece, owned=False)
        elif step.ranks.rank == 0:
            # A mixer runs whole on every rank; its parameters' gradients are summed over ranks.
            step.parameter_grads.add_dense(operand.name, step.whole(operand.name), grad)
