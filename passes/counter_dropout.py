"""Dropout whose mask depends on a seed and the global position only.

In: ``dropout(x, p, train=True)`` on a tensor with a plain token dimension. Out: pointwise
arithmetic that decides for every element from (seed of this call and site, token number, place in
the row). The mask is then the same however the sequence is cut, and a recomputation in the
backward repeats it.

The seed is drawn once a call from torch's default generator, so ``torch.manual_seed`` reproduces a
run; the bits are not those of eager dropout, the distribution is. Elements are hashed with two
rounds of a 32-bit multiply-xorshift mix (constant 0x45d9f3b) in int64, where no product overflows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..graph import CapturedGraph, size_expr, value_of
from .base import GraphPass, insert_call
from .sizes import size_of_expr
from .token_rules import arg, op_name

aten = torch.ops.aten
LOW = (1 << 32) - 1
MIX = 0x45D9F3B
MAX_SEED = 1 << 31


class CounterDropout(GraphPass):
    name = "counter_dropout"

    def find(self, captured: CapturedGraph) -> Iterable[Node]:
        symbols = captured.token_symbols
        for node in captured.module.graph.nodes:
            if node.op != "call_function" or op_name(node) != "dropout":
                continue
            sizes = [size_expr(s) for s in value_of(node).shape]
            tokens = [x for x in sizes if x.free_symbols & {*symbols}]
            if arg(node, 2, "train") and len(tokens) == 1 and tokens[0] in symbols:
                yield node

    def apply(self, captured: CapturedGraph, match: Node) -> None:
        sizes = [size_expr(s) for s in value_of(match).shape]
        (symbol,) = [x for x in sizes if x in captured.token_symbols]
        with captured.module.graph.inserting_before(match):
            result = _Writer(match, symbol).dropped()
        match.replace_all_uses_with(result)
        match.graph.erase_node(match)


class _Writer:
    """Writes the arithmetic for one dropout site."""

    def __init__(self, node: Node, symbol: sympy.Symbol) -> None:
        self.node = node
        self.symbol = symbol
        self.device = value_of(node).device

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = insert_call(self.node.graph, target, args, kwargs, self.node)
        made.meta["needs_grad"] = False
        return made

    def element_numbers(self) -> Node:
        """A number per element, the same in every cut: token number times row size plus place."""
        shape = value_of(self.node).shape
        sizes = [size_of_expr(self.node.graph, size_expr(s), self.node) for s in shape]
        expressions = [size_expr(s) for s in shape]
        token = expressions.index(self.symbol)
        order = [d for d in reversed(range(len(shape))) if d != token] + [token]
        total: Node | None = None
        stride: Node | int = 1
        for dim in order:
            index = self.call(aten.arange.default, sizes[dim], device=self.device)
            for _ in range(len(shape) - 1 - dim):
                index = self.call(aten.unsqueeze.default, index, -1)
            part = index if stride == 1 else self.scaled(index, stride)
            total = part if total is None else self.call(aten.add.Tensor, total, part)
            if dim != token:
                stride = size_of_expr(
                    self.node.graph,
                    self.row_size(order[: order.index(dim) + 1]),
                    self.node,
                )
        assert total is not None
        return total

    def row_size(self, dims: list[int]) -> Any:
        product = 1
        for dim in dims:
            product = product * size_expr(value_of(self.node).shape[dim])
        return product

    def scaled(self, index: Node, stride: Node | int) -> Node:
        target = aten.mul.Scalar if isinstance(stride, int) else aten.mul.Tensor
        return self.call(target, index, stride)

    def mixed(self, x: Node) -> Node:
        """((x >> 16) ^ x) * MIX, twice, in 32 bits."""
        for _ in range(2):
            shifted = self.call(aten.bitwise_right_shift.Tensor_Scalar, x, 16)
            x = self.call(aten.bitwise_xor.Tensor, shifted, x)
            x = self.call(aten.mul.Scalar, x, MIX)
            x = self.call(aten.bitwise_and.Scalar, x, LOW)
        shifted = self.call(aten.bitwise_right_shift.Tensor_Scalar, x, 16)
        return self.call(aten.bitwise_xor.Tensor, shifted, x)

    def dropped(self) -> Node:
        x, p = self.node.args[0], float(arg(self.node, 1, "p", 0.5))
        if p >= 1.0:
            return self.keep_grad(self.call(aten.mul.Scalar, x, 0.0))
        seed = self.call(aten.randint.low, 0, MAX_SEED, [], device=self.device)
        numbers = self.element_numbers()
        low = self.call(aten.bitwise_and.Scalar, numbers, LOW)
        high = self.call(aten.bitwise_right_shift.Tensor_Scalar, numbers, 32)
        mixed = self.mixed(self.call(aten.bitwise_xor.Tensor, low, seed))
        mixed = self.mixed(
            self.call(
                aten.bitwise_and.Scalar, self.call(aten.add.Tensor, mixed, high), LOW
            )
        )
        kept = self.call(aten.ge.Scalar, mixed, int(p * (LOW + 1)))
        scaled = self.keep_grad(self.call(aten.mul.Scalar, x, 1.0 / (1.0 - p)))
        return self.keep_grad(self.call(aten.mul.Tensor, scaled, kept))

    def keep_grad(self, made: Node) -> Node:
        made.meta["needs_grad"] = self.node.meta.get("needs_grad", False)
        return made
