"""Attention in the captured graph as :class:`Attention` records.

In: the graph with its token axes. Out: an Attention for each ``scaled_dot_product_attention`` and
each ``attention_from_scores`` (see ``raise_attention``) whose sequence dimension is the token axis;
one that has no chunked form becomes a mixer, with the reason.

Contract: matching never changes the graph. Everything of the call is read (keywords too): mask,
causal flag, scale, dropout, grouped heads.

Limits: q, k and v share one token axis (self-attention).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..errors import CantChunk
from ..graph import Attention, MaskGraph, NodeKind, is_tensor, size_expr, value_of
from .analyze_masks import find_mask_graph
from .base import refuse
from .find_token_axes import ATTENTION_CALLS, TokenAnalysis
from .split_scores import split_scores
from .token_rules import arg, op_name
from .write_scores import sink_graph


def match_raised(
    node: Node, analysis: TokenAnalysis, masks: dict[str, MaskGraph]
) -> Attention:
    """The record of one ``attention_from_scores``; raises CantChunk."""
    q, k, v, _, sinks, seed, dropout_p = node.args
    check_operands(node, q, k, v, analysis)
    parts = split_scores(node, analysis, masks)
    return Attention(
        name=node.name,
        node=node,
        q=q,
        k=k,
        v=v,
        mask=parts.mask,
        is_causal=False,
        scale=parts.scale,
        score=parts.score,
        sinks=None if sinks is None else sink_graph(sinks, analysis),
        seed=seed,
        dropout_p=float(dropout_p),
        members=parts.members,
    )


def check_operands(
    node: Node, q: Node, k: Node, v: Node, analysis: TokenAnalysis
) -> None:
    for name, x in (("query", q), ("key", k), ("value", v)):
        check_operand(node, name, x, analysis)
    heads, groups = (size_expr(value_of(x).shape[1]) for x in (q, k))
    if size_expr(value_of(v).shape[1]) != groups or heads % groups != 0:
        raise refuse(
            node, f"has {heads} query and {groups} key heads", "use H a multiple of G"
        )


def match_attention(
    node: Node, analysis: TokenAnalysis, masks: dict[str, MaskGraph]
) -> Attention:
    """The record of one SDPA node; raises CantChunk. ``masks`` shares equal masks."""
    q, k, v = (arg(node, i, name) for i, name in enumerate(("query", "key", "value")))
    mask = arg(node, 3, "attn_mask")
    dropout_p = float(arg(node, 4, "dropout_p", 0.0))
    is_causal = bool(arg(node, 5, "is_causal", False))
    scale = arg(node, 6, "scale")
    check_operands(node, q, k, v, analysis)
    if scale is not None and not isinstance(scale, (int, float)):
        raise refuse(node, "has a scale that is computed", "pass the scale as a number")
    if dropout_p > 0.0:
        raise refuse(
            node,
            f"drops attention weights (p = {dropout_p})",
            "set the attention dropout to 0 or call model.eval()",
        )
    if is_causal and len({analysis.axes[x][0].symbol for x in (q, k)}) > 1:
        # raise_attention gives it a mask, unless a length was no symbol by then.
        raise refuse(
            node,
            "is causal between two sequences of unrelated lengths",
            "give a mask (key position <= query position) instead of is_causal",
        )
    if isinstance(mask, Node):
        if is_causal:
            raise refuse(node, "has a mask and is_causal", "give one of them")
        check_mask(node, mask, analysis)
        if mask.name not in masks:
            masks[mask.name] = find_mask_graph(mask, analysis.axes)
    return Attention(
        name=node.name,
        node=node,
        q=q,
        k=k,
        v=v,
        mask=masks[mask.name] if isinstance(mask, Node) else None,
        is_causal=is_causal,
        scale=None if scale is None else float(scale),
    )


def check_operand(node: Node, name: str, x: object, analysis: TokenAnalysis) -> None:
    if not isinstance(x, Node) or not is_tensor(x):
        raise refuse(node, f"has no {name} tensor", "pass tensors")
    rank, axes = value_of(x).dim(), analysis.axes.get(x, ())
    if rank != 4:
        raise refuse(node, f"has a {name} of {rank} dimensions", "use [B, H, S, D]")
    if len(axes) != 1 or axes[0].dim != 2 or not axes[0].plain:
        raise refuse(
            node,
            f"has its tokens elsewhere than in dimension 2 of the {name}",
            "use [B, H, S, D] with one sequence length for query, key and value",
        )
    if analysis.kinds[x] not in (
        NodeKind.TOKENWISE,
        NodeKind.ATTENTION,
        NodeKind.MIXER,
        NodeKind.VECTOR,
    ):
        raise refuse(
            node, f"has a {name} that is not computed per token", "compute it per token"
        )


def check_mask(node: Node, mask: Node, analysis: TokenAnalysis) -> None:
    kinds = (NodeKind.MASK, NodeKind.VECTOR, NodeKind.STATE)
    if analysis.kinds[mask] not in kinds and mask not in analysis.light:
        raise refuse(
            node,
            "has a mask that depends on the hidden states",
            "make the mask from positions, document ids or padding flags",
        )
    value = value_of(mask)
    if value.dtype is not torch.bool and not value.is_floating_point():
        raise refuse(
            node, f"has a mask of dtype {value.dtype}", "use a bool or float mask"
        )


def find_attentions(
    nodes: list[Node], analysis: TokenAnalysis
) -> tuple[list[Attention], list[CantChunk]]:
    """Every attention in graph order, and the refusals of those that run whole as mixers."""
    masks: dict[str, MaskGraph] = {}
    found: list[Attention] = []
    refused: list[CantChunk] = []
    for node in nodes:
        if analysis.kinds[node] is not NodeKind.ATTENTION:
            continue
        match = ATTENTION_MATCHERS[op_name(node)]
        try:
            found.append(match(node, analysis, masks))
        except CantChunk as error:
            refused.append(error)
            analysis.kinds[node] = NodeKind.MIXER
            analysis.reasons[node] = error.rejection.reason
    mark_scores(found, nodes, analysis)
    return found, refused


ATTENTION_MATCHERS = dict(
    zip(ATTENTION_CALLS, (match_attention, match_raised), strict=True)
)


def mark_scores(
    found: list[Attention], nodes: list[Node], analysis: TokenAnalysis
) -> None:
    """Score arithmetic that only attentions read is no mixer: it runs tile by tile."""
    inside = {n for attention in found for n in attention.members}
    calls = {attention.node for attention in found}
    for node in reversed(nodes):
        two_axes = len(analysis.axes.get(node, ())) > 1
        if node in inside or (two_axes and analysis.kinds[node] is NodeKind.MIXER):
            if node.users and all(
                user in calls or analysis.kinds[user] is NodeKind.SCORE
                for user in node.users
            ):
                analysis.kinds[node] = NodeKind.SCORE
