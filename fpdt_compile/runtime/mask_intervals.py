"""Interval arithmetic over mask graphs: bounds of a mask on many tiles at once.

In: a mask graph's node and the bounds of its inputs. Out: the bounds of its value, an
:class:`Interval` of the value's own shape, with one entry per chunk where the value has a
token axis, so views and broadcasting apply to bounds unchanged.

Contract: sound. Bounds of floats are made with the operator itself in its own
dtype: rounding is monotone, so the bounds hold for rounded values. Integer results that may
wrap around have the dtype's whole range. An operator without a rule has unknown bounds.

Limits: bounds of two correlated inputs are combined as if they were independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .intervals import Interval, cast, extremes, hull, no_nan_bounds, widen

Bound = Any  # a Tensor, or a number where the operator takes one


@dataclass(frozen=True, slots=True)
class Grid:
    """First and last row of each query chunk, first and last column of each key chunk."""

    q_first: Tensor
    q_last: Tensor
    k_first: Tensor
    k_last: Tensor

    @staticmethod
    def of(
        q_bounds: Sequence[tuple[int, int]], k_bounds: Sequence[tuple[int, int]]
    ) -> Grid:
        q, k = torch.tensor(q_bounds), torch.tensor(k_bounds)
        return Grid(q[:, 0], q[:, 1] - 1, k[:, 0], k[:, 1] - 1)


Rule = Callable[[Node, Grid, tuple[Any, ...], Mapping[str, Any]], Interval]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators by packet name (``"minimum"``)."""

    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def interval_of(
    node: Node, grid: Grid, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Interval:
    """Bounds of ``node``, whose tensor arguments are Intervals in ``args``."""
    found = RULES.get(node.target._schema.name.split("::")[-1])
    result = None if found is None else found(node, grid, args, kwargs)
    return unknown(node, args, kwargs) if result is None else no_nan_bounds(result)


def unknown(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Interval:
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Interval)]
    shape = torch.broadcast_shapes(*(x.lo.shape for x in inputs))
    dtype = node.meta["val"].dtype
    lo, hi = extremes(dtype)
    return Interval(
        torch.full(shape, lo, dtype=dtype),
        torch.full(shape, hi, dtype=dtype),
        dtype.is_floating_point,
    )


def low(x: Any) -> Bound:
    return x.lo if isinstance(x, Interval) else x


def high(x: Any) -> Bound:
    return x.hi if isinstance(x, Interval) else x


def nan_in(*values: Any) -> bool:
    return any(x.may_nan if isinstance(x, Interval) else x != x for x in values)


def exact(value: Interval, estimates: Sequence[Tensor]) -> Interval:
    """Unknown where an integer result, estimated in float64, may have wrapped around."""
    if value.dtype.is_floating_point or value.dtype is torch.bool:
        return value
    info = torch.iinfo(value.dtype)
    # float64 is exact to 2^53 only: int64 results stay clear of the limits.
    small = -(2.0**62) if info.bits == 64 else float(info.min)
    large = 2.0**62 if info.bits == 64 else float(info.max)
    bad = torch.zeros((), dtype=torch.bool)
    for estimate in estimates:
        bad = bad | (estimate < small) | (estimate > large)
    return widen(value, bad)


def double(x: Bound) -> Bound:
    return x.double() if isinstance(x, Tensor) else float(x)


def contains(x: Any, value: float) -> Tensor:
    return torch.as_tensor(low(x) <= value) & torch.as_tensor(high(x) >= value)


@rule("to", "_to_copy", "type_as", "contiguous", "clone", "detach", "alias")
@rule("lift_fresh", "lift_fresh_copy")
def bound_cast(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    return cast(args[0], node.meta["val"].dtype)


@rule("unsqueeze", "squeeze", "permute")
def bound_view(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    return args[0].map(lambda bound: node.target(bound, *args[1:], **kwargs))


@rule("full")
def bound_full(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    point = torch.full(args[0], args[1], dtype=kwargs["dtype"])
    return Interval(point, point, bool(torch.isnan(point).any()))


@rule("minimum", "maximum", "clamp", "clip", "clamp_min", "clamp_max", "floor", "ceil")
@rule("logical_and", "logical_or", "relu", "trunc", "max", "min")
def bound_increasing(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval | None:
    """Non-decreasing in every argument, and exact."""
    both = (*args, *kwargs.values())
    if node.target._schema.name.startswith("aten::logical"):
        args = tuple(cast(x, torch.bool) for x in args)
    lo = node.target(*map(low, args), **{n: low(x) for n, x in kwargs.items()})
    hi = node.target(*map(high, args), **{n: high(x) for n, x in kwargs.items()})
    return Interval(lo, hi, nan_in(*(x for x in both if x is not None)))


@rule("bitwise_and", "bitwise_or", "__and__", "__or__")
def bound_bitwise(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval | None:
    if any(isinstance(x, Interval) and x.dtype is not torch.bool for x in args):
        return None
    if not all(isinstance(x, (Interval, bool)) for x in args):
        return None
    return bound_increasing(node, grid, args, kwargs)


@rule("bitwise_xor", "__xor__", "logical_xor")
def bound_xor(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval | None:
    if node.meta["val"].dtype is not torch.bool:
        return None
    a, b = (cast(Interval.of(x), torch.bool) for x in args)
    known = (a.lo == a.hi) & (b.lo == b.hi)
    value = a.lo ^ b.lo
    return Interval(value & known, value | ~known)


@rule("logical_not", "bitwise_not")
def bound_not(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    logical = node.target._schema.name == "aten::logical_not"
    x = cast(args[0], torch.bool) if logical else args[0]
    return Interval(node.target(x.hi), node.target(x.lo))


@rule("neg", "negative")
def bound_neg(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    x = args[0]
    value = Interval(-x.hi, -x.lo, x.may_nan)
    return exact(value, [-x.lo.double(), -x.hi.double()])


@rule("abs", "absolute")
def bound_abs(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    x = args[0]
    ends = hull([node.target(x.lo), node.target(x.hi)], x.may_nan)
    zero = torch.zeros((), dtype=ends.dtype)
    value = Interval(torch.where(contains(x, 0), zero, ends.lo), ends.hi, x.may_nan)
    return exact(value, [x.lo.double().abs(), x.hi.double().abs()])


@rule("add")
def bound_add(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval | None:
    a, b = args[:2]
    if len(args) > 2 or kwargs.get("alpha", 1) != 1:
        return None
    may_nan = nan_in(a, b) or opposite(low(a), high(b)) or opposite(low(b), high(a))
    value = Interval(
        node.target(low(a), low(b)), node.target(high(a), high(b)), may_nan
    )
    return exact(
        value, [double(low(a)) + double(low(b)), double(high(a)) + double(high(b))]
    )


@rule("sub", "subtract", "rsub")
def bound_sub(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval | None:
    a, b = args[:2]
    if len(args) > 2 or kwargs.get("alpha", 1) != 1:
        return None
    if node.target._schema.name == "aten::rsub":  # other - self
        lo, hi = node.target(high(a), low(b)), node.target(low(a), high(b))
        a, b = b, a
    else:
        lo, hi = node.target(low(a), high(b)), node.target(high(a), low(b))
    may_nan = nan_in(a, b) or same(low(a), low(b)) or same(high(a), high(b))
    return exact(
        Interval(lo, hi, may_nan),
        [double(low(a)) - double(high(b)), double(high(a)) - double(low(b))],
    )


def opposite(lo: Bound, hi: Bound) -> bool:
    """Whether -inf may meet inf."""
    a, b = torch.as_tensor(lo), torch.as_tensor(hi)
    return bool(((a == -torch.inf) & (b == torch.inf)).any())


def same(a: Bound, b: Bound) -> bool:
    """Whether an infinity may meet itself."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return bool(((a == b) & (a.abs() == torch.inf)).any())


@rule("mul", "multiply")
def bound_mul(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    a, b = args[:2]
    pairs = [(x(a), y(b)) for x in (low, high) for y in (low, high)]
    value = hull([node.target(x, y) for x, y in pairs], nan_in(a, b))
    unsafe = zero_times_infinity(a, b) | zero_times_infinity(b, a)
    value = exact(value, [double(x) * double(y) for x, y in pairs])
    return widen(value, unsafe) if value.dtype.is_floating_point else value


def zero_times_infinity(a: Any, b: Any) -> Tensor:
    return contains(a, 0) & (contains(b, torch.inf) | contains(b, -torch.inf))


@rule("floor_divide", "div", "divide", "true_divide")
def bound_div(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval | None:
    """By a divisor that is not 0, monotone in both arguments on either side of 0."""
    a, b = args[:2]
    rounded = kwargs.get("rounding_mode") or "floor_divide" in node.target._schema.name
    whole = not node.meta["val"].dtype.is_floating_point
    if rounded and not whole:
        return None
    bad = contains(b, 0) | contains(b, torch.inf) | contains(b, -torch.inf)
    if whole:  # the least integer divided by -1 traps
        bad = bad | torch.as_tensor(double(low(a)) < -(2.0**62))
        bad = bad | torch.as_tensor(low(a) == torch.iinfo(low(a).dtype).min)
    if not isinstance(b, Interval) and bool(bad.all()):
        return None
    a, b = with_ones(a, bad), with_ones(b, bad)
    pairs = [(x(a), y(b)) for x in (low, high) for y in (low, high)]
    return widen(
        hull([node.target(x, y, **kwargs) for x, y in pairs], nan_in(a, b)), bad
    )


def with_ones(x: Any, where: Tensor) -> Any:
    if not isinstance(x, Interval):
        return x
    return x.map(lambda bound: torch.where(where, torch.ones((), dtype=x.dtype), bound))


@rule("remainder")
def bound_remainder(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval | None:
    """Integers by one positive number: exact while the quotient does not change."""
    a, b = args[:2]
    if node.meta["val"].dtype.is_floating_point or not isinstance(b, int) or b <= 0:
        return None
    if not isinstance(a, Interval) or isinstance(b, bool):
        return None
    kept = torch.floor_divide(a.lo, b) == torch.floor_divide(a.hi, b)
    lo, hi = node.target(a.lo, b), node.target(a.hi, b)
    least, most = torch.zeros_like(lo), torch.full_like(hi, b - 1)
    return Interval(torch.where(kept, lo, least), torch.where(kept, hi, most))


@rule("eq", "ne", "lt", "le", "gt", "ge")
@rule("not_equal", "less", "less_equal", "greater", "greater_equal")
def bound_compare(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    """Comparisons with NaN are False, but for ``ne``."""
    names = {
        "not_equal": "ne",
        "less": "lt",
        "less_equal": "le",
        "greater": "gt",
        "greater_equal": "ge",
    }
    name = node.target._schema.name.split("::")[-1]
    name, (a, b) = names.get(name, name), args[:2]
    if name in ("gt", "ge"):  # b < a, b <= a
        compare = torch.gt if name == "gt" else torch.ge
        must, may = compare(low(a), high(b)), compare(high(a), low(b))
    elif name in ("lt", "le"):
        compare = torch.lt if name == "lt" else torch.le
        must, may = compare(high(a), low(b)), compare(low(a), high(b))
    else:
        must = torch.le(high(a), low(b)) & torch.ge(low(a), high(b))
        may = torch.le(low(a), high(b)) & torch.ge(high(a), low(b))
    if nan_in(a, b):
        must = torch.zeros_like(must)
    return Interval(~may, ~must) if name == "ne" else Interval(must, may)


@rule("where", "masked_fill")
def bound_where(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    if node.target._schema.name == "aten::where":
        condition, a, b = args
    else:
        b, condition, a = args
    dtype = node.meta["val"].dtype
    return select(
        cast(condition, torch.bool), Interval.of(a, dtype), Interval.of(b, dtype)
    )


def select(condition: Interval, a: Interval, b: Interval) -> Interval:
    either = hull([a.lo, b.lo], False).lo, hull([a.hi, b.hi], False).hi
    known = condition.lo == condition.hi
    lo = torch.where(known, torch.where(condition.lo, a.lo, b.lo), either[0])
    hi = torch.where(known, torch.where(condition.lo, a.hi, b.hi), either[1])
    return Interval(lo, hi, a.may_nan or b.may_nan)


@rule("tril", "triu")
def bound_triangle(node: Node, grid: Grid, args: Any, kwargs: Any) -> Interval:
    x, diagonal = args[0], args[1] if len(args) > 1 else 0
    rows, columns = (grid.q_first, grid.q_last), (grid.k_first, grid.k_last)
    if not node.meta["rows_are_queries"]:
        rows, columns = columns, rows
    least = columns[0][None, :] - rows[1][:, None]  # column - row
    most = columns[1][None, :] - rows[0][:, None]
    if node.target._schema.name == "aten::tril":
        kept = Interval(most <= diagonal, least <= diagonal)
    else:
        kept = Interval(least >= diagonal, most >= diagonal)
    zero = torch.zeros((), dtype=x.dtype)
    return select(kept, x, Interval(zero, zero))
