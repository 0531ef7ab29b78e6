"""Random mask graphs, vectors and chunk bounds: the table never claims what is not so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from mask_cases import MIN, Case, Range, case_of, check, check_tight, cuts
from torch import Tensor

LIMIT = torch.iinfo(torch.int64).max


def integers(depth: int) -> st.SearchStrategy[Any]:
    leaf = st.sampled_from(["q", "k", "dq", "dk"]).map(lambda x: (x,))
    if depth == 0:
        return leaf
    x = integers(depth - 1)
    return st.one_of(
        leaf,
        st.tuples(st.sampled_from(["add", "sub", "min", "max", "times"]), x, x),
        st.tuples(st.sampled_from(["add", "rsub"]), x, st.sampled_from([-7, 1, LIMIT])),
        st.tuples(st.just("mul"), x, st.sampled_from([-2, 3, LIMIT])),
        st.tuples(st.sampled_from(["abs", "neg", "narrow"]), x),
        st.tuples(
            st.sampled_from(["div", "trunc", "mod"]), x, st.sampled_from([1, 3, 8])
        ),
        st.tuples(st.just("div"), x, st.just(-2)),
    )


COMPARE = ["le", "lt", "ge", "gt", "eq", "ne"]


def booleans(depth: int) -> st.SearchStrategy[Any]:
    leaf = st.one_of(
        st.tuples(st.sampled_from(COMPARE), integers(1), integers(1)),
        st.tuples(st.sampled_from(COMPARE), integers(2), st.integers(-5, 30)),
        st.sampled_from([("le", ("k",), ("q",)), ("eq", ("dk",), ("dq",))]),
        st.just(("pad",)),
    )
    if depth == 0:
        return leaf
    x = booleans(depth - 1)
    return st.one_of(
        leaf,
        st.tuples(st.sampled_from(["and", "or", "xor"]), x, x),
        st.tuples(st.just("not"), x),
        st.tuples(st.just("where"), x, x, x),
    )


def evaluate(expr: Any, env: dict[str, Tensor]) -> Any:
    """The value of a nested tuple, with plain torch operations."""
    if not isinstance(expr, tuple):
        return expr
    name, *parts = expr
    if name in env:
        return env[name]
    x, *rest = (evaluate(part, env) for part in parts)
    y = rest[0] if rest else None
    if name in COMPARE:
        return getattr(torch, name)(x, y)
    operations: dict[str, Callable[[], Tensor]] = {
        "and": lambda: x & y,
        "or": lambda: x | y,
        "xor": lambda: x ^ y,
        "not": lambda: ~x,
        "where": lambda: torch.where(x, y, rest[1]),
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "rsub": lambda: y - x,
        "mul": lambda: x * y,
        "times": lambda: x * y,
        "min": lambda: torch.minimum(x, y),
        "max": lambda: torch.maximum(x, y),
        "abs": lambda: x.abs(),
        "neg": lambda: -x,
        "narrow": lambda: x.to(torch.int16).to(torch.int64),
        "div": lambda: x // y,
        "trunc": lambda: torch.div(x, y, rounding_mode="trunc"),
        "mod": lambda: x % y,
    }
    return operations[name]()


def environment(p: Tensor, d: Tensor, keep: Tensor) -> dict[str, Tensor]:
    return {
        "q": p[None, None, :, None],
        "k": p[None, None, None, :],
        "dq": d[:, None, :, None],
        "dk": d[:, None, None, :],
        "pad": keep[:, None, None, :].expand(-1, -1, p.shape[0], -1),
    }


@st.composite
def vectors(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    size = draw(st.integers(8, 40))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    positions, documents = torch.arange(size), random(4, 3, size).sort(-1)[0]
    style = draw(st.sampled_from(["plain", "plain", "restart", "random"]))
    if style == "restart":
        positions = positions % draw(st.integers(3, size))
    elif style == "random":
        positions, documents = random(size, size), random(4, 3, size)
    keep = torch.arange(size) >= random(size, 3, 1)
    return positions, documents, keep


@st.composite
def chunk_bounds(draw: st.DrawFn, size: int) -> list[Range]:
    edges = draw(st.lists(st.integers(1, size - 1), max_size=5, unique=True))
    return cuts(size, *sorted(edges))


@settings(max_examples=60)
@given(st.data(), booleans(2), vectors())
def test_random_bool_masks(
    data: st.DataObject, expr: Any, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    size = inputs[0].shape[0]
    case = case_of(lambda *v: evaluate(expr, environment(*v)), *inputs)
    q, k = data.draw(chunk_bounds(size)), data.draw(chunk_bounds(size))
    check(case, q, k)
    check(case, q, q)


@settings(max_examples=60)
@given(st.data(), booleans(1), vectors(), st.sampled_from([-torch.inf, MIN, -1e4]))
def test_random_additive_masks(
    data: st.DataObject,
    expr: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    hidden: float,
) -> None:
    size = inputs[0].shape[0]

    def fn(*v: Tensor) -> Tensor:
        env = environment(*v)
        bias = (env["k"] - env["q"]) * 0.25 * (env["dk"] > 2)
        return torch.where(evaluate(expr, env), bias, hidden)

    case = case_of(fn, *inputs)
    q, k = data.draw(chunk_bounds(size)), data.draw(chunk_bounds(size))
    check(case, q, k)
    check(case, q, q)


def check_bounds(case: Case, q: list[Range], k: list[Range]) -> None:
    """Every element of every tile lies within the tile's bounds."""
    bounds = case.evaluator.bounds(q, k)
    for (i, rows), (j, columns) in itertools.product(enumerate(q), enumerate(k)):
        want = case.dense[..., slice(*rows), slice(*columns)]
        shape = (*want.shape[:-2], len(q), len(k))
        lo, hi = (
            x.expand(shape)[..., i, j, None, None] for x in (bounds.lo, bounds.hi)
        )
        assert (lo <= want).all() and (want <= hi).all()


DIFFERENCE = ("sub", ("q",), ("k",))
WRAPPING = [
    ("mul", DIFFERENCE, LIMIT),
    ("add", DIFFERENCE, LIMIT),
    ("rsub", DIFFERENCE, -LIMIT),
    ("neg", ("add", ("add", DIFFERENCE, LIMIT), 1)),
    ("abs", ("add", DIFFERENCE, LIMIT)),
    ("times", ("add", DIFFERENCE, LIMIT), ("add", ("q",), ("k",))),
    ("narrow", ("mul", DIFFERENCE, 3000)),
    ("div", ("mul", DIFFERENCE, LIMIT), -1),
    ("mod", ("add", DIFFERENCE, LIMIT), 8),
]


@pytest.mark.parametrize("expr", WRAPPING, ids=str)
def test_bounds_hold_where_integers_wrap(expr: Any) -> None:
    inputs = torch.arange(40), torch.zeros(2, 40).long(), torch.ones(2, 40).bool()
    case = case_of(lambda *v: evaluate(expr, environment(*v)).double(), *inputs)
    for length in (40, 13, 4, 1):
        check_bounds(case, cuts(40, *range(length, 40, length)), [(0, 7), (7, 40)])


@settings(max_examples=60)
@given(st.data(), integers(3), vectors())
def test_random_bounds_hold(
    data: st.DataObject, expr: Any, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Integers wrap around, casts cut off: the bounds hold for what comes out."""
    size = inputs[0].shape[0]
    case = case_of(lambda *v: evaluate(expr, environment(*v)).double(), *inputs)
    q, k = data.draw(chunk_bounds(size)), data.draw(chunk_bounds(size))
    check_bounds(case, q, k)
    case.evaluator.table(q, k)


@settings(max_examples=40)
@given(st.data(), vectors(), st.integers(1, 20))
def test_simple_masks_are_tight(
    data: st.DataObject, inputs: tuple[Tensor, Tensor, Tensor], window: int
) -> None:
    """Causal, window and sorted documents: no PARTIAL tile is all or nothing."""
    documents = inputs[1][0].sort()[0]
    positions = torch.arange(documents.shape[0])

    def fn(p: Tensor, d: Tensor) -> Tensor:
        q, k, near = p[:, None], p[None, :], p[:, None] - p[None, :]
        choice = data.draw(st.sampled_from(["causal", "window", "documents"]))
        mask = k <= q
        if choice == "window":
            mask = mask & (near < window)
        elif choice == "documents":
            mask = mask & (d[:, None] == d[None, :])
        return mask

    case = case_of(fn, positions, documents)
    bounds = data.draw(chunk_bounds(positions.shape[0]))
    check(case, bounds, bounds)
    check_tight(case, bounds)
