"""Fold ``repeat_kv`` into attention, so that only G key/value heads are stored and exchanged.

In: attention whose key or value is ``[B, G, S, D]`` repeated over heads to ``[B, H, S, D]``,
written as unsqueeze + expand + reshape, as ``repeat_interleave`` or as ``repeat`` of one head.
Out: the same attention on the unrepeated tensor with ``enable_gqa=True``, whose meaning (query
head h reads key/value head h // (H/G)) is exactly that repetition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from ..graph import CapturedGraph, is_tensor, size_expr, value_of
from .base import GraphPass
from .find_token_axes import ATTENTION_CALLS
from .split_scores import scores_behind
from .token_rules import arg, op_name

VIEWS = ("reshape", "view", "_unsafe_view", "flatten")


@dataclass(frozen=True, slots=True)
class Repeated:
    attention: Node
    key: Node
    value: Node


class FoldRepeatKV(GraphPass):
    name = "fold_repeat_kv"

    def find(self, captured: CapturedGraph) -> Iterable[Repeated]:
        for node in captured.module.graph.nodes:
            if node.op != "call_function" or op_name(node) not in ATTENTION_CALLS:
                continue
            key, value = unrepeated(node.args[1]), unrepeated(node.args[2])
            if key is None or value is None or value_of(key).dim() != 4:
                continue
            if value_of(key).shape[1] == value_of(value).shape[1]:
                yield Repeated(node, key, value)

    def apply(self, captured: CapturedGraph, match: Repeated) -> None:
        node = match.attention
        if op_name(node) == "attention_from_scores":
            scores_behind(node).args = (node.args[0], match.key)
            node.args = (node.args[0], match.key, match.value, *node.args[3:])
            return
        node.args = (node.args[0], match.key, match.value, *node.args[3:7])
        node.kwargs = {**node.kwargs, "enable_gqa": True}


def unrepeated(x: Node) -> Node | None:
    """The ``[B, G, S, D]`` tensor of which ``x`` repeats each head in a row, else None."""
    if x.op != "call_function" or value_of(x).dim() != 4:
        return None
    name = op_name(x)
    if name == "repeat_interleave":
        dim = arg(x, 2, "dim")
        return x.args[0] if dim in (1, -3) and isinstance(x.args[1], int) else None
    if name == "expand" and size_expr(value_of(x.args[0]).shape[1]) == 1:
        return x.args[0] if same_but_heads(x.args[0], x) else None
    if name not in VIEWS:
        return None
    wide = x.args[0]
    if (
        wide.op != "call_function"
        or op_name(wide) != "expand"
        or value_of(wide).dim() != 5
    ):
        return None
    thin = wide.args[0]
    batch, groups, repeats, length, size = (size_expr(s) for s in value_of(wide).shape)
    expected = [batch, groups * repeats, length, size]
    if [size_expr(s) for s in value_of(x).shape] != expected:
        return None
    if (
        thin.op != "call_function"
        or op_name(thin) != "unsqueeze"
        or not is_tensor(thin)
    ):
        return None
    if [size_expr(s) for s in value_of(thin).shape] != [batch, groups, 1, length, size]:
        return None
    source = thin.args[0]
    if [size_expr(s) for s in value_of(source).shape] != [batch, groups, length, size]:
        return None
    return source if int(thin.args[1]) in (2, -3) else None


def same_but_heads(a: Node, b: Node) -> bool:
    one, other = list(value_of(a).shape), list(value_of(b).shape)
    return len(one) == 4 and [size_expr(s) for i, s in enumerate(one) if i != 1] == [
        size_expr(s) for i, s in enumerate(other) if i != 1
    ]
