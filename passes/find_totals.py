"""Which sums over all tokens are totals: parts over chunks that add up.

In: a call no rule proved tokenwise, and the axes of its inputs. Out: whether the sum over the whole
sequence is the sum of what the same call gives on chunks: losses with reduction "sum", ``sum``,
histograms between fixed bounds, and rows added into a table of zeros that has no token axis (tokens
per expert).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from ..graph import NodeKind, is_tensor
from .token_rules import NotTokenwise, RuleContext, arg, op_name
from .token_rules_math import loss_rows

if TYPE_CHECKING:
    from .find_token_axes import TokenAnalysis

LOSSES = ("cross_entropy_loss", "nll_loss_nd", "nll_loss")
ZEROS = ("zeros", "new_zeros", "zeros_like")


def is_total(ctx: RuleContext, node: Node) -> bool:
    """A sum whose parts over chunks add up: a summed loss, or a sum over dims with the
    token one."""
    if not is_tensor(node) or any(ctx.has_symbol(size) for size in ctx.shape(node)):
        return False
    name = op_name(node)
    if name in LOSSES and int(arg(node, 3, "reduction", 1)) == 2:
        try:
            axes = loss_rows(ctx, node.args[0], node.args[1])
        except NotTokenwise:
            return False
        return len(axes) == 1
    if any(x in ctx.facts for x in node.all_input_nodes):
        return False
    if name in ("scatter_add", "index_add"):
        return adds_rows_to_zeros(ctx, node)
    if name == "histc" and not has_fixed_bounds(node):
        return False
    others = [x for x in node.all_input_nodes if x is not node.args[0]]
    return name in ("sum", "histc") and len(ctx.of(node.args[0])) == 1 and not others


def has_fixed_bounds(node: Node) -> bool:
    """Without bounds, a histogram takes those of its values."""
    low, high = arg(node, 2, "min", 0), arg(node, 3, "max", 0)
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float))
    return numbers and low < high


def adds_rows_to_zeros(ctx: RuleContext, node: Node) -> bool:
    """``zeros(E).scatter_add(0, expert, value)`` over a vector of tokens (or rows of them)."""
    table, dim, index, rows = node.args[:4]
    if node.args[4:] or node.kwargs.get("alpha", 1) != 1 or int(dim) != 0:
        return False
    if table.op != "call_function" or op_name(table) not in ZEROS or ctx.of(table):
        return False
    axes = ctx.of(index)
    return len(axes) == 1 and axes[0].dim == 0 and ctx.of(rows) == axes


def demote_used_totals(analysis: TokenAnalysis, graph: Graph) -> None:
    """A total that feeds tokenwise work again is a mixer: its group runs whole."""
    kinds = analysis.kinds
    for node in reversed(list(graph.nodes)):
        if kinds[node] in (NodeKind.TOTAL, NodeKind.EPILOGUE) and any(
            kinds[user] is NodeKind.MIXER for user in node.users
        ):
            kinds[node] = NodeKind.MIXER
            analysis.reasons.setdefault(node, "is a sum over all tokens used per token")
