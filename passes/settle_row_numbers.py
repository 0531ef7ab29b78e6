"""Write inverse permutations and token numbers of sorted rows from the permutation alone.

In: the normalized graph. Out: the same integers, without counting along the token axis, so that a
chunk can compute them from its own rows (``token_rules_rows``):

- ``inverse[permutation] = arange(n)`` becomes ``argsort(permutation)``;
- ``arange(tokens)``, every number k times in a row, taken at ``permutation``, becomes
  ``permutation // k``.

Contract: only where the permutation is a ``sort`` or ``argsort`` of a vector; values are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from ..graph import CapturedGraph, size_expr, value_of
from .base import GraphPass, insert_call
from .token_rules import arg, op_name

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RowNumbers:
    node: Node
    write: Callable[[Node], Node]


class SettleRowNumbers(GraphPass):
    name = "settle_row_numbers"

    def find(self, captured: CapturedGraph) -> Iterable[RowNumbers]:
        for node in captured.module.graph.nodes:
            if node.op != "call_function":
                continue
            if inverted(node) is not None:
                yield RowNumbers(node, argsort_of)
            elif slots_of_tokens(node) is not None:
                yield RowNumbers(node, token_numbers)

    def apply(self, captured: CapturedGraph, match: RowNumbers) -> None:
        with captured.module.graph.inserting_before(match.node):
            new = match.write(match.node)
        match.node.replace_all_uses_with(new)
        match.node.graph.erase_node(match.node)


def argsort_of(node: Node) -> Node:
    permutation = inverted(node)
    return insert_call(node.graph, aten.argsort.default, (permutation,), {}, node)


def token_numbers(node: Node) -> Node:
    found = slots_of_tokens(node)
    assert found is not None
    permutation, slots = found
    return insert_call(
        node.graph, aten.floor_divide.default, (permutation, slots), {}, node
    )


def inverted(node: Node) -> Node | None:
    """The permutation that ``node`` writes ``arange`` at, in a vector of the same length."""
    if op_name(node) == "index_put" and len(node.args[1]) == 1:
        base, (numbers,), values = node.args[:3]
        adds = arg(node, 3, "accumulate", False)
    elif op_name(node) == "scatter" and len(node.args) == 4:
        (base, _, numbers, values), adds = node.args, False
    else:
        return None
    if adds or not is_permutation(numbers) or not isinstance(values, Node):
        return None
    size = size_expr(value_of(numbers).shape[0])
    shape = [size_expr(s) for s in value_of(base).shape]
    if shape != [size] or counted(values) != size:
        return None
    return numbers if value_of(node).dtype is torch.int64 else None


def is_permutation(node: object) -> bool:
    """Whether ``node`` is the permutation that sorts a vector."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if op_name(node) == "getitem":
        return node.args[1] == 1 and op_name(node.args[0]) == "sort" and is_vector(node)
    return op_name(node) == "argsort" and is_vector(node)


def is_vector(node: Node) -> bool:
    return value_of(node).dim() == 1


def counted(node: Node) -> sympy.Expr | None:
    """n if ``node`` is ``arange(n)`` in integers."""
    if node.op != "call_function" or op_name(node) != "arange" or not is_vector(node):
        return None
    overload = node.target._overloadname
    if overload == "default":
        end = node.args[0]
    elif overload == "start" and node.args[0] == 0:
        end = node.args[1]
    elif overload == "start_step" and node.args[0] == 0 and node.args[2:] == (1,):
        end = node.args[1]
    else:
        return None
    if value_of(node).dtype is not torch.int64 or isinstance(end, float):
        return None
    return size_expr(value_of(node).shape[0])


def slots_of_tokens(node: Node) -> tuple[Node, int] | None:
    """(permutation, k) if ``node`` is ``[0, 0, .., 1, 1, ..][permutation]``, k of each."""
    if op_name(node) != "index" or len(node.args[1]) != 1:
        return None
    (numbers,) = node.args[1]
    if not is_permutation(numbers) or not is_vector(node.args[0]):
        return None
    repeated = node.args[0]
    tokens = repeated_tokens(repeated)
    if tokens is None:
        return None
    rows = size_expr(value_of(repeated).shape[0])
    slots = sympy.cancel(rows / tokens)
    same = rows == size_expr(value_of(numbers).shape[0])
    return (numbers, int(slots)) if same and slots.is_Integer else None


def repeated_tokens(node: Node) -> sympy.Expr | None:
    """n if ``node`` is ``arange(n)`` with every number the same number of times in a row."""
    if node.op != "call_function":
        return None
    if op_name(node) == "repeat_interleave" and isinstance(node.args[1], int):
        return counted(node.args[0])
    if op_name(node) in ("reshape", "view", "flatten", "contiguous", "clone"):
        return column_of_tokens(node.args[0])
    return counted(node)


def column_of_tokens(node: Node) -> sympy.Expr | None:
    """n if ``node`` is ``arange(n)[:, None]``, made wider along the last dimension or not."""
    while node.op == "call_function" and value_of(node).dim() == 2:
        name, x = op_name(node), node.args[0]
        if name == "expand" or (name == "repeat" and list(node.args[1])[0] == 1):
            node = x
        elif name in ("contiguous", "clone"):
            node = x
        elif name in ("unsqueeze", "reshape", "view"):
            shape = [size_expr(s) for s in value_of(node).shape]
            tokens = counted(x)
            return tokens if tokens is not None and shape == [tokens, 1] else None
        else:
            return None
    return None
