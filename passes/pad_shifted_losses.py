"""Let a loss over ``logits[:, :-1]`` and ``labels[:, 1:]`` see the whole sequence.

In: a classification loss whose rows are a part of the token axis: scores come, token by token,
from a slice that drops the first ``a`` and last ``b`` tokens. Out: the same loss over all tokens,
with the labels padded by ``ignore_index`` where rows were dropped; such rows add nothing to a sum
or mean.

Contract: only for reductions "mean" and "sum" and integer labels; every operator
between the slice and the loss is one that works row by row. Anything else is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Graph, Node

from ..graph import CapturedGraph, is_tensor, size_expr, value_of
from .base import GraphPass, insert_call
from .find_token_axes import SIZE_ARGUMENTS
from .find_totals import LOSSES
from .sizes import size_of_expr
from .token_rules import arg, op_name

aten = torch.ops.aten
LOSS_IGNORE_INDEX = -100
VIEWS = frozenset("view reshape _unsafe_view flatten unsqueeze squeeze".split())
ROW_BY_ROW = VIEWS | frozenset(
    "linear to _to_copy contiguous clone transpose permute tanh".split()
)


class _Unsuitable(Exception):
    """The chain between slice and loss is not one this pass rewrites."""


@dataclass(frozen=True, slots=True)
class ShiftedLoss:
    node: Node
    symbol: sympy.Symbol
    before: int
    after: int


class PadShiftedLosses(GraphPass):
    name = "pad_shifted_losses"
    leaves_pure = False  # it runs before normalize

    def find(self, captured: CapturedGraph) -> Iterable[ShiftedLoss]:
        for node in captured.module.graph.nodes:
            if node.op == "call_function" and op_name(node) in LOSSES:
                for symbol in captured.token_symbols:
                    match = shifted_loss(node, symbol)
                    if match is not None:
                        yield match
                        break

    def apply(self, captured: CapturedGraph, match: ShiftedLoss) -> None:
        node, graph = match.node, captured.module.graph
        with graph.inserting_before(node):
            replay = _Replay(graph, match)
            scores = replay.scores(node.args[0])
            labels = replay.labels(node.args[1])
        node.args = (scores, labels, *node.args[2:])


def shifted_loss(node: Node, symbol: sympy.Symbol) -> ShiftedLoss | None:
    """The match for one loss, or None. Pure: the chain is walked, nothing is made."""
    labels = node.args[1]
    if int(arg(node, 3, "reduction", 1)) == 0:
        return None
    if value_of(labels).is_floating_point():
        return None
    try:
        bounds = find_slices(node.args[0], symbol)
        if len(bounds) != 1:
            return None
        before, after = bounds.pop()
        label_source(labels, symbol, before + after)
    except _Unsuitable:
        return None
    return ShiftedLoss(node, symbol, before, after)


def has_part(node: Node, symbol: sympy.Symbol) -> bool:
    """Whether a dimension is s less a constant (times other sizes)."""
    return any(
        symbol in expr.free_symbols
        and expr.is_polynomial(symbol)
        and expr.subs(symbol, 0) != 0
        for expr in map(size_expr, value_of(node).shape)
    )


def token_slice(node: Node, symbol: sympy.Symbol) -> tuple[int, int] | None:
    """(tokens dropped in front, at the end) of a slice of a whole token axis."""
    if op_name(node) != "slice" or arg(node, 4, "step", 1) != 1:
        return None
    dim = int(arg(node, 1, "dim", 0))
    whole, part = (size_expr(value_of(x).shape[dim]) for x in (node.args[0], node))
    start = arg(node, 2, "start") or 0
    dropped = whole - part
    if (
        whole != symbol
        or not dropped.is_Integer
        or not isinstance(start, int)
        or start < 0
    ):
        return None
    return (start, int(dropped) - start) if 0 <= start <= dropped else None


def find_slices(node: Node, symbol: sympy.Symbol) -> set[tuple[int, int]]:
    """The slices the rows of ``node`` come from; every path to one must work row by row."""
    if not is_tensor(node) or not has_part(node, symbol):
        return set()
    if node.op != "call_function":
        raise _Unsuitable
    found = token_slice(node, symbol)
    if found is not None:
        return {found}
    if not works_by_row(node, symbol):
        raise _Unsuitable
    sources = [x for x in node.all_input_nodes if is_tensor(x) and has_part(x, symbol)]
    if not sources:
        raise _Unsuitable
    return set().union(*(find_slices(x, symbol) for x in sources))


def works_by_row(node: Node, symbol: sympy.Symbol) -> bool:
    name = op_name(node)
    if name not in SIZE_ARGUMENTS and not all(map(is_tensor, node.all_input_nodes)):
        return False  # computes with the number of tokens that are left
    if name in ("softmax", "log_softmax"):
        size = size_expr(value_of(node).shape[int(node.args[1])])
        return symbol not in size.free_symbols
    if name in ("layer_norm", "rms_norm"):
        return all(isinstance(size, int) for size in node.args[1])
    if name in VIEWS and any(
        isinstance(a, Node) and not is_tensor(a) for a in node.all_input_nodes
    ):
        return True
    tags = getattr(node.target, "tags", ())
    return name in ROW_BY_ROW or torch.Tag.pointwise in tags


def label_source(labels: Node, symbol: sympy.Symbol, dropped: int) -> Node:
    """Behind views: the labels with the token part alone in one dimension."""
    node = labels
    while True:
        if any(size_expr(s) == symbol - dropped for s in value_of(node).shape):
            return node
        if node.op != "call_function" or op_name(node) not in ROW_BY_ROW:
            raise _Unsuitable
        node = node.args[0]


class _Replay:
    """Makes the chain again for all tokens."""

    def __init__(self, graph: Graph, match: ShiftedLoss) -> None:
        self.graph = graph
        self.symbol = match.symbol
        self.match = match
        self.dropped = match.before + match.after
        self.ignored = int(arg(match.node, 4, "ignore_index", LOSS_IGNORE_INDEX))
        self.made: dict[Node, Node] = {}

    def scores(self, node: Node) -> Node:
        if not is_tensor(node) or not has_part(node, self.symbol):
            return node
        if token_slice(node, self.symbol) is not None:
            return node.args[0]
        if node not in self.made:
            self.made[node] = self.again(node, self.scores)
        return self.made[node]

    def labels(self, node: Node) -> Node:
        part = self.symbol - self.dropped
        dims = [d for d, s in enumerate(value_of(node).shape) if size_expr(s) == part]
        if dims:
            parts = [self.ignored_rows(node, dims[0], n) for n in self.counts]
            pieces = [x for x in (parts[0], node, parts[1]) if x is not None]
            return insert_call(
                self.graph, aten.cat.default, (pieces, dims[0]), {}, node
            )
        return self.again(node, self.labels)

    @property
    def counts(self) -> tuple[int, int]:
        return self.match.before, self.match.after

    def ignored_rows(self, like: Node, dim: int, count: int) -> Node | None:
        """``count`` labels that are ignored, shaped to join ``like`` along ``dim``."""
        if count == 0:
            return None
        shape: list[Node | int] = [
            count if d == dim else size_of_expr(self.graph, size_expr(s), like)
            for d, s in enumerate(value_of(like).shape)
        ]
        options = {"dtype": value_of(like).dtype, "device": value_of(like).device}
        return insert_call(
            self.graph, aten.full.default, (shape, self.ignored), options, like
        )

    def again(self, node: Node, source: Callable[[Node], Node]) -> Node:
        def new_arg(x: Node) -> Node | int:
            if is_tensor(x):
                return source(x) if has_part(x, self.symbol) else x
            expr = size_expr(value_of(x)).subs(self.symbol, self.symbol + self.dropped)
            return size_of_expr(self.graph, sympy.expand(expr), node)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), new_arg)
        made = insert_call(self.graph, node.target, args, kwargs, node)
        made.meta["needs_grad"] = node.meta.get("needs_grad", False)
        return made
