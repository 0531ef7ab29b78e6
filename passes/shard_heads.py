"""Masks and score arithmetic for a part of the heads.

In: a :class:`MaskGraph` or :class:`ScoreGraph` whose value is broadcastable to [B, H, S, T], H, and
a range of heads. Out: the same graph for those heads only, over the same whole leaves.

From the output back, each operator that works element by element is applied to narrowed operands;
where that ends (a leaf, a lookup in a table) the value is narrowed. The tile of scores a score
graph starts from has this rank's heads already, so between it and the output there may only be
operators that work element by element: anything else is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import CantChunk, Rejection
from ..graph import MaskGraph, ScoreGraph, is_tensor, source_of, value_of
from .mask_nodes import is_pointwise

aten = torch.ops.aten
HEADS = -3  # of [B, H, q, k]
AnyGraph = TypeVar("AnyGraph", MaskGraph, ScoreGraph)


def shard_graph(
    graph: AnyGraph, heads: tuple[int, int], num_heads: int, *, dim: int = HEADS
) -> AnyGraph:
    """``graph`` for query heads ``heads``; ``dim`` is the output's head dimension."""
    scores = None
    inputs = [n for n in graph.module.graph.nodes if n.op == "placeholder"]
    if isinstance(graph, ScoreGraph):
        scores = inputs[0]
    (output,) = graph.module.graph.find_nodes(op="output")
    old = output.args[0]
    result = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.module.graph.nodes:
        if node.op != "output":
            copies[node] = result.node_copy(node, copies.__getitem__)
    sharder = _Sharder(result, copies, heads, num_heads, scores)
    result.output(sharder.narrow(old, dim))
    if scores is None:
        result.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    else:
        result.eliminate_dead_code()
    module = GraphModule(graph.module, result)
    changes: dict[str, Any] = dict(
        name=f"{graph.name}[{heads[0]}:{heads[1]}]", module=module
    )
    if isinstance(graph, MaskGraph) and graph.passes is not None:
        changes["passes"] = shard_graph(graph.passes, heads, num_heads)
    return replace(graph, **changes)


class _Sharder:
    def __init__(
        self,
        graph: Graph,
        copies: dict[Node, Node],
        heads: tuple[int, int],
        num_heads: int,
        scores: Node | None,
    ) -> None:
        self.graph = graph
        self.copies = copies
        self.heads = heads
        self.num_heads = num_heads
        self.scores = scores
        self.from_scores = descendants(scores)
        self.done: dict[tuple[Node, int], Node] = {}

    def narrow(self, node: Node, dim: int) -> Node:
        """The copy of ``node`` for these heads; ``dim`` (negative) is where it would have them."""
        key = (node, dim)
        if key not in self.done:
            self.done[key] = self.made(node, dim)
        return self.done[key]

    def made(self, node: Node, dim: int) -> Node:
        if node is self.scores:
            return self.copies[node]
        value = value_of(node)
        has_heads = value.dim() >= -dim and value.shape[dim] == self.num_heads
        if not has_heads or (self.num_heads == 1 and node not in self.from_scores):
            return self.copies[node]  # the same for every head
        if is_pointwise(node) and "rows_are_queries" not in node.meta:
            operands = {
                x: self.narrow(x, dim) if is_tensor(x) else self.copies[x]
                for x in node.all_input_nodes
            }
            return self.graph.node_copy(node, operands.__getitem__)
        if node in self.from_scores:
            raise CantChunk(
                Rejection(
                    op=str(node.target),
                    source=source_of(node),
                    reason="attention scores are not computed head by head, so ranks cannot share "
                    "the heads",
                    change="compute them with elementwise operators, or use seq_parallel=1",
                )
            )
        start, stop = self.heads
        place = value.dim() + dim
        new = self.graph.call_function(
            aten.slice.Tensor, (self.copies[node], place, start, stop)
        )
        new.meta["val"] = value
        return new


def descendants(node: Node | None) -> set[Node]:
    found: set[Node] = set()
    pending = [] if node is None else [node]
    while pending:
        x = pending.pop()
        if x not in found and x.op != "output":
            found.add(x)
            pending.extend(x.users)
    return found
