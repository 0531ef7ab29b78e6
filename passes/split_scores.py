"""Split a raised attention's score arithmetic into a scale, a mask and the rest.

In: the ``attention_from_scores`` node. Out: :class:`ScoreParts`: logits = mask(rest(scores)), where
the mask is a :class:`MaskGraph` that can be classified tile by tile, and the rest a
:class:`ScoreGraph` (None when it is a number times the scores).

Terms. A value is *dependent* if it is computed from the scores. The logits are peeled from the
outside: ``factor * inner + terms``, with hidden pairs filled.

Contract: what has a gradient (a learned bias table, slopes) goes into the rest, with the
parameters as leaves; what has none and can be classified goes into the mask. Fills by -inf, or by
numbers so large that no score changes their sum, are terms of an additive mask; a smaller fill is
kept exact (``MaskGraph.fill``) if it is outermost and at most ``SMALLEST_FILL``, else it stays
in the rest. Casts of scores between float types are dropped: tiles compute in fp32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..graph import MaskGraph, ScoreGraph, is_tensor, value_of
from .base import refuse
from .find_token_axes import TokenAnalysis
from .token_rules import arg, op_name
from .write_scores import SCORE_RULES, Term, filled, rest_graph, summed

CASTS = ("to", "_to_copy", "type_as", "contiguous", "clone")
SMALLEST_FILL = -1e4
# A fill of at least this many times the rounding unit swallows every score it is added to.
ABSORBS = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreParts:
    mask: MaskGraph | None
    score: ScoreGraph | None
    scale: float
    members: tuple[Node, ...]


@dataclass(kw_only=True, slots=True)
class Peeled:
    """``factor * inner + terms``, and outside of that the exact fill."""

    inner: Node
    factor: float = 1.0
    terms: list[Term] = field(default_factory=list)
    fill: Term | None = None


def dependents(logits: Node, scores: Node) -> set[Node]:
    """The nodes between ``scores`` and ``logits``, both included."""
    before, pending = set(), [logits]
    while pending:
        node = pending.pop()
        if node not in before:
            before.add(node)
            pending.extend(node.all_input_nodes)
    found, pending = {scores}, [scores]
    while pending:
        for user in pending.pop().users:
            if user in before and user not in found:
                found.add(user)
                pending.append(user)
    return found


def number_of(node: Any) -> float | None:
    """The value of a constant: a number, or a tensor filled with one."""
    if isinstance(node, (int, float)):
        return float(node)
    if not isinstance(node, Node):
        return None
    if node.op == "get_attr":
        constant = getattr(node.graph.owning_module, node.target)
        return float(constant) if constant.numel() == 1 else None
    name = op_name(node)
    if name in ("full", "scalar_tensor", "new_full", "full_like"):
        index = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}[name]
        value = arg(node, index, "fill_value")
        return float(value) if isinstance(value, (int, float)) else None
    if name in ("zeros", "new_zeros", "zeros_like"):
        return 0.0
    if name in ("lift_fresh_copy", "lift_fresh", "detach", "clone", *CASTS):
        return number_of(node.args[0])
    return None


def peel(logits: Node, scores: Node, inside: set[Node]) -> Peeled:
    """Take operators off the outside of ``logits`` as long as they are understood."""
    peeled = Peeled(inner=logits)
    while peeled.inner is not scores and peel_one(peeled, inside):
        pass
    return peeled


def peel_one(peeled: Peeled, inside: set[Node]) -> bool:
    node = peeled.inner
    name = op_name(node)
    sources = [x for x in node.args if isinstance(x, Node) and x in inside]
    if name in CASTS and sources == [node.args[0]]:
        peeled.inner = sources[0]
        return True
    if len(sources) != 1:
        return False
    (x,) = sources
    if value_of(x).shape != value_of(node).shape:
        return False
    if name in ("add", "sub") and len(node.args) == 2 and not node.kwargs:
        a, b = node.args
        other = b if a is x else a
        sign = 1.0 if name == "add" else (-1.0 if a is x else 0.0)
        if sign == 0.0 or not isinstance(other, Node) or not is_tensor(other):
            return False
        peeled.terms.append(Term(other, peeled.factor * sign))
    elif name in ("mul", "div", "true_divide") and len(node.args) == 2:
        number = node.args[1] if node.args[0] is x else None
        if type(number) not in (int, float) or number == 0:
            return False
        peeled.factor *= number if name == "mul" else 1.0 / number
    elif name in ("masked_fill", "where"):
        fill = fill_of(node, x)
        if fill is None or not take_fill(peeled, fill):
            return False
    else:
        return False
    peeled.inner = x
    return True


def fill_of(node: Node, x: Node) -> Term | None:
    """The hidden pairs of a fill of ``x`` and the number they get."""
    if op_name(node) == "masked_fill":
        if node.args[0] is not x:
            return None
        condition, value, hidden_is = node.args[1], node.args[2], True
    else:
        condition, a, b = node.args
        value, hidden_is = (b, False) if a is x else (a, True)
    number = number_of(value)
    if number is None or not isinstance(condition, Node):
        return None
    return Term(condition, number, hidden_is)


def take_fill(peeled: Peeled, fill: Term) -> bool:
    """Add a fill: as a term if it swallows what it is added to, else as the exact one."""
    value = fill.factor * peeled.factor
    dtype = torch.promote_types(value_of(peeled.inner).dtype, torch.float32)
    unit = torch.finfo(dtype).eps
    if peeled.factor > 0 and (value == -torch.inf or -value * unit > ABSORBS):
        peeled.terms.append(Term(fill.node, value, fill.hidden_is))
        return True
    outermost = not peeled.terms and peeled.fill is None and peeled.factor == 1.0
    if outermost and value <= SMALLEST_FILL:
        peeled.fill = fill
        return True
    return False


def flat_terms(term: Term) -> list[Term]:
    """A sum with a part that has a gradient, as its parts."""
    node = term.node
    plain = term.hidden_is is None and node.meta.get("needs_grad", False)
    if plain and op_name(node) == "add" and len(node.args) == 2 and not node.kwargs:
        if all(isinstance(x, Node) and is_tensor(x) for x in node.args):
            parts = [Term(x, term.factor) for x in node.args]
            return [found for part in parts for found in flat_terms(part)]
    return [term]


def in_mask(term: Term, analysis: TokenAnalysis) -> bool:
    """Whether the term has no gradient and needs none of the rules for tables."""
    if term.node.meta.get("needs_grad", False):
        return False
    pending, seen = [term.node], {term.node}
    while pending:
        node = pending.pop()
        if len(analysis.axes.get(node, ())) > 1:
            if op_name(node) in SCORE_RULES:
                return False
            pending.extend(x for x in node.all_input_nodes if x not in seen)
            seen.update(node.all_input_nodes)
    return True


def refuse_learned_after_fill(terms: list[Term], rest: list[Term]) -> None:
    """In a row that is filled whole, what is added later gets a gradient and the scores do not."""
    learned = None
    for term in terms:
        if (
            learned is not None
            and term.hidden_is is not None
            and term.factor > -torch.inf
        ):
            raise refuse(
                learned.node,
                "is learned and added to scores after they are masked by a finite number",
                "add it before masking, or mask with -inf",
            )
        if term in rest and term.node.meta.get("needs_grad", False):
            learned = term


def scores_behind(node: Node) -> Node:
    """The product that a raised attention's logits are made from."""
    q, k, _, logits = node.args[:4]
    pending, seen = [logits], {logits}
    while pending:
        x = pending.pop()
        if op_name(x) == "attention_scores" and x.args == (q, k):
            return x
        pending.extend(y for y in x.all_input_nodes if y not in seen)
        seen.update(x.all_input_nodes)
    raise refuse(node, "its scores are not made from its queries and keys", "")


def split_scores(
    node: Node, analysis: TokenAnalysis, masks: dict[str, MaskGraph]
) -> ScoreParts:
    """The parts of one ``attention_from_scores``; ``masks`` shares equal masks by key."""
    logits, scores = node.args[3], scores_behind(node)
    inside = dependents(logits, scores)
    peeled = peel(logits, scores, inside)
    outer: list[Term] = []
    rest: list[Term] = []
    for term in (x for t in peeled.terms for x in flat_terms(t)):
        keep = peeled.fill is None and in_mask(term, analysis)
        (outer if keep else rest).append(term)
    refuse_learned_after_fill(peeled.terms, rest)
    mask = None
    if peeled.fill is not None:
        key = f"fill {peeled.fill.key}"
        mask = masks.get(key) or filled(peeled.fill, logits, analysis, key)
        masks[key] = mask
    elif outer:
        key = " + ".join(t.key for t in outer)
        mask = masks.get(key) or summed(outer, logits, analysis, key)
        masks[key] = mask
    score, scale = None, peeled.factor
    if peeled.inner is not scores or rest:
        score = rest_graph(peeled.inner, peeled.factor, rest, logits, scores, analysis)
        scale = 1.0
    return ScoreParts(mask=mask, score=score, scale=scale, members=tuple(inside))
