"""Evaluate a mask's or score's graph on one tile.

In: the nodes of a graph over leaves, the leaves' whole values, and a (query range, key range). Out:
the graph's value on that tile, from slices of the leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from ..graph import MaskLeaf
from .intervals import Range


def number_of(expr: Any, symbols: Mapping[sympy.Symbol, int]) -> int | float:
    """A length's expression as a number. Raises ValueError for a symbol without a value."""
    value = sympy.sympify(expr).subs(dict(symbols))
    if value.free_symbols:
        missing = sorted(map(str, value.free_symbols))
        raise ValueError(f"symbols has no value for {', '.join(missing)}")
    return int(value) if value.is_integer else float(value)


def spread(value: Tensor, rows: int, columns: int) -> Tensor:
    """``value`` expanded to [..., rows, columns], without copying."""
    shape = torch.broadcast_shapes(value.shape, (rows, columns))
    return value.expand(shape)


def slice_leaf(leaf: MaskLeaf, value: Tensor, q: Range, k: Range) -> Tensor:
    if leaf.q_axis is not None:
        value = value.narrow(leaf.q_axis.dim, q[0], q[1] - q[0])
    if leaf.k_axis is not None:
        value = value.narrow(leaf.k_axis.dim, k[0], k[1] - k[0])
    return value


def take_heads(value: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Heads ``start:stop`` of dimension ``dim`` (negative); what is the same for all heads has size
    1 there on a tile, or not that dimension at all."""
    if value.dim() < -dim or value.shape[dim] == 1:
        return value
    return value.narrow(dim, start, stop - start)


def run_tile(
    nodes: Sequence[Node],
    inputs: Iterator[Tensor],
    numbers: Mapping[str, int | float],
    q_range: Range,
    k_range: Range,
) -> Tensor:
    """The output of ``nodes``; ``inputs`` are the placeholders' values on the tile, in order."""
    (q0, q1), (k0, k1) = q_range, k_range
    env: dict[Any, Any] = {}
    for node in nodes:
        if node.op == "placeholder":
            env[node] = next(inputs)
        elif node.op == "get_attr":
            env[node] = numbers[node.name]
        elif node.op == "output":
            return env[node.args[0]]
        else:
            args = torch.fx.map_arg(node.args, env.__getitem__)
            kwargs = torch.fx.map_arg(node.kwargs, env.__getitem__)
            if "rows_are_queries" in node.meta:
                # Column - row in the whole mask = the same in the tile + shift.
                shift, sizes = k0 - q0, (q1 - q0, k1 - k0)
                if not node.meta["rows_are_queries"]:
                    shift, sizes = -shift, sizes[::-1]
                args = (spread(args[0], *sizes), args[1] - shift)
            env[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph over tiles has an output")
