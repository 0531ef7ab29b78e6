"""Graph values for sizes, taken from the inputs' shapes (known before anything is computed)."""

from __future__ import annotations

import operator

import sympy
import torch
from torch.fx import Graph, Node

from .._torch_private import write_size
from ..graph import is_tensor, size_expr, value_of
from ..kernels.reference import as_length
from .base import insert_call, refuse, set_value

aten = torch.ops.aten


def find_size(graph: Graph, wanted: sympy.Expr, like: Node) -> Node | None:
    """An input's size that equals ``wanted``: a SymInt input, or a new sym_size call; or a token
    count that ``name_lengths`` gave that symbol."""
    for node in graph.nodes:
        if node.target is as_length and size_expr(value_of(node)) == wanted:
            return node
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
    """A value for ``expr`` in input sizes, computed where calls are inserted; else CantChunk."""
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
    sources = {symbol: find_size(graph, symbol, like) for symbol in expr.free_symbols}
    if None in sources.values():
        raise refuse(
            like, f"computes with the size {expr}", "use plain dimension sizes"
        )
    for node in write_size(graph, expr, sources):
        result = node
        set_value(node, like)
    return result
