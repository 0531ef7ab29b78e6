"""Sums over a part of the tokens, written as sums over all of them.

``x[:, 0]`` (a class token), ``x[:, 1:].mean(1)`` (the mean of the others) and
``x[arange(B), last]`` (the last token that is no padding) read a part of the token axis. The sum of
the whole with zeros at the other tokens is the same number, and a sum over all tokens is one of
parts: it can be computed chunk by chunk.
"""

from __future__ import annotations

import operator

import sympy
import torch
from torch.fx import Node

from ..graph import size_expr, value_of
from .base import insert_call
from .sizes import size_of_expr
from .token_rules import arg, op_name

aten = torch.ops.aten
Symbols = frozenset[sympy.Symbol]


def is_token_pick(node: Node, symbols: Symbols) -> bool:
    """``x[:, 0]`` of hidden states: one token of the sequence."""
    return (
        op_name(node) == "select"
        and isinstance(node.args[2], int)
        and node.meta.get("needs_grad", False)
        and size_expr(value_of(node.args[0]).shape[node.args[1]]) in symbols
    )


def is_row_pick(node: Node, symbols: Symbols) -> bool:
    """``x[torch.arange(B), place]`` of hidden states: one token of each sequence."""
    if node.target is not aten.index.Tensor or len(node.args[1]) != 2:
        return False
    x, (rows, places) = node.args
    if rows is None or places is None or not node.meta.get("needs_grad", False):
        return False
    sizes = [size_expr(s) for s in value_of(x).shape]
    counts = op_name(rows) == "arange" and len(rows.args) == 1
    return (
        counts
        and sizes[1] in symbols
        and value_of(places).dtype is torch.int64
        and [size_expr(value_of(i).shape[0]) for i in (rows, places)] == sizes[:1] * 2
        and rank(rows) == rank(places) == 1
    )


def is_sum_of_part(node: Node, symbols: Symbols) -> bool:
    """``x[:, 1:].sum(1)`` of hidden states."""
    dims = arg(node, 1, "dim")
    return (
        node.target is aten.sum.dim_IntList
        and token_part(node.args[0], symbols)
        and int(arg(node.args[0], 1, "dim", 0))
        in [d % rank(node.args[0]) for d in dims]
    )


def token_part(node: Node, symbols: Symbols) -> bool:
    """Whether a value is a slice (with a number as its start) of hidden states along the tokens."""
    if node.op != "call_function" or op_name(node) != "slice":
        return False
    whole, dim = node.args[0], int(arg(node, 1, "dim", 0))
    start, step = arg(node, 2, "start"), arg(node, 4, "step", 1)
    return (
        step == 1
        and (start is None or (isinstance(start, int) and start >= 0))
        and node.meta.get("needs_grad", False)
        and size_expr(value_of(whole).shape[dim]) in symbols
    )


def rank(node: Node) -> int:
    return value_of(node).dim()


def pick_as_sum(node: Node) -> tuple[Node, list[Node]]:
    """(the result, nodes that have a gradient) for a pick, inserted where the graph inserts."""
    graph, (x, dim, place) = node.graph, node.args
    dim %= rank(x)
    first: Node | int = place
    if place < 0:
        size = size_of_expr(graph, size_expr(value_of(x).shape[dim]), node)
        first = insert_call(graph, operator.add, (size, place), {}, node)
    zeros = keep_tokens(node, x, dim, first, 1)
    total = insert_call(graph, aten.sum.dim_IntList, (zeros, [dim]), {}, node)
    return total, [zeros, total]


def row_pick_as_sum(node: Node) -> tuple[Node, list[Node]]:
    """The same for a token per row, whose number may count from the end."""
    graph, (x, (_, places)) = node.graph, node.args

    def call(target: object, *args: object, **kwargs: object) -> Node:
        return insert_call(graph, target, args, kwargs, node)

    size = size_of_expr(graph, size_expr(value_of(x).shape[1]), node)
    negative = call(aten.lt.Scalar, places, 0)
    wrapped = call(aten.add.Scalar, places, size)
    places = call(aten.where.self, negative, wrapped, places)
    numbers = call(aten.arange.default, size, device=value_of(x).device)
    other = call(aten.ne.Tensor, numbers, call(aten.unsqueeze.default, places, -1))
    for _ in range(rank(x) - 2):
        other = call(aten.unsqueeze.default, other, -1)
    zeros = call(aten.masked_fill.Scalar, x, other, 0)
    total = call(aten.sum.dim_IntList, zeros, [1])
    return total, [zeros, total]


def whole_of_part(node: Node, part: Node) -> Node:
    """The sequence ``part`` is a slice of, with zeros outside of it."""
    dim = int(arg(part, 1, "dim", 0)) % rank(part)
    count = size_of_expr(node.graph, size_expr(value_of(part).shape[dim]), node)
    start = arg(part, 2, "start") or 0
    return keep_tokens(node, part.args[0], dim, start, count)


def keep_tokens(
    node: Node, x: Node, dim: int, start: Node | int, count: Node | int
) -> Node:
    """``x`` with zeros but at ``count`` tokens from ``start``."""
    graph = node.graph

    def call(target: object, *args: object, **kwargs: object) -> Node:
        return insert_call(graph, target, args, kwargs, node)

    size = size_of_expr(graph, size_expr(value_of(x).shape[dim]), node)
    numbers = call(aten.arange.default, size, device=value_of(x).device)
    if count == 1:
        other = call(aten.ne.Scalar, numbers, start)
    else:
        shifted = numbers if start == 0 else call(aten.sub.Scalar, numbers, start)
        before = call(aten.lt.Scalar, shifted, 0)
        after = call(aten.ge.Scalar, shifted, count)
        other = call(aten.logical_or.default, before, after)
    for _ in range(rank(x) - 1 - dim):
        other = call(aten.unsqueeze.default, other, -1)
    made = call(aten.masked_fill.Scalar, x, other, 0)
    made.meta["needs_grad"] = x.meta.get("needs_grad", False)
    return made
