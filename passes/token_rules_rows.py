"""Token rules of routing: tokens sorted by expert, worked on in groups, and put back.

A mixture of experts sorts its (token, slot) rows by expert number, so that each expert's rows lie
together. That mixes tokens, and yet the whole is tokenwise: sort, work row by row, and put every
row back. These rules, and ``token_rules_routing`` for what reads them, prove it, with two things
the other rules carry along:

- *sorted rows*: an axis with an ``order`` (see :class:`TokenAxis`). Row j holds what belongs to
  row ``permutation[j]``; a rule that works row by row keeps it like any token axis.
- *facts* about integers that count rows: row numbers of the same token (the permutation, and its
  quotient by the slots per token), places in the sorted order (the inverse permutation), rows per
  expert, and where each expert's rows end. Such integers differ from chunk to chunk, so only the
  rules here may read them: a lookup of rows by row numbers, a sum of rows into their tokens, a
  product in groups that end where the experts' rows end.

Contract: what leaves is in token order and its row t needs rows t only. Sorted rows and facts mean
something inside one chunk, so they are never stored between regions; if anything but these rules
reads one, the sort is given up (``find_token_axes`` marks it a mixer as a whole). Dropping rows by
their place in the sorted order, ranks inside an expert, neighbours after the sort and choosing
tokens by expert all fail here, because they read places or parts of the sorted axis.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from ..graph import TokenAxis, value_of
from .token_rules import (
    RULES,
    NotTokenwise,
    Rule,
    RuleContext,
    arg,
    not_over_tokens,
    op_name,
    pointwise_rule,
    quotient,
    rule,
)

EXACT_COUNTS = (torch.float32, torch.float64, torch.int32, torch.int64)
SAME_ELEMENTS = frozenset(
    "reshape view flatten unflatten contiguous clone unsqueeze squeeze transpose permute t".split()
)
FACT_RULES: dict[str, Rule] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sorted:
    """A sort of rows laid out as ``rows`` by the values of ``key``."""

    node: Node
    key: Node
    rows: TokenAxis
    ascending: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SortResult:
    """The pair (values, permutation) that ``root`` returns."""

    root: Node


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNumber:
    """Numbers of rows of the same token, of the layout of ``rows``; ``bijective``: it is the
    permutation of ``root`` itself, so that no row comes twice."""

    root: Node
    rows: TokenAxis
    bijective: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in the order of ``root`` each row is: the inverse permutation."""

    root: Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How many rows of ``key`` have each of the values 0, 1, ...; ``ends``: their running sum."""

    root: Node
    key: Node
    ends: bool = False


Fact = SortResult | RowNumber | Place | Counts


def fact_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators with an input that is a fact."""

    def register(fn: Rule) -> Rule:
        for name in names:
            FACT_RULES[name] = fn
        return fn

    return register


def roots_of(ctx: RuleContext, node: Node) -> set[Node]:
    """The sorts and counts that a value's meaning depends on; empty for values in token order."""
    found = {ctx.sorts[axis.order].node for axis in ctx.of(node) if axis.order}
    if node in ctx.facts:
        found.add(ctx.facts[node].root)
    return found


# sorting ----------------------------------------------------------------------


@rule("sort", "argsort")
def sort(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """Along the only axis of a vector of rows: the result is sorted rows. Else along a
    dimension."""
    x = node.args[0]
    dim = int(arg(node, 1, "dim", -1))
    axes = ctx.of(x)
    if ctx.rank(x) != 1 or not axes or axes[0].order:
        not_over_tokens(ctx, x, [dim], op_name(node))
        return axes
    if node in ctx.given_up:
        raise NotTokenwise(f"sort runs over the token axis: {ctx.given_up[node]}")
    ctx.sorts[node.name] = Sorted(
        node=node,
        key=same_elements(ctx, x),
        rows=axes[0],
        ascending=not arg(node, 2, "descending", False),
    )
    if op_name(node) == "sort":
        ctx.facts[node] = SortResult(root=node)
    else:
        ctx.facts[node] = permutation_of(node, axes[0])
    return (replace(axes[0], order=node.name),)


def permutation_of(root: Node, rows: TokenAxis) -> RowNumber:
    return RowNumber(root=root, rows=rows, bijective=True)


@fact_rule(operator.getitem.__name__)
def sort_result(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    fact = ctx.facts[node.args[0]]
    if not isinstance(fact, SortResult):
        raise NotTokenwise("takes a part of row numbers")
    if node.args[1] == 1:
        ctx.facts[node] = permutation_of(fact.root, ctx.sorts[fact.root.name].rows)
    return ctx.of(node.args[0])


@fact_rule("argsort")
def inverse(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """The argsort of a permutation is its inverse: a place for every row, in token order."""
    fact = ctx.facts[node.args[0]]
    (axis,) = ctx.of(node.args[0])
    own_order = isinstance(fact, RowNumber) and axis.order == fact.root.name
    if not (own_order and fact.bijective and ctx.rank(node) == 1):
        raise NotTokenwise("sorts row numbers")
    if arg(node, 2, "descending", False):
        raise NotTokenwise("sorts row numbers from the last")
    ctx.facts[node] = Place(root=fact.root)
    return (ctx.sorts[axis.order].rows,)


# integers that count rows -----------------------------------------------------


@fact_rule(
    "reshape",
    "view",
    "flatten",
    "unsqueeze",
    "squeeze",
    "expand",
    "contiguous",
    "clone",
)
def same_numbers(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    fact = ctx.facts[node.args[0]]
    if not isinstance(fact, (RowNumber, Place)):
        raise NotTokenwise("reshapes rows per expert")
    axes = RULES[op_name(node)](ctx, node)
    ctx.facts[node] = fact
    return axes


@fact_rule("to", "_to_copy")
def same_numbers_cast(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    fact, dtype = ctx.facts[node.args[0]], value_of(node).dtype
    exact = EXACT_COUNTS if isinstance(fact, Counts) else (torch.int32, torch.int64)
    if dtype not in exact or isinstance(fact, SortResult):
        raise NotTokenwise(f"makes row numbers {dtype}")
    ctx.facts[node] = fact
    return ctx.of(node.args[0])


@fact_rule("floor_divide", "div")
def token_of_slot(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """The row number of a (token, slot) pair over the slots per token is its token's."""
    fact, divisor = ctx.facts.get(node.args[0]), node.args[1]
    rounds = op_name(node) == "floor_divide" or node.kwargs.get("rounding_mode") in (
        "floor",
        "trunc",
    )
    if not isinstance(fact, RowNumber) or not isinstance(divisor, int) or not rounds:
        raise NotTokenwise("computes with row numbers")
    inner = quotient(fact.rows.inner, sympy.Integer(divisor)) if divisor > 0 else None
    if inner is None:
        raise NotTokenwise("divides row numbers by other than the slots per token")
    ctx.facts[node] = RowNumber(
        root=fact.root,
        rows=replace(fact.rows, inner=inner),
        bijective=fact.bijective and divisor == 1,
    )
    return ctx.of(node.args[0])


def same_elements(ctx: RuleContext, node: Node) -> Node:
    """Behind views, exact casts and sorts: what holds the same integers, in whatever order."""
    while node.op == "call_function":
        name, x = op_name(node), node.args[0] if node.args else None
        if name in SAME_ELEMENTS:
            node = x
        elif name in ("to", "_to_copy") and value_of(node).dtype in EXACT_COUNTS:
            node = x
        elif name == "getitem" and node.args[1] == 0 and op_name(x) == "sort":
            node = x.args[0]
        elif (
            name == "index"
            and len(node.args[1]) == 1
            and is_permutation(ctx, node.args[1][0])
        ):
            node = x
        else:
            break
    return node


def is_permutation(ctx: RuleContext, node: Node | None) -> bool:
    fact = ctx.facts.get(node)
    return isinstance(fact, RowNumber) and fact.bijective


def never_negative(node: Node) -> bool:
    """Whether integers are proved to be numbers from 0: indices an operator chose, or clamped."""
    while node.op == "call_function":
        name, x = op_name(node), node.args[0]
        if name == "getitem":
            return node.args[1] == 1 and op_name(x) in ("topk", "sort", "max", "min")
        if name in ("argmax", "argmin", "argsort"):
            return True
        if name in ("clamp", "clip", "clamp_min"):
            low = arg(node, 1, "min")
            return isinstance(low, int) and low >= 0
        if name == "remainder":
            return isinstance(node.args[1], int) and node.args[1] > 0
        if name not in SAME_ELEMENTS | {"to", "_to_copy", "slice", "select", "expand"}:
            return False
        if name in ("to", "_to_copy") and value_of(node).dtype not in EXACT_COUNTS:
            return False
        node = x
    return False


@rule("histc")
def histogram(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """``histc(key, E, 0, E - 1)`` of integers counts each of 0 .. E - 1."""
    x, bins = node.args[0], arg(node, 1, "bins", 100)
    low, high = arg(node, 2, "min", 0), arg(node, 3, "max", 0)
    whole = isinstance(bins, int) and bins > 1 and low == 0 and high == bins - 1
    key = same_elements(ctx, x)
    if node in ctx.given_up:
        raise NotTokenwise(f"counts over the token axis: {ctx.given_up[node]}")
    if (
        not whole
        or value_of(key).is_floating_point()
        or value_of(x).dtype not in EXACT_COUNTS
    ):
        raise NotTokenwise("counts values over the token axis")
    ctx.facts[node] = Counts(root=node, key=key)
    return ()


def counts_of_one_hot(ctx: RuleContext, node: Node) -> bool:
    """Whether ``node`` is ``one_hot(key, E).sum(all dims but the last)``; if so, it counts."""
    x, dims = node.args[0], arg(node, 1, "dim")
    if node in ctx.given_up or op_name(x) != "one_hot" or not ctx.of(x):
        return False
    rank = ctx.rank(x)
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    if {d % rank for d in dims} != set(range(rank - 1)) or ctx.rank(node) != 1:
        return False
    ctx.facts[node] = Counts(root=node, key=same_elements(ctx, x.args[0]))
    return True


@fact_rule("cumsum")
def ends(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    fact = ctx.facts[node.args[0]]
    if (
        not isinstance(fact, Counts)
        or fact.ends
        or value_of(node).dtype not in EXACT_COUNTS
    ):
        raise NotTokenwise("sums row numbers")
    ctx.facts[node] = Counts(root=fact.root, key=fact.key, ends=True)
    return ()


# Reading sorted rows that are not numbers needs no rule of its own, but an empty vector like the
# permutation holds nothing of it.
for _name in ("empty_like", "zeros_like", "ones_like"):
    FACT_RULES[_name] = pointwise_rule
