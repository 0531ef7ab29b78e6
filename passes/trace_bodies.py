"""Trace a region's body, and its recomputing backward, into plain ATen graphs.

In: a :class:`Region`. Out: graphs of ATen operators below autograd and autocast, symbolic in the
chunk length, in three forms:

- forward: the outputs;
- backward: recompute the outputs and differentiate them, in one graph, so that Inductor fuses
  recomputation with differentiation and nothing is saved between forward and backward;
- forward_backward: the same with the outputs returned, for a unit gradient of the one total.

Weight gradients that end in a matrix product leave the graph as the two factors, and embedding
gradients as rows and row numbers, so that the runtime adds them in place (``addmm_``,
``index_add_``) instead of forming one dense gradient per chunk.

Contract: the traced graph computes what the captured nodes compute under the autocast state of the
user's call, which Dynamo leaves implicit and these graphs make explicit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from .._torch_private import (
    FakeTensorMode,
    fake_with_symbolic_dims,
    make_fx,
    new_fake_mode,
    outside_tracing,
    symbol_hint,
)
from ..autocast import autocast_as
from ..errors import InvariantError
from ..graph import size_expr, value_of
from ..runtime.program import GradForm, GradSlot, Operand, OperandKind
from .extract_regions import Region

aten = torch.ops.aten
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
VIEWS = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.alias.default,
)


class BodyInterpreter(Interpreter):
    """Runs a body with each node under the autocast state and grad mode it was captured in."""

    def run_node(self, node: Node) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(autocast_as(node.meta.get("autocast")))
            if node.meta.get("grad_off", False):
                stack.enter_context(torch.no_grad())
            return super().run_node(node)


@dataclass(kw_only=True, slots=True)
class TracedBody:
    """One traced form: ``module`` maps the flat fake ``inputs`` (kept for Inductor) to results."""

    module: GraphModule
    inputs: list[Any]
    mode: FakeTensorMode
    num_outputs: int
    grad_slots: tuple[GradSlot, ...]


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """No autocast, no grad: what a trace starts from, whatever the caller's state is."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def fake_inputs(region: Region, length: int, mode: FakeTensorMode) -> list[Any]:
    """Fake operands for a chunk of ``length`` tokens, symbolic where the captured sizes are.

    Sizes of equal extent share a symbol, which is what makes c one symbol; so an extent that
    another symbol (the batch) has at this call is not taken for c.
    """
    taken = other_extents(region)
    while length in taken:
        length += 1
    made = []
    for operand, source in zip(region.operands, region.sources, strict=True):
        if operand.kind is OperandKind.SYMBOL:
            carrier = torch.empty(int(value_of(source).node.hint), device="meta")
            made.append(
                fake_with_symbolic_dims(mode, carrier, [0], source.name).shape[0]
            )
        else:
            made.append(fake_operand(operand, source, length, mode))
    return made


def other_extents(region: Region) -> set[int]:
    """Extents of the symbolic sizes of the operands other than the token dimension."""
    found: set[int] = set()
    for operand, source in zip(region.operands, region.sources, strict=True):
        if operand.kind is OperandKind.SYMBOL:
            found.add(int(value_of(source).node.hint))
            continue
        for dim, size in enumerate(value_of(source).shape):
            if operand.axis is not None and operand.axis.dim == dim:
                found |= {
                    hint_of(part, source)
                    for part in (operand.axis.outer, operand.axis.inner)
                    if not part.is_Integer
                }
            elif not size_expr(size).is_Integer:
                found.add(hint(size))
    return found


def fake_operand(
    operand: Operand, source: Node, length: int, mode: FakeTensorMode
) -> torch.Tensor:
    value = value_of(source)
    sizes, dynamic = [], []
    for dim, size in enumerate(value.shape):
        axis = (
            operand.axis
            if operand.axis is not None and operand.axis.dim == dim
            else None
        )
        if axis is None:
            sizes.append(hint(size))
            if not size_expr(size).is_Integer:
                dynamic.append(len(sizes) - 1)
            continue
        parts = [(length, True)]
        if not axis.plain:
            outer, inner = (
                (hint_of(part, source), not part.is_Integer)
                for part in (axis.outer, axis.inner)
            )
            parts = [outer, *parts, inner]
        for part, symbolic in parts:
            if symbolic:
                dynamic.append(len(sizes))
            sizes.append(part)
    if operand.kind is OperandKind.STATE:
        strides = [hint(s) for s in value.stride()]
        meta = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    else:
        meta = torch.empty(sizes, dtype=value.dtype, device="meta")
        if operand.dim_order is not None:
            order = operand.dim_order
            back = [order.index(d) for d in range(len(order))]
            meta = meta.permute(order).contiguous().permute(back)
    with mode:
        fake = fake_with_symbolic_dims(mode, meta, dynamic, source.name)
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=value.dtype, device=value.device
        )


def hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def hint_of(expr: Any, source: Node) -> int:
    if expr.is_Integer:
        return int(expr)
    return symbol_hint(value_of(source), expr)


def trace_forward(region: Region, length: int) -> TracedBody:
    """The body's outputs as a graph."""

    def forward(*inputs: Any) -> list[torch.Tensor]:
        return list(BodyInterpreter(region.module).run(*inputs))

    return trace(region, length, forward, [], num_outputs=len(region.outputs))


def trace_backward(region: Region, length: int) -> TracedBody:
    """Inputs: operands, then a gradient per output that needs one. Results: the gradients."""
    wanted = [i for i, o in enumerate(region.operands) if o.needs_grad]
    used = [i for i, n in enumerate(region.outputs) if n.meta.get("needs_grad", False)]

    def backward(*inputs: Any) -> list[torch.Tensor | None]:
        operands, grads = inputs[: len(region.operands)], inputs[len(region.operands) :]
        leaves, outputs = run_with_grad(region, operands, wanted)
        pairs = [
            (outputs[i], grad)
            for i, grad in zip(used, grads)
            if outputs[i].requires_grad
        ]
        return list(
            torch.autograd.grad(
                [x for x, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
            )
        )

    return trace(region, length, backward, used, num_outputs=0)


def trace_forward_backward(region: Region, length: int) -> TracedBody:
    """Outputs, then gradients for a gradient of one of the single differentiable output."""
    wanted = [i for i, o in enumerate(region.operands) if o.needs_grad]
    (total,) = [
        i for i, n in enumerate(region.outputs) if n.meta.get("needs_grad", False)
    ]

    def both(*inputs: Any) -> list[torch.Tensor | None]:
        leaves, outputs = run_with_grad(region, inputs, wanted)
        one = torch.ones_like(outputs[total])
        grads = torch.autograd.grad([outputs[total]], leaves, [one], allow_unused=True)
        return [x.detach() for x in outputs] + list(grads)

    return trace(region, length, both, [], num_outputs=len(region.outputs))


def run_with_grad(
    region: Region, operands: Sequence[Any], wanted: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    flat = [x.detach() if isinstance(x, torch.Tensor) else x for x in operands]
    for i in wanted:
        flat[i].requires_grad_()
    with torch.enable_grad():
        outputs = list(BodyInterpreter(region.module).run(*flat))
    return [flat[i] for i in wanted], outputs


def trace(
    region: Region,
    length: int,
    fn: Callable[..., list[Any]],
    grads_of: Sequence[int],
    *,
    num_outputs: int,
) -> TracedBody:
    mode = new_fake_mode()
    with outside_tracing(mode), plain_modes():
        inputs = fake_inputs(region, length, mode)
        if grads_of:
            with mode:
                outputs = BodyInterpreter(region.module).run(*inputs)
                inputs += [grad_like(outputs[i]) for i in grads_of]
        with mode:
            module = make_fx(fn)(*inputs)
    module.graph.eliminate_dead_code()
    check_types(module, region, num_outputs)
    slots = split_gradients(module, region, num_outputs)
    module.recompile()
    return TracedBody(
        module=module,
        inputs=inputs,
        mode=mode,
        num_outputs=num_outputs,
        grad_slots=slots,
    )


def check_types(module: GraphModule, region: Region, num_outputs: int) -> None:
    """A body's outputs have the types that were captured: a gradient has the type of its value, and
    what reads the value was traced for that type."""
    (output,) = module.graph.find_nodes(op="output")
    for node, source in zip(output.args[0][:num_outputs], region.outputs):
        made, wanted = value_of(node).dtype, value_of(source).dtype
        if made != wanted:
            raise InvariantError(f"{source.name} is {wanted}, its body makes {made}")


def grad_like(output: torch.Tensor) -> torch.Tensor:
    """A contiguous fake gradient: the runtime hands gradients over contiguous."""
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)


def split_gradients(
    module: GraphModule, region: Region, num_outputs: int
) -> tuple[GradSlot, ...]:
    """Rewrite the gradient results into slots (see GradForm); returns them in operand order."""
    (output,) = [n for n in module.graph.nodes if n.op == "output"]
    results = list(output.args[0])
    outputs, grads = results[:num_outputs], results[num_outputs:]
    wanted = [i for i, o in enumerate(region.operands) if o.needs_grad]
    slots = []
    flat: list[Any] = []
    for index, grad in zip(wanted, grads):
        is_state = region.operands[index].kind is OperandKind.STATE
        if grad is None:
            slots.append(GradSlot(operand=index, form=GradForm.NONE))
            continue
        parts, form, padding = [grad], GradForm.DENSE, None
        if is_state and (factors := matrix_factors(module, grad, output)) is not None:
            parts, form = list(factors), GradForm.PRODUCT
        elif is_state and grad.target is aten.embedding_dense_backward.default:
            rows, numbers, _, padding, by_frequency = grad.args
            if not by_frequency:
                parts, form = [rows, numbers], GradForm.ROWS
        start = num_outputs + len(flat)
        flat.extend(parts)
        slots.append(
            GradSlot(
                operand=index,
                form=form,
                results=tuple(range(start, start + len(parts))),
                padding_row=padding if form is GradForm.ROWS and padding >= 0 else None,
            )
        )
    output.args = ([*outputs, *flat],)
    module.graph.eliminate_dead_code()
    return tuple(slots)


def matrix_factors(
    module: GraphModule, grad: Node, output: Node
) -> tuple[Node, Node] | None:
    """``grad = A @ B`` up to transposes and no-op views: (A, B), else None."""
    transposed, node = False, grad
    while node.op == "call_function" and len(node.users) == 1:
        if node.target in TRANSPOSES and value_of(node).dim() == 2:
            if node.target is not aten.permute.default or list(node.args[1]) == [1, 0]:
                transposed = not transposed
            node = node.args[0]
        elif node.target in VIEWS and list(value_of(node).shape) == list(
            value_of(node.args[0]).shape
        ):
            node = node.args[0]
        else:
            break
    if node.target is not aten.mm.default or len(node.users) != 1:
        return None
    a, b = node.args
    # Half-precision products are added to an fp32 sum, which addmm_ cannot do.
    if value_of(node).dtype not in (torch.float32, torch.float64):
        return None
    if not transposed:
        return a, b
    with module.graph.inserting_before(output):
        swapped = []
        for x in (b, a):
            new = module.graph.call_function(aten.t.default, (x,))
            new.meta["val"] = value_of(x).t()
            swapped.append(new)
    return swapped[0], swapped[1]
