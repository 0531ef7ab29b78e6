"""Score arithmetic on tiles, and the parameters it reads.

In: a :class:`ScoreGraph` (or the graph of sink logits) and the whole values of its leaves. Out: the
logits of a tile of scores, differentiable in the scores and in the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import Tensor

from ..graph import MaskGraph, ScoreGraph
from .intervals import Range
from .tile_graphs import number_of, run_tile, slice_leaf


class ScoreEvaluator:
    """One graph with its leaves' values; ``parameters`` are those that have a gradient."""

    def __init__(
        self,
        graph: ScoreGraph | MaskGraph,
        leaf_values: Mapping[str, Tensor],
        symbols: Mapping[sympy.Symbol, int],
    ) -> None:
        self.leaves = graph.leaves
        self.nodes = list(graph.module.graph.nodes)
        self.numbers = {
            node.name: number_of(getattr(graph.module, node.target), symbols)
            for node in self.nodes
            if node.op == "get_attr"
        }
        self.values = []
        self.parameters: dict[str, Tensor] = {}
        for leaf in self.leaves:
            value = leaf_values[leaf.name].detach()
            if leaf.needs_grad:
                value = self.parameters.setdefault(leaf.name, value.requires_grad_())
            self.values.append(value)

    def __call__(self, scores: Tensor | None, q_range: Range, k_range: Range) -> Tensor:
        """The logits of a tile of ``scores``; None for a graph that takes none."""
        given = [] if scores is None else [scores]
        parts = [
            slice_leaf(leaf, value, q_range, k_range)
            for leaf, value in zip(self.leaves, self.values, strict=True)
        ]
        return run_tile(
            self.nodes, iter([*given, *parts]), self.numbers, q_range, k_range
        )


def sum_into(
    sums: dict[str, Tensor], names: Sequence[str], parts: Sequence[Tensor | None]
) -> None:
    """Add gradients of parameters by name, in fp32 at least."""
    for name, part in zip(names, parts, strict=True):
        if part is None:
            continue
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        sums[name] = sums[name] + part if name in sums else part
