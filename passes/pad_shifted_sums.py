"""Let a sum over ``f(logits[:, :-1], labels[:, 1:])`` see the whole sequence.

In: a sum whose rows come, token by token, from slices that drop the first or last tokens: log
probabilities per sequence, a z-loss, losses per token that are weighted and summed. Out: the same
sum over all tokens, with zeros in the rows that were dropped, so that its parts over chunks add up.

The chain between slices and sum is made again for all tokens. Slices that keep other tokens than
those of the hidden states (labels are shifted by one) are rolled into place. The rows that were
dropped are zeroed at both ends: in the sum, and in the hidden states, so that what they compute,
even if it is not a number, reaches neither the sum nor a gradient. With parameters inside the chain
(an LM head after the slice) that holds only while nothing in the chain can leave the numbers.

Contract: only where every operator of the new chain is proved tokenwise; then its rows are those of
the old one. Anything else is left alone. ``pad_shifted_losses`` has the mean and sum losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import Graph, Node

from .._torch_private import ShapeGuardError
from ..errors import CantChunk
from ..graph import CapturedGraph, NodeKind, TokenAxis, is_tensor, size_expr, value_of
from .base import GraphPass, insert_call, insert_from, refuse
from .find_token_axes import SIZE_ARGUMENTS, TokenAnalysis, find_token_axes
from .pad_shifted_losses import has_part, token_slice
from .sizes import size_of_expr
from .token_rules import op_name

aten = torch.ops.aten
# Finite arguments may give infinities or no number, in the value or its derivative.
RISKY = frozenset(
    "log log1p log2 log10 logit exp exp2 expm1 pow float_power sqrt rsqrt reciprocal acos asin "
    "acosh atanh tan xlogy special_xlogy norm linalg_vector_norm std var prod cumprod lgamma "
    "digamma binary_cross_entropy kl_div sinh cosh".split()
)
DIVISIONS = ("div", "true_divide", "divide", "remainder", "fmod")


@dataclass(frozen=True, slots=True)
class ShiftedSum:
    """A sum; ``before`` and ``after``: tokens dropped of the hidden states its rows come from."""

    node: Node
    symbol: sympy.Symbol
    before: int
    after: int


class PadShiftedSums(GraphPass):
    name = "pad_shifted_sums"

    def find(self, captured: CapturedGraph) -> Iterable[ShiftedSum]:
        for node in captured.module.graph.nodes:
            if node.op != "call_function" or op_name(node) != "sum":
                continue
            for symbol in captured.token_symbols:
                match = shifted_sum(node, symbol)
                if match is not None:
                    yield match
                    break

    def apply(self, captured: CapturedGraph, match: ShiftedSum) -> None:
        node, graph = match.node, captured.module.graph
        chain = _Chain(graph, match)
        try:
            with graph.inserting_before(node):
                rows = chain.whole(node.args[0])
        except (CantChunk, ShapeGuardError):
            return  # sizes that are only equal for the part
        analysis = find_token_axes(graph, captured.token_symbols)
        axes = analysis.axes.get(rows, ())
        proved = all(is_proved(n, analysis) for n in chain.made.values())
        if len(axes) != 1 or not proved or chain.may_spoil_parameters():
            return
        with graph.inserting_before(node):
            kept = kept_rows(graph, rows, axes[0], match)
            zeroed = insert_from(graph, aten.where.ScalarOther, (kept, rows, 0), node)
        node.args = (zeroed, *node.args[1:])


def is_proved(node: Node, analysis: TokenAnalysis) -> bool:
    known = (NodeKind.TOKENWISE, NodeKind.VECTOR)
    return analysis.kinds[node] in known and node not in analysis.reasons


def shifted_sum(node: Node, symbol: sympy.Symbol) -> ShiftedSum | None:
    """The match for a sum with a gradient over rows that are a part of the sequence, or None."""
    rows = node.args[0]
    if not node.meta.get("needs_grad", False) or not has_part(rows, symbol):
        return None
    if has_part(node, symbol):
        return None
    bounds, pending, seen = set(), [rows], set()
    while pending:
        x = pending.pop()
        if x in seen or not is_tensor(x) or not has_part(x, symbol):
            continue
        seen.add(x)
        if x.op != "call_function":
            return None
        found = token_slice(x, symbol)
        if found is None:
            pending.extend(x.all_input_nodes)
        elif x.meta.get("needs_grad", False):
            bounds.add(found)
    if len(bounds) != 1:
        return None
    before, after = bounds.pop()
    return ShiftedSum(node, symbol, before, after)


@dataclass(slots=True)
class _Chain:
    """Makes the chain again for all tokens; raises CantChunk where that has no meaning."""

    graph: Graph
    match: ShiftedSum
    made: dict[Node, Node] = field(default_factory=dict)
    placed: dict[Node, Node] = field(default_factory=dict)

    def whole(self, node: Node) -> Node:
        if not is_tensor(node) and not isinstance(value_of(node), (tuple, list)):
            return node
        if is_tensor(node) and not has_part(node, self.match.symbol):
            return node
        found = token_slice(node, self.match.symbol) if is_tensor(node) else None
        if found is not None:
            return self.in_place(node, found)
        if node not in self.made:
            self.made[node] = self.again(node)
        return self.made[node]

    def in_place(self, part: Node, dropped: tuple[int, int]) -> Node:
        """The sliced tensor, rolled so that its kept rows are those of the hidden states."""
        if part in self.placed:
            return self.placed[part]
        source, shift = part.args[0], self.match.before - dropped[0]
        if sum(dropped) != self.match.before + self.match.after:
            raise self.refused(part)
        dim = int(part.args[1]) if len(part.args) > 1 else 0
        made = source
        if part.meta.get("needs_grad", False):
            axis = TokenAxis(dim=dim, symbol=self.match.symbol)
            kept = kept_rows(self.graph, source, axis, self.match)
            args = (kept, source, 0)
            made = insert_from(self.graph, aten.where.ScalarOther, args, part)
        elif shift != 0:
            args = (source, [shift], [dim])
            made = insert_call(self.graph, aten.roll.default, args, {}, part)
        self.placed[part] = made
        return made

    def may_spoil_parameters(self) -> bool:
        """Whether a row of zeros may give a parameter inside the chain no number as gradient."""
        symbol, inside = self.match.symbol, False
        for node in self.made:
            inside = inside or any(
                x.meta.get("needs_grad", False) and not has_part(x, symbol)
                for x in node.all_input_nodes
                if is_tensor(x)
            )
        return inside and any(
            op_name(n) in RISKY
            or (op_name(n) in DIVISIONS and is_tensor_node(n.args[1]))
            for n in self.made
        )

    def again(self, node: Node) -> Node:
        sizes = [x for x in node.all_input_nodes if self.is_number(x)]
        if sizes and op_name(node) not in SIZE_ARGUMENTS:
            raise self.refused(node)  # computes with the number of tokens that are left
        if not any(not self.is_number(x) for x in node.all_input_nodes):
            raise self.refused(node)

        def new_arg(x: Node) -> Node | int:
            if not self.is_number(x):
                return self.whole(x)
            symbol, dropped = self.match.symbol, self.match.before + self.match.after
            expr = size_expr(value_of(x)).subs(symbol, symbol + dropped)
            return size_of_expr(self.graph, sympy.expand(expr), node)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), new_arg)
        made = insert_call(self.graph, node.target, args, kwargs, node)
        made.meta["needs_grad"] = node.meta.get("needs_grad", False)
        return made

    def is_number(self, node: Node) -> bool:
        return isinstance(value_of(node), (torch.SymInt, torch.SymFloat, torch.SymBool))

    def refused(self, node: Node) -> CantChunk:
        return refuse(node, "a part of the tokens", "nothing: it runs whole")


def is_tensor_node(value: object) -> bool:
    return isinstance(value, Node) and is_tensor(value)


def kept_rows(graph: Graph, rows: Node, axis: TokenAxis, match: ShiftedSum) -> Node:
    """True where a row was kept, shaped to broadcast along ``axis`` of ``rows``."""

    def call(target: object, *args: object, **kwargs: object) -> Node:
        made = insert_call(graph, target, args, kwargs, rows)
        made.meta["needs_grad"] = False
        return made

    length = size_of_expr(graph, axis.symbol, rows)
    device = value_of(rows).device
    place = call(aten.arange.default, length, device=device)
    kept = call(aten.ge.Scalar, place, match.before)
    if match.after:
        last = call(aten.sub.Tensor, call(aten.flip.default, place, [0]), match.after)
        kept = call(aten.logical_and.default, kept, call(aten.ge.Scalar, last, 0))
    if not axis.plain:
        sizes = [
            size_of_expr(graph, size, rows)
            for size in (axis.outer, axis.symbol, axis.inner)
        ]
        row = call(aten.unsqueeze.default, call(aten.unsqueeze.default, kept, 0), -1)
        kept = call(aten.expand.default, row, sizes)
        kept = call(aten.flatten.using_ints, kept)
    for _ in range(value_of(rows).dim() - 1 - axis.dim):
        kept = call(aten.unsqueeze.default, kept, -1)
    return kept
