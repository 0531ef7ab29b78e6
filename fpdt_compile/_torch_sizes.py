"""The part of ``_torch_private`` about symbolic sizes and their guards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    _ShapeEnvGuardError,
    statically_known_true,
)
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.functions import Max as SymMax
from torch.utils._sympy.functions import Min as SymMin
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = [
    "NewGuard",
    "SymMax",
    "SymMin",
    "decided_by_hints",
    "new_size",
    "no_new_guards",
    "specializations",
    "statically_known_true",
    "symbol_hint",
    "write_size",
]


class NewGuard(Exception):
    """An operator asked a question about sizes that the capture left open."""


@contextlib.contextmanager
def no_new_guards(module: GraphModule) -> Iterator[None]:
    """The graph's sizes belong to Dynamo: nothing done here may specialize them. What would raises
    :class:`NewGuard`."""
    env = next(
        (
            node.meta["val"].fake_mode.shape_env
            for node in module.graph.nodes
            if isinstance(node.meta.get("val"), FakeTensor)
        ),
        None,
    )
    if env is None:
        yield
        return
    with env.error_on_new_guards():
        try:
            yield
        except _ShapeEnvGuardError as error:
            raise NewGuard(str(error)) from error


@contextlib.contextmanager
def decided_by_hints(tensor: FakeTensor) -> Iterator[None]:
    """Questions about sizes are answered by the sizes at capture, and no guard is made.

    For running operators again on the sizes they were captured with: the capture's guards hold.
    """
    env = tensor.fake_mode.shape_env
    strict, env._error_on_new_guards = env._error_on_new_guards, False
    try:
        with env.suppress_guards():
            yield
    finally:
        env._error_on_new_guards = strict


def new_size(tensor: FakeTensor, hint: int, *, fixed: bool) -> torch.SymInt:
    """A size with a symbol of its own; no guard can be on it.

    With ``fixed`` it is ``hint`` at every call, so comparisons with sizes of another order may be
    decided: it is known to lie between half and twice of it.
    """
    # Importing Dynamo takes long, and so does Triton, which it brings.
    from torch._dynamo.source import ConstantSource

    env = tensor.fake_mode.shape_env
    source = ConstantSource(f"fpdt_tokens_{len(env.var_to_range)}")
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    if fixed:
        env.constrain_symbol_range(symbol, max(2, hint // 2), 2 * hint)
    return env.create_symintnode(symbol, hint=hint, source=source)


def write_size(graph: Graph, expr: Any, sizes: Mapping[Any, Node]) -> list[Node]:
    """Calls that compute a size expression from the nodes of its symbols; the last is its value."""
    before = set(graph.nodes)
    tracer = GraphAppendingTracer(graph)
    proxies = {symbol: Proxy(node, tracer) for symbol, node in sizes.items()}
    sympy_interp(PythonReferenceAnalysis, proxies, expr)
    return [node for node in graph.nodes if node not in before]


def specializations(module: GraphModule) -> list[tuple[int, str]]:
    """Input sizes that were symbols until the traced code needed a number: (number, code
    and line)."""
    found = []
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for size in value.shape:
            if not isinstance(size, torch.SymInt) or not size.node.expr.is_Integer:
                continue
            symbol, env = size.node._expr, size.node.shape_env
            places = [
                location_first(str(guard.sloc.maybe_user_loc or guard.sloc))
                for guard in env.guards
                if symbol in guard.expr.free_symbols
            ]
            found.append((int(size.node.expr), places[-1] if places else "unknown"))
    return found


def symbol_hint(tensor: torch.Tensor, expr: Any) -> int:
    """The number that a size expression had when ``tensor``'s graph was captured."""
    env = next(s for s in tensor.shape if isinstance(s, torch.SymInt)).node.shape_env
    hint = getattr(env, "optimization_hint", None) or env.size_hint
    return int(hint(expr))


def location_first(text: str) -> str:
    """torch writes ``code  # path:line in fn``; a report starts with the place."""
    code, mark, place = text.rpartition("  # ")
    return f"{place} (`{code.strip()}`)" if mark else text
