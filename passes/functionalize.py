"""Write in-place operators of the captured graph in their functional form.

In: a call that writes into a tensor, ``x.add_(y)`` or ``x[:, 1:] = y`` (a ``copy_`` into a view).
Out: the value it computes, laid into the tensor the view was taken of; every later use of that
tensor, or of a view of it, reads the new value.

Contract: refused (CantChunk) are writes into graph inputs, and through views that have no scatter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..graph import value_of
from ..kernels.reference import as_tokens
from .base import insert_call, refuse
from .token_rules import arg, op_name

aten = torch.ops.aten
UNDONE_BY_VIEW = "view _unsafe_view squeeze view_as unflatten reshape flatten".split()
# Calls that give a view or a copy, as it happens.
MAY_COPY = ("reshape", "contiguous", "to", "flatten", "type_as", "_to_copy")


def is_mutation(node: Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
    )


def is_view(node: Node) -> bool:
    """Whether the node's result shares memory with its input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        if getattr(target, "__name__", "") == "getitem":
            return is_view(node.args[0])  # parts of topk are tensors of their own
        # A user's autograd.Function may return its input, which autograd makes a view.
        return target is as_tokens or op_name(node) == "custom_function"
    if op_name(node) in MAY_COPY:
        return may_share(node)
    aliases = any(r.alias_info is not None for r in target._schema.returns)
    return aliases or op_name(node) == "expand_as"


def may_share(node: Node) -> bool:
    """For a call that gives a view or a copy: what it gave at capture (sizes are guarded)."""
    ours, theirs = (value_of(x).untyped_storage() for x in (node, node.args[0]))
    return ours._cdata == theirs._cdata


def write_out_of_place(node: Node) -> None:
    """Replace one in-place call; see the module docstring."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    change = f"write the {op_name(node)} out of place in the model"
    if not op_name(node).endswith("_") or not isinstance(node.args[0], Node):
        raise refuse(node, "writes into a tensor", change)
    chain = views_behind(node.args[0])
    base = chain[-1]
    if base.op != "call_function":
        raise refuse(node, "writes into an input", change)
    later = [
        view
        for view in family(base)
        if order[view] < order[node]
        and any(order[user] > order[node] for user in view.users)
    ]
    behind = [view for use in later for view in views_behind(use)[:-1]]
    for view in {*chain[:-1], *behind}:
        if not isinstance(view.target, torch._ops.OpOverload):
            reason = "writes into a tensor that a view of is used later"
            raise refuse(node, reason, change)
    with node.graph.inserting_before(node):
        new = written = functional_form(node, change)
        for view, source in zip(chain, chain[1:]):
            new = scatter(node, view, source, new, change)
        renewed = {base: new}
        for view in sorted(later, key=order.__getitem__):
            renew(view, renewed)
    for old, value in renewed.items():
        for user in list(old.users):
            if order.get(user, -1) > order[node]:
                user.replace_input_with(old, value)
    node.replace_all_uses_with(renewed.get(node.args[0], written))
    node.graph.erase_node(node)


def views_behind(node: Node) -> list[Node]:
    """``node``, what it is a view of, and so on to the tensor that is no view."""
    chain = [node]
    while chain[-1].op == "call_function" and is_view(chain[-1]):
        if is_mutation(chain[-1]):
            break
        chain.append(chain[-1].args[0])
    return chain


def family(base: Node) -> list[Node]:
    """``base``'s views, and the views of those."""
    found: dict[Node, None] = {}
    pending = [base]
    while pending:
        for user in pending.pop().users:
            first = user.args[0] if user.args else None
            view = (
                user.op == "call_function" and is_view(user) and not is_mutation(user)
            )
            if view and isinstance(first, Node) and user not in found:
                found.setdefault(user)
                pending.append(user)
    return list(found)


def renew(view: Node, renewed: dict[Node, Node]) -> Node:
    """The same view of the new value."""
    if view not in renewed:
        source = renew(view.args[0], renewed)
        made = insert_call(
            view.graph, view.target, (source, *view.args[1:]), dict(view.kwargs), view
        )
        renewed[view] = with_grad(made)
    return renewed[view]


def with_grad(node: Node) -> Node:
    node.meta["needs_grad"] = value_of(node).is_floating_point() and any(
        x.meta.get("needs_grad", False) for x in node.all_input_nodes
    )
    return node


def functional_form(node: Node, change: str) -> Node:
    """What the call writes, in the shape and dtype of its target."""
    name, target = op_name(node), node.args[0]
    wanted = value_of(target).dtype

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        return with_grad(insert_call(node.graph, op, args, kwargs, node))

    if name == "zero_":
        return call(aten.zeros_like.default, target)
    if name == "fill_" and not isinstance(node.args[1], Node):
        return call(aten.full_like.default, target, node.args[1])
    if name in ("copy_", "fill_"):
        source = node.args[1]
        if value_of(source).device != value_of(target).device:
            raise refuse(node, "copies between devices in place", change)
        if value_of(source).dtype != wanted:
            source = call(aten.to.dtype, source, wanted)
        return call(aten.expand_as.default, source, target)
    packet, overload = getattr(aten, name[:-1], None), node.target._overloadname
    if packet is None or overload not in packet.overloads():
        raise refuse(node, "has no out-of-place form", change)
    new = call(getattr(packet, overload), *node.args, **node.kwargs)
    return new if value_of(new).dtype == wanted else call(aten.to.dtype, new, wanted)


def scatter(node: Node, view: Node, source: Node, new: Node, change: str) -> Node:
    """``source`` with ``new`` in the place of its part ``view``."""
    name = op_name(view)

    def call(op: Any, *args: Any) -> Node:
        return with_grad(insert_call(node.graph, op, args, {}, node))

    if name in ("alias", "detach", "lift_fresh"):
        return new
    if name == "slice":
        dim, start = arg(view, 1, "dim", 0), arg(view, 2, "start")
        stop, step = arg(view, 3, "end"), arg(view, 4, "step", 1)
        return call(aten.slice_scatter.default, source, new, dim, start, stop, step)
    if name == "select":
        return call(aten.select_scatter.default, source, new, *view.args[1:3])
    if name in ("transpose", "t"):
        dims = view.args[1:] if name == "transpose" else (0, -1)
        return call(aten.transpose.int, new, *dims)
    if name == "permute":
        order = [d % len(view.args[1]) for d in view.args[1]]
        return call(
            aten.permute.default, new, [order.index(d) for d in range(len(order))]
        )
    if name == "unsqueeze":
        dim = view.args[1] % value_of(view).dim()
        return call(aten.squeeze.dim, new, dim)
    if name in ("contiguous", "to", "type_as", "_to_copy"):
        return new
    if name in UNDONE_BY_VIEW:
        return call(aten.view_as.default, new, source)
    raise refuse(node, f"writes through a {name}", change)
