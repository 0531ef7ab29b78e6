"""Graph values for sizes, taken from the inputs' shapes (known before anything is computed)."""

from __future__ import annotations

import operator

import sympy
import torch
from torch.fx import Graph, Node

from ..graph import is_tensor, size_expr, value_of
from .base import insert_call, refuse

aten = torch.ops.aten


def find_size(graph: Graph, wanted: sympy.Expr, like: Node) -> Node | None:
    """An input's size that equals ``wanted``: a SymInt input, or a new sym_size call."""
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        if (
            isinstance(value_of(node), torch.SymInt)
            and value_of(node).node.expr == wanted
        ):
            return node
        if is_tensor(node):
            for dim, have in enumerate(value_of(node).shape):
                if size_expr(have) == wanted:
                    return insert_call(graph, aten.sym_size.int, (node, dim), {}, like)
    return None


def size_of_expr(graph: Graph, expr: sympy.Expr, like: Node) -> Node | int:
    """A value for ``expr``: a sum of products of input sizes and integers; else CantChunk."""
    if expr.is_Integer:
        return int(expr)
    found = find_size(graph, expr, like)
    if found is not None:
        return found
    if expr.is_Mul or expr.is_Add:
        combine = operator.mul if expr.is_Mul else operator.add
        result: Node | int | None = None
        for part in expr.args:
            value = size_of_expr(graph, part, like)
            if result is None:
                result = value
            elif isinstance(result, int) and isinstance(value, int):
                result = combine(result, value)
            else:
                result = insert_call(graph, combine, (result, value), {}, like)
        assert result is not None
        return result
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 1:
        base = size_of_expr(graph, expr.base, like)
        result = base
        for _ in range(int(expr.exp) - 1):
            result = insert_call(graph, operator.mul, (result, base), {}, like)
        return result
    raise refuse(like, f"computes with the size {expr}", "use plain dimension sizes")
