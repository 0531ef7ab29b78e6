"""Questions about nodes that mask graphs are made of."""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from ..graph import is_tensor, size_expr, value_of

# Pointwise operators, and operators that only change the dtype, the device or the layout,
# which do not carry the pointwise tag.
POINTWISE = frozenset(
    "where masked_fill __and__ __or__ __xor__ __lshift__ __rshift__ logical_and "
    "logical_or logical_xor floor_divide rsub true_divide divide multiply subtract "
    "absolute negative clip square less less_equal greater greater_equal not_equal "
    "to _to_copy type_as contiguous clone detach alias lift_fresh lift_fresh_copy".split()
)
# Views through which a two-axis input is read in place.
INPUT_VIEWS = frozenset(
    "slice select transpose permute unsqueeze squeeze detach alias t mT".split()
)


def op_name(node: Node) -> str:
    """``"expand"`` for ``aten.expand.default``; ``""`` for anything but a torch op."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return ""


def with_meta(copy: Node, like: Node) -> Node:
    for key in ("val", "stack_trace"):
        if key in like.meta:
            copy.meta[key] = like.meta[key]
    return copy


def is_pointwise(node: Node) -> bool:
    name = op_name(node)
    if not name or not is_tensor(node) or node.target._schema.is_mutable:
        return False
    tags = node.target.tags
    random = torch.Tag.nondeterministic_seeded in tags
    return not random and (torch.Tag.pointwise in tags or name in POINTWISE)


def is_input_view(node: Node) -> bool:
    """Whether ``node`` is a graph input or attribute, or reads one in place."""
    while op_name(node) in INPUT_VIEWS:
        node = node.args[0]
    return node.op in ("placeholder", "get_attr")


def storage_of(node: Node) -> Node:
    """The node that owns the memory ``node`` may look at."""
    while op_name(node):
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None or not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


def mutated_storages(graph: Graph) -> set[Node]:
    found: set[Node] = set()
    for node in graph.nodes:
        if op_name(node) and node.target._schema.is_mutable:
            found.update(storage_of(x) for x in node.all_input_nodes[:1])
    return found


def shape_of(node: Node) -> list[sympy.Expr]:
    return [size_expr(size) for size in value_of(node).shape]
