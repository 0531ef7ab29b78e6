"""Masks that are flattened over batch and heads, and unflattened again, without the detour.

In: ``view(m, [B, H, q, k])`` of a mask ``m`` [B * H, q, k], as torch's own attention makes of
padding and attention masks. Out: the same arithmetic on [B, H, q, k], which tiles can be cut from.

Limits: pointwise operators on what was flattened from [B, H, ...] or broadcasts over it.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph import is_tensor, size_expr, value_of
from .base import insert_from
from .mask_nodes import is_pointwise
from .sizes import size_of_expr
from .token_rules import op_name

aten = torch.ops.aten
VIEWS = ("view", "reshape", "_unsafe_view", "unflatten")


def shape_of(node: Node) -> list:
    return [size_expr(size) for size in value_of(node).shape]


def unflattens(node: Node) -> bool:
    """Whether ``node`` views [B * H, ...] as [B, H, ...] and has no gradient."""
    if node.op != "call_function" or op_name(node) not in VIEWS:
        return False
    if node.meta.get("needs_grad", False) or value_of(node).dim() != 4:
        return False
    return splits_lead(node) and can_rise(node.args[0], node)


def splits_lead(node: Node) -> bool:
    old, new = shape_of(node.args[0]), shape_of(node)
    return len(old) == 3 and old[1:] == new[2:] and 1 not in new[:2]


def can_rise(node: Node, view: Node) -> bool:
    """Whether ``node`` can be written with the lead of ``view``."""
    if not is_tensor(node):
        return True
    shape = shape_of(node)
    if len(shape) < 3:
        return True
    if flattened(node, view) is not None:
        return True
    if len(shape) != 3 or node.op != "call_function":
        return len(shape) == 3 and shape[0] == 1
    if shape[0] == 1:
        return True
    return is_pointwise(node) and all(can_rise(x, view) for x in node.all_input_nodes)


def flattened(node: Node, view: Node) -> Node | None:
    """The [B, H, ...] tensor that ``node`` [B * H, ...] is a view of."""
    if node.op != "call_function" or op_name(node) not in (*VIEWS, "flatten"):
        return None
    x = node.args[0]
    same = is_tensor(x) and shape_of(x) == [*shape_of(view)[:2], *shape_of(node)[1:]]
    return x if same else None


def unflatten(view: Node) -> None:
    """Replace ``view``."""
    graph, done = view.graph, {}

    def risen(node: Node) -> Node:
        if node not in done:
            done[node] = rise(node)
        return done[node]

    def rise(node: Node) -> Node:
        if not is_tensor(node) or value_of(node).dim() < 3:
            return node
        source = flattened(node, view)
        if source is not None:
            return source
        if shape_of(node)[0] == 1:
            sizes = [1, *(size_of_expr(graph, size, view) for size in shape_of(node))]
            return insert_from(graph, aten.reshape.default, (node, sizes), view)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), risen)
        return insert_from(graph, node.target, args, node, **kwargs)

    with graph.inserting_before(view):
        made = risen(view.args[0])
    view.replace_all_uses_with(made)
    graph.erase_node(view)
