"""Recognize attention that is written out as products and a softmax.

In: a matrix product whose last two dimensions are both sequence lengths. Out: a :class:`Spelled`,
everything between that product and the product with the values, or the reason why it is not
attention.

Terms. *Scores* are values between the first product and the softmax, *weights* those between the
softmax and the second product. *Lead* is the shape before the last two dimensions: ``[B, H]``,
``[B * H]``, ``[B, G, H / G]`` or nothing.

Contract: pure. Scores may pass through any pointwise arithmetic with values that do not depend on
them, changes of lead, a subtraction of their row maximum (a softmax does not see it) and one more
column per row that the weights lose again (sink logits). Weights may pass through casts, changes of
lead and dropout. Nothing in between may be read from outside.

Limits: softmax over the last dimension; one product of queries and keys.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import sympy
from torch.fx import Node

from ..graph import is_tensor, size_expr, value_of
from .mask_nodes import is_pointwise
from .token_rules import arg, op_name

PRODUCTS = ("matmul", "bmm", "baddbmm")
VIEWS = ("reshape", "view", "_unsafe_view", "flatten", "unflatten", "view_as")
CASTS = ("to", "_to_copy", "type_as", "contiguous", "clone")


class Part(enum.Enum):
    """What a value between the two products is."""

    SCORES = "scores"
    SUNK = "scores with a sink column"
    MAXIMUM = "row maximum of the scores"
    WEIGHTS = "weights"
    SUNK_WEIGHTS = "weights with a sink column"


class NotAttention(Exception):
    """Why a product of two sequences is not attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spelled:
    """Attention from ``product`` (scores) to ``output`` (weights times ``values``).

    ``chain``: the score arithmetic in graph order, up to ``logits``, what the softmax takes;
    ``same`` maps a value to the earlier one it equals as far as a softmax can see. ``sink`` is the
    joined column, ``dropout_p`` what the weights lose.
    """

    product: Node
    chain: tuple[Node, ...]
    same: dict[Node, Node]
    logits: Node
    output: Node
    values: Node
    sink: Node | None
    dropout_p: float
    leads: tuple[tuple[sympy.Expr, ...], ...]


def lead_of(node: Node) -> tuple[sympy.Expr, ...]:
    return tuple(size_expr(s) for s in value_of(node).shape[:-2])


def tail_of(node: Node) -> tuple[sympy.Expr, ...]:
    return tuple(size_expr(s) for s in value_of(node).shape[-2:])


def is_score_product(node: Node) -> bool:
    """A product of rows along two sequences, summed over a dimension that is none."""
    if node.op != "call_function" or op_name(node) not in PRODUCTS:
        return False
    first = node.args[1] if op_name(node) == "baddbmm" else node.args[0]
    if not is_tensor(node) or value_of(node).dim() < 2 or value_of(first).dim() < 2:
        return False
    contracted = size_expr(value_of(first).shape[-1])
    return contracted.is_Integer and all(size.is_Symbol for size in tail_of(node))


def match_spelled(product: Node) -> Spelled:
    """The attention that starts at ``product``; raises NotAttention."""
    matcher = _Matcher(product)
    matcher.walk()
    return matcher.result()


class _Matcher:
    def __init__(self, product: Node) -> None:
        self.product = product
        self.tail = tail_of(product)
        self.parts: dict[Node, Part] = {product: Part.SCORES}
        self.same: dict[Node, Node] = {}
        self.chain: list[Node] = []
        self.logits: Node | None = None
        self.output: Node | None = None
        self.sink: Node | None = None
        self.dropout_p = 0.0
        self.leads = {lead_of(product): None}

    def walk(self) -> None:
        """Visit what is computed from the scores, in graph order."""
        pending = set(self.product.users)
        node = self.product.next
        while pending:
            if node.op == "output":
                raise NotAttention("its scores or weights are returned")
            if node in pending:
                pending.discard(node)
                if self.visit(node):
                    pending.update(node.users)
            node = node.next

    def visit(self, node: Node) -> bool:
        """Give ``node`` its part; False when it ends the attention."""
        sources = [x for x in node.all_input_nodes if x in self.parts]
        found = {self.parts[x] for x in sources}
        if found <= {Part.SCORES, Part.SUNK, Part.MAXIMUM}:
            self.parts[node] = self.visit_scores(node, sources)
            return True
        if len(sources) != 1:
            raise NotAttention("its weights meet its scores again")
        if op_name(node) in PRODUCTS[:2]:
            self.finish(node, sources[0])
            return False
        self.parts[node] = self.visit_weights(node, sources[0])
        return True

    def visit_scores(self, node: Node, sources: list[Node]) -> Part:
        name, x = op_name(node), sources[0]
        part = self.parts[x]
        if name == "getitem" and part is Part.MAXIMUM and node.args[1] == 0:
            return part
        if name == "detach" and part is Part.MAXIMUM:
            return part
        if name in ("max", "amax") and self.is_row_maximum(node):
            return Part.MAXIMUM
        if name in ("softmax", "_softmax", "_safe_softmax"):
            return self.visit_softmax(node, x)
        if name == "sub" and len(sources) == 2:
            a, b = node.args[:2]
            if self.parts[b] is Part.MAXIMUM and self.parts[a] is not Part.MAXIMUM:
                self.same[node] = a
                return self.parts[a]
        if any(self.parts[x] is not Part.SCORES for x in sources):
            raise NotAttention(f"{name} of scores with a sink column")
        if name == "cat":
            return self.visit_sink(node, x)
        if name in VIEWS:
            self.check_lead(node)
        elif name == "detach" or not is_pointwise(node):
            raise NotAttention(f"{name} works on its scores")
        elif tail_of(node) != self.tail or lead_of(node) not in self.leads:
            raise NotAttention(f"{name} broadcasts its scores")
        self.chain.append(node)
        return Part.SCORES

    def is_row_maximum(self, node: Node) -> bool:
        dims = arg(node, 1, "dim")
        dims = [dims] if isinstance(dims, int) else dims
        rank = value_of(node.args[0]).dim()
        return (
            isinstance(dims, (list, tuple))
            and [d % rank for d in dims] == [rank - 1]
            and bool(arg(node, 2, "keepdim", False))
        )

    def visit_softmax(self, node: Node, x: Node) -> Part:
        rank = value_of(x).dim()
        if int(node.args[1]) % rank != rank - 1 or self.logits is not None:
            raise NotAttention("its softmax does not run over the keys")
        self.logits = x
        sunk = self.parts[x] is Part.SUNK
        return Part.SUNK_WEIGHTS if sunk else Part.WEIGHTS

    def visit_sink(self, node: Node, x: Node) -> Part:
        tensors = list(node.args[0])
        rank = value_of(node).dim()
        if (
            len(tensors) != 2
            or tensors[0] is not x
            or int(arg(node, 1, "dim", 0)) % rank != rank - 1
            or value_of(tensors[1]).shape[-1] != 1
        ):
            raise NotAttention("its scores are joined with others")
        self.sink = tensors[1]
        self.same[node] = x
        return Part.SUNK

    def visit_weights(self, node: Node, x: Node) -> Part:
        name, part = op_name(node), self.parts[x]
        if name == "slice" and part is Part.SUNK_WEIGHTS:
            if tail_of(node) == self.tail and arg(node, 2, "start") in (0, None):
                return Part.WEIGHTS
        if part is not Part.WEIGHTS:
            raise NotAttention(f"{name} of weights with a sink column")
        if name == "dropout":
            if self.dropout_p:
                raise NotAttention("its weights are dropped out twice")
            self.dropout_p = float(arg(node, 1, "p"))
        elif name in VIEWS:
            self.check_lead(node)
        elif name not in CASTS or not value_of(node).is_floating_point():
            raise NotAttention(f"{name} works on its weights")
        return part

    def check_lead(self, node: Node) -> None:
        if value_of(node).dim() < 2 or tail_of(node) != self.tail:
            raise NotAttention("a view regroups its scores")
        self.leads.setdefault(lead_of(node))

    def finish(self, node: Node, weights: Node) -> None:
        if self.parts[weights] is not Part.WEIGHTS or self.output is not None:
            raise NotAttention("its weights are used in several products")
        if node.args[0] is not weights or node.args[1] in self.parts:
            raise NotAttention("its weights are not the left factor of a product")
        self.output = node

    def result(self) -> Spelled:
        if self.logits is None or self.output is None:
            raise NotAttention(
                "no softmax over the keys and product with values follow"
            )
        return Spelled(
            product=self.product,
            chain=tuple(self.chain),
            same=self.same,
            logits=self.logits,
            output=self.output,
            values=self.output.args[1],
            sink=self.sink,
            dropout_p=self.dropout_p,
            leads=tuple(self.leads),
        )
