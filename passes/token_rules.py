"""Per-operator rules: where the token axes of an output are, and whether that is tokenwise.

In: a node of the captured graph whose inputs' token axes are known. Out: the token axes of its
output, which is also the proof that output row t needs input rows t only. A rule that cannot
prove this raises :class:`NotTokenwise` with the reason; an operator without a rule is a mixer.

A rule sees shapes as sympy expressions. Two token axes (query x key) are carried along by the
pointwise and view rules, which is what makes mask graphs readable for ``analyze_masks``.

Limits: a token axis split by a view must keep ``[outer, s, inner]``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..graph import Axes, TokenAxis, is_tensor, size_expr, value_of

aten = torch.ops.aten
Rule = Callable[["RuleContext", Node], tuple[TokenAxis, ...]]
RULES: dict[str, Rule] = {}


class NotTokenwise(Exception):
    """Why a node could not be proved tokenwise."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators by packet name (``"linear"``)."""

    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def op_name(node: Node) -> str:
    """``"linear"`` for ``aten.linear.default``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return getattr(target, "__name__", str(target))


class RuleContext:
    """What a rule may ask about a node's inputs."""

    def __init__(
        self,
        symbols: Iterable[sympy.Symbol],
        axes: Axes,
        given_up: dict[Node, str] | None = None,
    ) -> None:
        self.symbols = frozenset(symbols)
        self.axes = axes
        # What routing needs; see token_rules_rows.
        self.sorts: dict[str, Any] = {}
        self.facts: dict[object, Any] = {}
        self.given_up: dict[Node, str] = given_up or {}

    def of(self, node: object) -> tuple[TokenAxis, ...]:
        return self.axes.get(node, ()) if isinstance(node, Node) else ()

    def shape(self, node: Node) -> list[sympy.Expr]:
        value = value_of(node)
        if isinstance(value, (tuple, list)):
            value = value[0]
        return [size_expr(size) for size in value.shape]

    def rank(self, node: Node) -> int:
        return len(self.shape(node))

    def has_symbol(self, expr: sympy.Expr) -> bool:
        return bool(self.symbols & expr.free_symbols)

    def axes_from_shape(self, shape: Sequence[sympy.Expr]) -> tuple[TokenAxis, ...]:
        """Axes of a tensor nothing is known about but its shape."""
        found = []
        for dim, size in enumerate(shape):
            if size in self.symbols:
                found.append(TokenAxis(dim=dim, symbol=size))
            elif self.has_symbol(size):
                raise NotTokenwise(f"dimension {dim} has size {size}")
        return tuple(found)


def arg(node: Node, index: int, name: str, default: object = None) -> object:
    """A call's argument by position or keyword."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def only_axes(ctx: RuleContext, node: Node, allowed: Sequence[object]) -> None:
    """All inputs but ``allowed`` must be without token axes."""
    for source in node.all_input_nodes:
        if source not in allowed and ctx.of(source):
            raise NotTokenwise(
                f"{source.name} has a token axis where a parameter is expected"
            )


def not_over_tokens(
    ctx: RuleContext, x: Node, dims: Sequence[int], what: str
) -> set[int]:
    """``dims`` (normalized) of ``x`` must hold no token axis."""
    rank = ctx.rank(x)
    normalized = {d % rank for d in dims} if rank else set()
    for axis in ctx.of(x):
        if axis.dim in normalized:
            raise NotTokenwise(
                f"{what} runs over the token axis (dimension {axis.dim})"
            )
    return normalized


def broadcast(
    ctx: RuleContext, node: Node, inputs: Sequence[Node]
) -> tuple[TokenAxis, ...]:
    """Axes of a pointwise operation with broadcasting."""
    rank = ctx.rank(node)
    found: dict[int, TokenAxis] = {}
    for x in inputs:
        shift = rank - ctx.rank(x)
        for axis in ctx.of(x):
            dim = axis.dim + shift
            moved = axis.at(dim)
            if found.setdefault(dim, moved) != moved:
                raise NotTokenwise(
                    "inputs are flattened over tokens in different orders"
                )
    for x in inputs:
        shift, shape = rank - ctx.rank(x), ctx.shape(x)
        mine = {axis.dim + shift for axis in ctx.of(x)}
        for dim in found:
            if dim >= shift and dim not in mine and shape[dim - shift] != 1:
                raise NotTokenwise(
                    f"{x.name} meets the token axis with another dimension"
                )
    return tuple(found[dim] for dim in sorted(found))


def tensor_inputs(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if is_tensor(x)]


def pointwise_rule(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    return broadcast(ctx, node, tensor_inputs(node))


# Composite operators that are pointwise but do not carry the tag.
for _name in (
    "to _to_copy type_as contiguous clone detach alias lift_fresh_copy __and__ __or__ __xor__ "
    "hardswish hardsigmoid erf native_dropout dropout feature_dropout rsub bitwise_not logical_and "
    "logical_or logical_xor logical_not _assert_tensor_metadata float_power numpy_T where "
    "masked_fill selu rrelu lift_fresh erfinv true_divide square relu6 floor_divide "
    "not_equal equal greater less greater_equal less_equal absolute negative "
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits multiply subtract divide "
    "clip zeros_like ones_like full_like empty_like conj resolve_conj"
).split():
    RULES[_name] = pointwise_rule


def quotient(product: sympy.Expr, part: sympy.Expr) -> sympy.Expr | None:
    """``product / part`` if that is whole, else None."""
    result = sympy.cancel(product / part)
    numerator, denominator = sympy.fraction(result)
    return numerator if denominator == 1 and result.is_integer else None


@rule(
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "view_as",
    "reshape_as",
)
def regroup(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """Any view that keeps the element order: find the dim that holds the same token stride.

    With L the elements before the token axis and R those after it, dim d of the output holds the
    axis iff the product of the dims before d divides L and that of the dims after divides R.
    """
    x = node.args[0]
    only_axes(ctx, node, node.args[:2])  # the second of view_as gives its shape only
    before, after = ctx.shape(x), ctx.shape(node)
    result = []
    for axis in ctx.of(x):
        left = sympy.Mul(*before[: axis.dim]) * axis.outer
        right = sympy.Mul(*before[axis.dim + 1 :]) * axis.inner
        for dim, size in enumerate(after):
            if axis.symbol not in size.free_symbols:
                continue
            if axis.order:  # sorted rows stay one dimension
                if size == before[axis.dim] and (
                    sympy.Mul(*after[:dim]) == sympy.Mul(*before[: axis.dim])
                ):
                    result.append(axis.at(dim))
                    break
                continue
            outer = quotient(left, sympy.Mul(*after[:dim]))
            inner = quotient(right, sympy.Mul(*after[dim + 1 :]))
            if outer is None or inner is None:
                continue
            if sympy.expand(outer * axis.symbol * inner - size) == 0:
                result.append(
                    TokenAxis(dim=dim, symbol=axis.symbol, outer=outer, inner=inner)
                )
                break
        else:
            raise NotTokenwise("the view cuts through the token axis")
    return tuple(result)


@rule("transpose", "swapaxes", "swapdims", "t", "mT", "permute", "movedim", "adjoint")
def permutation(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, name = node.args[0], op_name(node)
    rank = ctx.rank(x)
    order = list(range(rank))
    if name in ("t", "mT", "adjoint"):
        order[-2:] = reversed(order[-2:])
    elif name == "permute":
        order = [d % rank for d in node.args[1]]
    elif name == "movedim":
        source, target = node.args[1], node.args[2]
        source = [source] if isinstance(source, int) else list(source)
        target = [target] if isinstance(target, int) else list(target)
        rest = [d for d in range(rank) if d not in {s % rank for s in source}]
        for to, d in sorted((t % rank, s % rank) for s, t in zip(source, target)):
            rest.insert(to, d)
        order = rest
    else:
        a, b = node.args[1] % rank, node.args[2] % rank
        order[a], order[b] = order[b], order[a]
    moved = [axis.at(order.index(axis.dim)) for axis in ctx.of(x)]
    return tuple(sorted(moved, key=lambda axis: axis.dim))


@rule("expand", "expand_as", "broadcast_to")
def expand(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x = node.args[0]
    before, after = ctx.shape(x), ctx.shape(node)
    shift = len(after) - len(before)
    result = [axis.at(axis.dim + shift) for axis in ctx.of(x)]
    known = {axis.dim for axis in result}
    for dim, size in enumerate(after):
        if dim not in known and ctx.has_symbol(size):
            if size not in ctx.symbols:
                raise NotTokenwise(f"expands to {size} along dimension {dim}")
            result.append(TokenAxis(dim=dim, symbol=size))
    return tuple(sorted(result, key=lambda axis: axis.dim))


@rule("slice", "narrow")
def slice_rule(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x = node.args[0]
    dim = int(arg(node, 1, "dim", 0)) % ctx.rank(x)
    for axis in ctx.of(x):
        if axis.dim == dim and ctx.shape(x)[dim] != ctx.shape(node)[dim]:
            raise NotTokenwise("takes a part of the token axis")
    return ctx.of(x)


@rule("slice_scatter", "select_scatter")
def scatter_rule(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """``x`` with another tensor in a part of it; both have their rows at the same tokens."""
    x, part = node.args[:2]
    (dim,) = not_over_tokens(ctx, x, [int(arg(node, 2, "dim", 0))], op_name(node))
    axes = ctx.of(x)
    moved = tuple(
        a.at(a.dim - (a.dim > dim)) if op_name(node) == "select_scatter" else a
        for a in axes
    )
    if ctx.of(part) != moved:
        raise NotTokenwise("writes rows of another kind into the tensor")
    return axes


@rule("select", "unbind")
def drop_dim(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x = node.args[0]
    (dim,) = not_over_tokens(ctx, x, [int(arg(node, 1, "dim", 0))], op_name(node))
    return tuple(a.at(a.dim - (a.dim > dim)) for a in ctx.of(x))


@rule("chunk", "split", "split_with_sizes", "tensor_split", "glu")
def split_rule(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x = node.args[0]
    index, default = (1, -1) if op_name(node) == "glu" else (2, 0)
    not_over_tokens(ctx, x, [int(arg(node, index, "dim", default))], op_name(node))
    return ctx.of(x)


@rule("view_as_complex", "view_as_real")
def complex_view(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x = node.args[0]
    if op_name(node) == "view_as_complex":
        not_over_tokens(ctx, x, [-1], "view_as_complex")
    return ctx.of(x)


def getitem_rule(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    return ctx.of(node.args[0])


RULES[operator.getitem.__name__] = getitem_rule


@rule("cat", "concat", "concatenate", "stack")
def cat(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    tensors = list(node.args[0])
    dim = int(arg(node, 1, "dim", 0)) % ctx.rank(node)
    stacks = op_name(node) == "stack"
    axes = ctx.of(tensors[0])
    for x in tensors:
        if ctx.of(x) != axes:
            raise NotTokenwise("joins tensors whose token axes differ")
    if stacks:
        return tuple(a.at(a.dim + (a.dim >= dim)) for a in axes)
    if any(axis.dim == dim for axis in axes):
        raise NotTokenwise("concatenates along the token axis")
    return axes


@rule("repeat", "tile")
def repeat(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, repeats = node.args[0], list(node.args[1])
    shift = ctx.rank(node) - ctx.rank(x)
    repeats = [1] * (ctx.rank(node) - len(repeats)) + repeats
    result = []
    for axis in ctx.of(x):
        times = repeats[axis.dim + shift]
        if times != 1 and (axis.order or not isinstance(times, int)):
            raise NotTokenwise("repeats the token axis")
        outer = axis.outer * times  # one copy of all rows after the other
        result.append(replace(axis, dim=axis.dim + shift, outer=outer))
    if any(
        ctx.has_symbol(s)
        for d, s in enumerate(ctx.shape(node))
        if d not in {a.dim for a in result}
    ):
        raise NotTokenwise("repeats by the sequence length")
    return tuple(result)


@rule("repeat_interleave")
def repeat_interleave(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, dim = node.args[0], arg(node, 2, "dim")
    if dim is None and ctx.rank(x) == 1:
        dim = 0
    if dim is None or not isinstance(node.args[1], int):
        raise NotTokenwise("repeats a varying number of times")
    dim, times = int(dim) % ctx.rank(x), node.args[1]
    if any(axis.order and axis.dim == dim for axis in ctx.of(x)):
        raise NotTokenwise("repeats sorted rows")
    return tuple(
        replace(axis, inner=axis.inner * times) if axis.dim == dim else axis
        for axis in ctx.of(x)
    )


@rule(
    "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"
)
def factory(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """A constant: the same row at every token (empty's rows are nobody's to rely on)."""
    found = []
    for dim, size in enumerate(ctx.shape(node)):
        if ctx.has_symbol(size):
            (symbol, *more) = size.free_symbols & ctx.symbols
            outer = quotient(size, symbol)
            if more or outer is None or ctx.has_symbol(outer):
                raise NotTokenwise(f"dimension {dim} has size {size}")
            found.append(TokenAxis(dim=dim, symbol=symbol, outer=outer))
    return tuple(found)


@rule("arange")
def arange(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    if not ctx.has_symbol(ctx.shape(node)[0]):
        return ()
    raise NotTokenwise("counts along the token axis")
