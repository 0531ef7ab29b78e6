"""Token rules of what reads row numbers and counts of a sort; see ``token_rules_rows``.

A lookup of rows by row numbers sorts rows, or puts sorted rows back; a sum of rows into the rows of
their tokens does the latter too; a product in groups gives every row the matrix of its expert.
"""

from __future__ import annotations

from torch.fx import Node

from ..graph import TokenAxis, is_tensor
from .token_rules import NotTokenwise, RuleContext, arg, op_name
from .token_rules_rows import Counts, Place, RowNumber, fact_rule, never_negative

GROUPED = frozenset(("grouped_mm_fallback", "_grouped_mm"))
FACTORIES = frozenset(
    "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like "
    "empty_like".split()
)


@fact_rule(*GROUPED)
def grouped_product(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """Row j times the matrix of its expert, iff the rows are sorted by expert number from 0 and
    group e ends where the rows of expert e end."""
    x, weight, offsets = node.args[0], node.args[1], arg(node, 2, "offs")
    axes, fact = ctx.of(x), ctx.facts.get(offsets)
    if not isinstance(fact, Counts) or not fact.ends:
        raise NotTokenwise("its groups do not end where the experts' rows end")
    if x in ctx.facts or weight in ctx.facts or ctx.of(weight) or ctx.rank(weight) != 3:
        raise NotTokenwise("its matrices depend on tokens")
    if len(axes) != 1 or axes[0].dim != 0 or ctx.rank(x) != 2 or not axes[0].order:
        raise NotTokenwise("its rows are not sorted by expert")
    order = ctx.sorts[axes[0].order]
    if not order.ascending or order.key is not fact.key:
        raise NotTokenwise("its rows are sorted by something else than its groups")
    if not never_negative(fact.key):
        raise NotTokenwise("its expert numbers may be negative")
    if any(isinstance(extra, Node) for extra in node.args[3:]) or node.kwargs.get(
        "bias"
    ):
        raise NotTokenwise("a grouped product with a bias")
    return axes


def target_rows(
    ctx: RuleContext, numbers: object, x: Node, dim: int
) -> RowNumber | Place:
    """The fact that lets ``numbers`` address ``dim`` of ``x``; raises if it does not."""
    fact, axes = ctx.facts.get(numbers), ctx.of(x)
    if len(axes) != 1 or axes[0].dim != dim or x in ctx.facts:
        raise NotTokenwise("addresses a dimension that is not the rows")
    if isinstance(fact, RowNumber):
        if axes[0].at(0) == fact.rows or is_constant(x):
            return fact
        raise NotTokenwise("addresses rows by numbers of other rows")
    if isinstance(fact, Place) and axes[0].order == fact.root.name:
        return fact
    raise NotTokenwise("addresses rows by numbers of other rows")


def is_constant(node: Node) -> bool:
    return node.op == "call_function" and op_name(node) in FACTORIES


@fact_rule("index")
def rows_by_number(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """``x[permutation // slots]`` sorts rows, ``x[inverse]`` puts sorted rows back."""
    indices = list(node.args[1])
    if len(indices) != 1 or node.args[0] in ctx.facts:
        raise NotTokenwise("indexes by row numbers and something else")
    target_rows(ctx, indices[0], node.args[0], 0)
    return ctx.of(indices[0])


@fact_rule("index_select")
def select_by_number(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, dim, numbers = (
        node.args[0],
        int(node.args[1]) % ctx.rank(node.args[0]),
        node.args[2],
    )
    target_rows(ctx, numbers, x, dim)
    return tuple(axis.at(dim) for axis in ctx.of(numbers))


@fact_rule("gather")
def gather_by_number(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, dim, numbers = (
        node.args[0],
        int(node.args[1]) % ctx.rank(node.args[0]),
        node.args[2],
    )
    target_rows(ctx, numbers, x, dim)
    if [axis.dim for axis in ctx.of(numbers)] != [dim]:
        raise NotTokenwise("gathers rows into another dimension")
    return ctx.of(numbers)


@fact_rule("index_add", "scatter_add", "scatter", "scatter_reduce")
def rows_into_tokens(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """Every row is added to (or, by the permutation itself, written to) a row of its token."""
    base, dim, numbers = (
        node.args[0],
        int(node.args[1]) % ctx.rank(node.args[0]),
        node.args[2],
    )
    adds = op_name(node) != "scatter"
    return written_rows(ctx, node, base, dim, numbers, node.args[3], adds=adds)


@fact_rule("index_put")
def rows_put(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    indices = list(node.args[1])
    if len(indices) != 1:
        raise NotTokenwise("writes by row numbers and something else")
    adds = bool(arg(node, 3, "accumulate", False))
    return written_rows(ctx, node, node.args[0], 0, indices[0], node.args[2], adds=adds)


def written_rows(
    ctx: RuleContext,
    node: Node,
    base: Node,
    dim: int,
    numbers: Node,
    rows: Node,
    *,
    adds: bool,
) -> tuple[TokenAxis, ...]:
    if any(x in ctx.facts for x in (base, rows)):
        raise NotTokenwise("writes row numbers")
    fact = target_rows(ctx, numbers, base, dim)
    if not isinstance(fact, RowNumber) or not (adds or fact.bijective):
        raise NotTokenwise("which of several rows is kept depends on their order")
    at = tuple(axis.at(dim) for axis in ctx.of(numbers))
    if not is_tensor(rows) or len(at) != 1 or ctx.of(rows) != at:
        raise NotTokenwise("writes rows that are in another order than their numbers")
    return (fact.rows.at(dim),)
