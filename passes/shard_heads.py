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
from ..runtime.tile_graphs import take_heads
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

    def has_heads(self, node: Node, dim: int) -> bool:
        """Whether the value differs by head. (The last operator of a composed mask carries a value
        that tells its type only.)"""
        value = value_of(node)
        if value.dim() >= -dim:
            return value.shape[dim] == self.num_heads
        return is_pointwise(node) and any(
            self.has_heads(x, dim) for x in node.all_input_nodes if is_tensor(x)
        )

    def made(self, node: Node, dim: int) -> Node:
        if node is self.scores or not self.has_heads(node, dim):
            return self.copies[node]
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
        moved = self.through(node, dim)
        if moved is not None:
            return moved
        new = self.graph.call_function(
            take_heads, (self.copies[node], dim, *self.heads)
        )
        new.meta["val"] = value_of(node)
        return new

    def through(self, node: Node, dim: int) -> Node | None:
        """A move of dimensions, or a lookup in a table with a column per head, of fewer heads."""
        place = value_of(node).dim() + dim
        if node.target is aten.permute.default:
            source, order = node.args
            source_dim = order[place] % len(order)
        elif node.target is aten.unsqueeze.default:
            source, added = node.args
            added %= value_of(node).dim()
            source_dim = place - (place > added)
        elif node.target is aten.embedding.default and dim == -1:
            source, source_dim = node.args[0], 1
        else:
            return None
        narrowed = self.narrow(source, source_dim - value_of(source).dim())
        return self.graph.node_copy(
            node, lambda x: narrowed if x is source else self.copies[x]
        )


def descendants(node: Node | None) -> set[Node]:
    found: set[Node] = set()
    pending = [] if node is None else [node]
    while pending:
        x = pending.pop()
        if x not in found and x.op != "output":
            found.add(x)
            pending.extend(x.users)
    return found
