"""What a graph pass is, and the few ways passes edit a graph.

A pass rewrites the captured graph in place: ``find`` (pure) yields matches, ``apply`` rewrites one.
It never touches the user's model or Dynamo's graph, so falling back is always free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ..autocast import autocast_as, without_autocast
from ..errors import CantChunk, Rejection
from ..graph import CapturedGraph, source_of


@dataclass(kw_only=True, slots=True)
class PassContext:
    """Options of one run: ``fuel`` is how many more rewrites are allowed (None: all)."""

    fuel: int | None = None
    rejections: list[Rejection] = field(default_factory=list)

    def take(self) -> bool:
        """Use up one rewrite; False when none is left."""
        if self.fuel is None:
            return True
        if self.fuel <= 0:
            return False
        self.fuel -= 1
        return True


class GraphPass(ABC):
    """A rewrite of the captured graph; ``name`` equals its file's name.

    ``leaves_pure``: whether no operator writes into its inputs afterwards (checked by verify).
    """

    name: str
    leaves_pure: bool = True

    @abstractmethod
    def find(self, captured: CapturedGraph) -> Iterable[Any]:
        """Matches, in graph order. Must not change the graph."""

    @abstractmethod
    def apply(self, captured: CapturedGraph, match: Any) -> None:
        """Rewrite one match; raises CantChunk to leave it alone, with the reason."""

    def run(self, captured: CapturedGraph, ctx: PassContext) -> int:
        """Apply every match the fuel allows; returns how many were rewritten."""
        done = 0
        for match in list(self.find(captured)):
            if not ctx.take():
                break
            self.apply(captured, match)
            done += 1
        captured.module.graph.eliminate_dead_code()
        return done


def target_name(node: Node) -> str:
    """The called operator as a person would write it."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def refuse(node: Node, reason: str, change: str) -> CantChunk:
    """A CantChunk for ``node``, with the user's file and line."""
    return CantChunk(
        Rejection(
            op=target_name(node), source=source_of(node), reason=reason, change=change
        )
    )


def insert_call(
    graph: Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    like: Node,
    *,
    as_typed: bool = False,
) -> Node:
    """A new call at the insertion point with its fake value and ``like``'s provenance.

    It runs under ``like``'s autocast state or, ``as_typed``, in the types of its operands.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = {
        key: like.meta[key]
        for key in ("stack_trace", "autocast", "nn_module_stack")
        if key in like.meta
    }
    if as_typed:
        node.meta["autocast"] = without_autocast(node.meta.get("autocast"))
    set_value(node, like)
    return node


def insert_from(
    graph: Graph,
    target: Any,
    args: tuple[Any, ...],
    like: Node,
    *,
    as_typed: bool = False,
    **kwargs: Any,
) -> Node:
    """:func:`insert_call` for a rewrite that keeps gradients: the new node needs a gradient iff an
    input does."""
    node = insert_call(graph, target, args, kwargs, like, as_typed=as_typed)
    node.meta["needs_grad"] = node.meta["val"].is_floating_point() and any(
        x.meta.get("needs_grad", False) for x in node.all_input_nodes
    )
    return node


def set_value(node: Node, like: Node) -> None:
    """Compute ``node.meta["val"]`` from its inputs' fake values, in ``like``'s fake mode."""
    args, kwargs = pytree.tree_map_only(
        Node, lambda x: x.meta["val"], (node.args, node.kwargs)
    )
    mode = next(
        (
            leaf.fake_mode
            for leaf in pytree.tree_leaves((args, kwargs, like.meta["val"]))
            if hasattr(leaf, "fake_mode")
        ),
        None,
    )
    with torch.no_grad(), autocast_as(node.meta.get("autocast")):
        if mode is None:
            node.meta["val"] = node.target(*args, **kwargs)
        else:
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
