"""From Dynamo's graph to the captured graph every pass works on.

In: the GraphModule Dynamo hands to a backend. Out: a :class:`CapturedGraph` of pre-dispatch ATen
operators, in which ``aten.linear``, ``aten.scaled_dot_product_attention`` and friends are whole and
every size that depends on a sequence is an expression in that sequence's one symbol.

Contract: Dynamo's graph is not changed. Each node carries ``val`` (fake value), ``stack_trace``
(the user's line), ``autocast`` (the state its ops run under: Dynamo keeps the caller's implicit),
and ``needs_grad``. Higher-order ops are unfolded by ``retrace``.
"""

from __future__ import annotations

import operator

import sympy
import torch
from torch.fx import GraphModule, Node

from ._torch_private import (
    FakeTensor,
    SymMax,
    SymMin,
    graph_break_of,
    make_fx,
    preserve_node_meta,
    specializations,
    statically_known_true,
)
from .autocast import AutocastState, current_autocast
from .errors import CantChunk, InvariantError, Rejection
from .graph import CapturedGraph, is_tensor, size_expr, value_of
from .passes.find_token_axes import find_token_symbols
from .passes.functionalize import is_mutation
from .retrace import CUSTOM_KEY, Retracer
from .runtime.custom_function import CustomFunction


def capture(module: GraphModule) -> CapturedGraph:
    """Retrace Dynamo's ``module``; see the module docstring."""
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["example_value"] for n in inputs]
    requires_grad = tuple(
        isinstance(f, torch.Tensor) and f.requires_grad for f in fakes
    )
    mode = next((f.fake_mode for f in fakes if isinstance(f, FakeTensor)), None)
    if mode is None:
        return not_captured(module, requires_grad, NO_TENSOR)
    label_modes(module, current_autocast())
    unify_sizes([f for f in fakes if isinstance(f, torch.Tensor)])
    detached = [f.detach() if isinstance(f, torch.Tensor) else f for f in fakes]
    try:
        with mode, preserve_node_meta(), torch.no_grad():
            traced = make_fx(
                lambda *flat: Retracer(module).run(*flat),
                pre_dispatch=True,
                record_stack_traces=False,
            )(*detached)
    except CantChunk as error:
        return not_captured(module, requires_grad, error.rejection)
    graph = traced.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, source, needs in zip(placeholders, inputs, requires_grad, strict=True):
        node.meta["requires_grad"] = node.meta["needs_grad"] = needs
        node.meta["input_name"] = source.name
    for node in graph.nodes:
        if (
            node.op == "get_attr"
        ):  # a small constant the model's code wrote, like x[..., [-2]]
            node.meta["val"] = mode.from_tensor(getattr(traced, node.target))
        state = node.meta.get("custom", {}).get(CUSTOM_KEY, {})
        node.meta.update(state)
    propagate_needs_grad(traced)
    settle_sizes(traced)
    return CapturedGraph(
        module=traced,
        token_symbols=find_token_symbols(graph),
        requires_grad=requires_grad,
        grad_enabled=torch.is_grad_enabled(),
        specialized=tuple(specializations(module)),
        graph_break=graph_break_of(module),
    )


NO_TENSOR = Rejection(
    op="graph",
    source="unknown",
    reason="this part of the model has no tensor as an input",
    change="nothing, if another part holds the attentions",
)


def not_captured(
    module: GraphModule, requires_grad: tuple[bool, ...], why: Rejection
) -> CapturedGraph:
    """Dynamo's graph itself, with the reason why it is no more than that."""
    return CapturedGraph(
        module=module,
        token_symbols=(),
        requires_grad=requires_grad,
        grad_enabled=torch.is_grad_enabled(),
        refused=why,
        graph_break=graph_break_of(module),
    )


def unify_sizes(inputs: list[torch.Tensor]) -> None:
    """Let inputs of equal extent in a dimension share its symbol, with a guard that says so.

    Dynamo gives each marked input a symbol of its own; operators tie them together only where they
    can solve for one, so labels could keep another sequence length than the ids.
    """
    first: dict[tuple[int, int], torch.SymInt] = {}
    for value in inputs:
        if value.dim() < 2 or isinstance(value, torch.nn.Parameter):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                known = first.setdefault((dim, int(size.node.hint)), size)
                if known.node.expr != size.node.expr and not bool(known == size):
                    raise InvariantError(f"sizes {known} and {size} differ")


def settle_sizes(module: GraphModule) -> None:
    """Write a size the guards make equal to an input's, like ``n - max(0, n - s)``, as that."""
    known = {
        size_expr(size): size
        for node in module.graph.nodes
        if node.op == "placeholder" and is_tensor(node)
        for size in value_of(node).shape
        if size_expr(size).is_Symbol
    }
    writes = any(map(is_mutation, module.graph.nodes))
    for node in module.graph.nodes:
        if not is_tensor(node):
            continue
        value = value_of(node)
        shape = [settled(size, known) for size in value.shape]
        if any(a is not b for a, b in zip(shape, value.shape, strict=True)):
            stride = [settled(step, known) for step in value.stride()]
            with value.fake_mode:
                # Where tensors are written to, who shares memory with whom must stay visible; else
                # plain strides ask fewer questions about sizes.
                node.meta["val"] = (
                    value.as_strided(shape, stride)
                    if writes
                    else value.new_empty(shape)
                )
                node.meta["settled"] = True  # it no longer shares memory with others


def settled(
    size: int | torch.SymInt, known: dict[sympy.Symbol, torch.SymInt]
) -> int | torch.SymInt:
    expr = size_expr(size)
    if not expr.has(sympy.Max, sympy.Min, SymMax, SymMin):
        return size
    for symbol in expr.free_symbols:
        if symbol in known and statically_known_true(size == known[symbol]):
            return known[symbol]
    return size


def label_modes(
    module: GraphModule, autocast: AutocastState, grad_enabled: bool = True
) -> None:
    """Write the autocast state and grad mode in force at each node into its meta, starting from
    those of the call.

    Dynamo turns ``with torch.autocast(...)`` and ``with torch.no_grad()`` inside the model into
    enter/exit calls.
    """
    stack = [autocast]
    entered: dict[Node, int] = {}
    for node in module.graph.nodes:
        for x in node.all_input_nodes:
            child = getattr(module, x.target, None) if x.op == "get_attr" else None
            if isinstance(child, GraphModule):
                label_modes(child, stack[-1], grad_enabled)
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            device, dtype, enabled = node.args[0], node.args[1], node.args[2]
            if dtype is None:
                dtype = stack[-1].get(device, (False, None))[1]
            entered[node] = len(stack)
            stack.append({**stack[-1], device: (bool(enabled), dtype)})
        elif name == "_exit_autocast":
            del stack[entered[node.args[0]] :]
        elif name == "_set_grad_enabled":
            grad_enabled = bool(node.args[0])
        # "custom" is the field that a retrace copies to the nodes it makes.
        state = {"autocast": stack[-1], "grad_off": not grad_enabled}
        node.meta["custom"] = {**node.meta.get("custom", {}), CUSTOM_KEY: state}


def propagate_needs_grad(module: GraphModule) -> None:
    """Mark nodes whose value depends differentiably on an input that requires grad."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        values = value_of(node) if "val" in node.meta else None
        values = values if isinstance(values, (tuple, list)) else [values]
        floating = any(
            isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())
            for v in values
        )
        node.meta["needs_grad"] = (
            floating
            and not node.meta.get("grad_off", False)
            and node.target is not torch.ops.aten.detach.default
            and any(x.meta.get("needs_grad", False) for x in node.all_input_nodes)
            and not is_non_differentiable(node)
        )


def is_non_differentiable(node: Node) -> bool:
    """Whether the user's autograd.Function marked this output of it so."""
    source = node.args[0] if node.target is operator.getitem else None
    function = source.target if isinstance(source, Node) else None
    return (
        isinstance(function, CustomFunction)
        and node.args[1] in function.non_differentiable
    )
