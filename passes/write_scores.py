"""Write a raised attention's score arithmetic as graphs: masks and the differentiable rest.

In: the terms that ``split_scores`` took off the logits. Out: a :class:`MaskGraph` of what has no
gradient, and a :class:`ScoreGraph` over tiles of scores, with parameters as leaves.

Limits: side values of the arithmetic may depend on positions, ids, flags and parameters, not on
hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..graph import MaskGraph, NodeKind, ScoreGraph, is_tensor, value_of
from .analyze_masks import RULES, MaskBuilder, Roles, Rule, last_two
from .base import refuse
from .find_token_axes import TokenAnalysis
from .mask_nodes import with_meta
from .token_rules import op_name

aten = torch.ops.aten
HIDDEN_STATES = "make it from positions, document ids, padding flags or parameters"


@dataclass(frozen=True, slots=True)
class Term:
    """``factor * node``, or the number ``factor`` at the pairs where ``node`` is ``hidden_is``."""

    node: Node
    factor: float
    hidden_is: bool | None = None

    @property
    def key(self) -> str:
        return f"{self.factor:g}*{self.node.name}" + (
            "" if self.hidden_is is None else f"[{self.hidden_is}]"
        )


class ParameterBuilder(MaskBuilder):
    """Copies arithmetic on parameters: they are the leaves, what is made of them is copied."""

    def __init__(self, like: Node, analysis: TokenAnalysis) -> None:
        super().__init__(like, analysis.axes)
        self.analysis = analysis

    def make(self, node: Node, roles: Roles) -> Node:
        differentiable = node.meta.get("needs_grad", False)
        if differentiable and node not in self.given and node.op != "placeholder":
            found = SCORE_RULES.get(op_name(node)) or RULES.get(op_name(node))
            if roles == Roles(None, None):
                return self.copy_parameter(node)
            if found is not None:
                return found(self, node, roles)
        elif len(self.axes.get(node, ())) > 1 and op_name(node) in SCORE_RULES:
            return SCORE_RULES[op_name(node)](self, node, roles)
        return super().make(node, roles)

    def copy_parameter(self, node: Node) -> Node:
        """A value made of parameters only, by the operators that make it."""

        def convert(x: Node) -> Any:
            return self.copy(x, Roles(None, None)) if is_tensor(x) else self.size(x)

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), convert)
        return self.call(node, node.target, args, **kwargs)

    def leaf(self, node: Node, roles: Roles) -> Node:
        refuse_hidden_states(node, self.analysis)
        return super().leaf(node, roles)


class ScoreBuilder(ParameterBuilder):
    """Copies score arithmetic; its first placeholder is the tile of scores."""

    def __init__(self, logits: Node, scores: Node, analysis: TokenAnalysis) -> None:
        super().__init__(logits, analysis)
        self.tile = with_meta(self.graph.placeholder("scores"), scores)
        self.last_leaf = self.tile
        self.given[scores] = self.tile


def sink_graph(sinks: Node, analysis: TokenAnalysis) -> MaskGraph:
    """The sink logits [H] as a graph over parameters."""
    builder = ParameterBuilder(sinks, analysis)
    return builder.finish(builder.copy(sinks, Roles(None, None)), sinks.name)


def refuse_hidden_states(node: Node, analysis: TokenAnalysis) -> None:
    kind = analysis.kinds[node]
    if kind in (NodeKind.STATE, NodeKind.VECTOR, NodeKind.MASK):
        return
    if kind is NodeKind.TOKENWISE and node in analysis.light:
        return
    raise refuse(
        node, "the attention scores are changed by hidden states", HIDDEN_STATES
    )


SCORE_RULES: dict[str, Rule] = {}


def copy_embedding(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    """Rows of a table that has no tokens, by a number for each pair."""
    table, rows = node.args[:2]
    copies = builder.copy(table, Roles(None, None)), builder.copy(rows, roles)
    return builder.call(node, node.target, (*copies, *node.args[2:]), **node.kwargs)


def copy_index(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    """``table[..., a, b]``: the broadcast dims of the indices replace the indexed ones."""
    table, indices = node.args
    used = [d for d, i in enumerate(indices) if i is not None]
    if used != list(range(used[0], used[-1] + 1)) or builder.axes.get(table, ()):
        raise refuse(node, "indexes a table by numbers that are apart", HIDDEN_STATES)
    rank = max(value_of(i).dim() for i in indices if i is not None)
    inner = roles.moved(lambda dim: dim - used[0])
    copies: list[Node | None] = [None] * used[0]
    for i in (x for x in indices if x is not None):
        copies.append(
            builder.copy(i, builder.shifted(i, inner, rank - value_of(i).dim()))
        )
    table = builder.copy(table, Roles(None, None))
    return builder.call(node, node.target, (table, copies))


SCORE_RULES["embedding"] = copy_embedding
SCORE_RULES["index"] = copy_index


def write_term(builder: MaskBuilder, term: Term) -> Node:
    """``term`` as additive values in the builder's graph."""
    if term.hidden_is is not None:
        return write_fill(builder, term, None)
    node = builder.copy(term.node, last_two(term.node, builder.axes))
    if term.factor == 1.0:
        return node
    return builder.call(term.node, aten.mul.Tensor, (node, term.factor))


def write_fill(builder: MaskBuilder, term: Term, inside: Node | None) -> Node:
    """The number at the hidden pairs, ``inside`` (None: 0) at the others."""
    condition = as_bool(
        builder, builder.copy(term.node, last_two(term.node, builder.axes))
    )
    dtype = value_of(builder.mask).dtype
    if inside is not None:
        dtype = torch.promote_types(dtype, value_of(inside).dtype)
    if term.factor != -torch.inf and abs(term.factor) > torch.finfo(dtype).max:
        # The smallest number of a dtype, cast to a shorter one later.
        dtype = torch.float64
    value = torch.empty((), dtype=dtype, device="meta")
    number, other = (
        value_node(builder, term.node, aten.full.default, value, [], x)
        for x in (term.factor, 0.0)
    )
    other = other if inside is None else inside
    choice = (number, other) if term.hidden_is else (other, number)
    return value_node(builder, term.node, aten.where.self, value, condition, *choice)


def as_bool(builder: MaskBuilder, node: Node) -> Node:
    """Conditions of masked_fill may be bytes."""
    if value_of(node).dtype is torch.bool:
        return node
    return value_node(
        builder,
        node,
        aten.ne.Scalar,
        torch.empty((), dtype=torch.bool, device="meta"),
        node,
        0,
    )


def value_node(
    builder: MaskBuilder, like: Node, target: Any, value: torch.Tensor, *args: Any
) -> Node:
    """A call that no captured node stands for; only its dtype is ever looked at."""
    kwargs = {}
    if target is aten.full.default:
        kwargs = {"dtype": value.dtype, "device": value_of(builder.mask).device}
    made = builder.call(like, target, args, **kwargs)
    made.meta["val"] = value
    return made


def summed(
    terms: list[Term], logits: Node, analysis: TokenAnalysis, name: str
) -> MaskGraph:
    """One mask from all terms, the outermost first; a fill takes the place of what is inside it,
    and a single -inf fill selects instead of adding."""
    builder = MaskBuilder(logits, analysis.axes)
    for term in terms:
        refuse_hidden_leaves(term.node, analysis)
    if len(terms) == 1 and terms[0].hidden_is is not None:
        if terms[0].factor == -torch.inf:
            return builder.finish(visible(builder, terms[0]), name)
    total = write_term(builder, terms[-1])
    for term in reversed(terms[:-1]):
        if term.hidden_is is None:
            part = write_term(builder, term)
            dtype = torch.promote_types(value_of(total).dtype, value_of(part).dtype)
            value = torch.empty((), dtype=dtype, device="meta")
            total = value_node(builder, term.node, aten.add.Tensor, value, total, part)
        else:
            total = write_fill(builder, term, total)
    passes = unblocked(terms, logits, analysis, f"passes {name}")
    return builder.finish(total, name, passes=passes)


def unblocked(
    terms: list[Term], logits: Node, analysis: TokenAnalysis, name: str
) -> MaskGraph | None:
    """The pairs whose scores get a gradient: those that no finite fill takes the place of."""
    fills = [t for t in terms if t.hidden_is is not None and t.factor != -torch.inf]
    if not fills:
        return None
    builder = MaskBuilder(logits, analysis.axes)
    total = visible(builder, fills[0])
    for fill in fills[1:]:
        value = torch.empty((), dtype=torch.bool, device="meta")
        part = visible(builder, fill)
        total = value_node(
            builder, fill.node, aten.logical_and.default, value, total, part
        )
    return builder.finish(total, name)


def visible(builder: MaskBuilder, fill: Term) -> Node:
    node = as_bool(builder, builder.copy(fill.node, last_two(fill.node, builder.axes)))
    if not fill.hidden_is:
        return node
    value = torch.empty((), dtype=torch.bool, device="meta")
    return value_node(builder, fill.node, aten.logical_not.default, value, node)


def filled(fill: Term, logits: Node, analysis: TokenAnalysis, name: str) -> MaskGraph:
    refuse_hidden_leaves(fill.node, analysis)
    builder = MaskBuilder(logits, analysis.axes)
    return builder.finish(visible(builder, fill), name, fill=fill.factor)


def refuse_hidden_leaves(node: Node, analysis: TokenAnalysis) -> None:
    """Everything a mask is made of must be there before the hidden states are."""
    if len(analysis.axes.get(node, ())) > 1 and node.op != "placeholder":
        for x in node.all_input_nodes:
            refuse_hidden_leaves(x, analysis)
    elif is_tensor(node):
        refuse_hidden_states(node, analysis)


def rest_graph(
    inner: Node,
    factor: float,
    rest: list[Term],
    logits: Node,
    scores: Node,
    analysis: TokenAnalysis,
) -> ScoreGraph:
    """``factor * inner + rest`` over tiles of the scores."""
    builder = ScoreBuilder(logits, scores, analysis)
    total = builder.copy(inner, last_two(inner, analysis.axes))
    value = torch.empty((), dtype=value_of(logits).dtype, device="meta")
    if factor != 1.0:
        total = value_node(builder, logits, aten.mul.Tensor, value, total, factor)
    for term in rest:
        part = write_term(builder, term)
        total = value_node(builder, term.node, aten.add.Tensor, value, total, part)
    return ScoreGraph(
        name=logits.name, module=builder.module(total), leaves=tuple(builder.leaves)
    )
