"""Find the LM head by what it feeds, not by its name.

In: the analyzed graph. Out: the :class:`Head`: the last linear on the way to a loss summed over
tokens, or, without a loss, to an output of the graph that is per token.

Contract: pure. The head's rows are never needed by attention, so it may run in pieces of its own
length, forward and backward in one pass.

Limits: one head; of several candidates the widest is taken (the others run in the same region).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from ..graph import Head, NodeKind, size_expr, value_of
from .find_token_axes import TokenAnalysis
from .token_rules import op_name

PRODUCTS = ("linear", "matmul", "mm", "addmm")


def find_head(
    graph: Graph,
    analysis: TokenAnalysis,
    totals: Sequence[Node],
    outputs: Sequence[Node],
) -> Head | None:
    """The head in ``graph``, or None. ``outputs`` are the per-token outputs to be returned."""
    starts = [x for total in totals for x in total.all_input_nodes] or list(outputs)
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    while starts:
        node = starts.pop()
        if node in seen or analysis.kinds[node] is not NodeKind.TOKENWISE:
            continue
        seen.add(node)
        if op_name(node) in PRODUCTS and node not in analysis.light:
            found.setdefault(node)
            continue
        starts.extend(node.all_input_nodes)
    # What follows the head may feed nothing but the end: else it is part of the blocks.
    heads = [n for n in found if feeds_only_end(n, analysis)]
    if not heads:
        return None
    linear = max(heads, key=width)
    hidden = next(
        x
        for x in linear.all_input_nodes
        if analysis.axes.get(x, ()) and x not in analysis.light
    )
    return Head(linear=linear, hidden=hidden, vocab_size=width(linear))


def width(node: Node) -> int:
    size = size_expr(value_of(node).shape[-1])
    return int(size) if size.is_Integer else 0


def feeds_only_end(node: Node, analysis: TokenAnalysis) -> bool:
    """Whether no attention or mixer reads what follows ``node``."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            kind = analysis.kinds[user]
            if kind in (NodeKind.ATTENTION, NodeKind.MIXER):
                return False
            if kind is NodeKind.TOKENWISE and user not in seen:
                seen.add(user)
                pending.append(user)
    return True


def after_head(head: Head | None) -> set[Node]:
    """The head linear and everything that follows it."""
    if head is None:
        return set()
    found, pending = {head.linear}, [head.linear]
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                pending.append(user)
    return found
