"""Raise attention in any spelling to one form with explicit scores.

In: attention spelled out (see ``spelled_attention``), or ``scaled_dot_product_attention`` in a form
the tiles do not take as it is: dropout, a mask with a gradient, tensors that are not
``[B, H, S, D]``, operands that autocast casts (written out as casts, so that what is stored and
exchanged has the type that attention reads), ``is_causal`` between two sequences (written out as a
mask). Out, in the same graph:

    scores = attention_scores(q, k)                      [B, H, q, k]
    logits = the model's own arithmetic on the scores
    result = attention_from_scores(q, k, v, logits, sinks, seed, dropout_p)

with q, k, v as ``[B, H, S, D]`` (G key/value heads), which ``match_attention`` reads and a part
that runs whole can execute. SDPA on other ranks stays SDPA, on four dimensions.

Contract: same values but for rounding: the softmax is taken in fp32 at least. A dropout of the
weights draws one seed a call from torch's default generator; the bits are not those of eager
dropout, the distribution is.

What looks like attention but is not raised keeps its operators, with the reason in
``meta["not_attention"]`` of the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy
import torch
from torch.fx import Graph, Node

from ..graph import CapturedGraph, is_tensor, size_expr, value_of
from ..kernels.reference import attention_from_scores, attention_scores
from .base import GraphPass, insert_from, refuse
from .counter_dropout import MAX_SEED
from .sizes import size_of_expr
from .spelled_attention import (
    VIEWS,
    NotAttention,
    Spelled,
    is_score_product,
    lead_of,
    match_spelled,
)
from .token_rules import arg, op_name

aten = torch.ops.aten
Lead = tuple[sympy.Expr, ...]


class RaiseAttention(GraphPass):
    name = "raise_attention"

    def find(self, captured: CapturedGraph) -> Iterable[Spelled | Node]:
        for node in captured.module.graph.nodes:
            if node.op != "call_function":
                continue
            if op_name(node) == "scaled_dot_product_attention":
                if not is_tile_form(node):
                    yield node
            elif is_score_product(node):
                try:
                    yield match_spelled(node)
                except NotAttention as reason:
                    node.meta["not_attention"] = str(reason)

    def apply(self, captured: CapturedGraph, match: Spelled | Node) -> None:
        if isinstance(match, Spelled):
            with match.output.graph.inserting_before(match.output):
                result = _FromSpelled(match).result()
            weights = match.output.args[0]
            replace(match.output, result)
            erase_unread(weights)
            return
        with match.graph.inserting_before(match):
            result = _FromSdpa(match).result()
        replace(match, result)


def replace(old: Node, new: Node) -> None:
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def erase_unread(node: Node) -> None:
    """Erase what only led to ``node``; a dropout without a reader is no dead code to FX."""
    pending, erased = [node], set()
    while pending:
        node = pending.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            pending.extend(node.all_input_nodes)
            node.graph.erase_node(node)
            erased.add(node)


def is_sequence(node: Node) -> bool:
    return value_of(node).dim() >= 2 and size_expr(value_of(node).shape[-2]).is_Symbol


def is_tile_form(node: Node) -> bool:
    """Whether tiles take this SDPA call as it is."""
    return not (
        needs_scores(node)
        or has_other_rank(node)
        or casts_operands(node)
        or is_causal_across(node)
    )


def casts_operands(node: Node) -> bool:
    """Autocast casts the query, key or value."""
    operands = node.args[:3]
    return is_sequence(operands[0]) and any(
        value_of(x).dtype != value_of(node).dtype for x in operands
    )


def is_causal_across(node: Node) -> bool:
    """``is_causal`` between two sequences: their chunks do not end at the same tokens, so which
    pairs a tile shows is for a mask to say."""
    q, k = node.args[:2]
    return (
        bool(arg(node, 5, "is_causal", False))
        and is_sequence(q)
        and is_sequence(k)
        and size_expr(value_of(q).shape[-2]) != size_expr(value_of(k).shape[-2])
    )


def needs_scores(node: Node) -> bool:
    """SDPA with dropout, or whose mask has a gradient."""
    if not all(is_sequence(x) for x in node.args[:2]):
        return False
    mask = arg(node, 3, "attn_mask")
    has_grad = isinstance(mask, Node) and bool(mask.meta.get("needs_grad", False))
    return has_grad or float(arg(node, 4, "dropout_p", 0.0)) > 0.0


def has_other_rank(node: Node) -> bool:
    return is_sequence(node.args[0]) and any(
        value_of(x).dim() != 4 for x in node.args[:3]
    )


def two_dims(leads: Sequence[Lead]) -> Lead:
    """(batch, heads) for the leads that one attention's values have."""
    by_rank = {len(lead): lead for lead in leads}
    if 2 in by_rank:
        return by_rank[2]
    if max(by_rank) > 2:
        lead = by_rank[max(by_rank)]
        return (lead[0], sympy.Mul(*lead[1:]))
    if 1 in by_rank:
        return (by_rank[1][0], sympy.S.One)
    return (sympy.S.One, sympy.S.One)


class _Writer:
    """Writes views and calls like ``like``."""

    def __init__(self, like: Node) -> None:
        self.like = like
        self.graph: Graph = like.graph

    def call(self, target: object, *args: object, **kwargs: object) -> Node:
        return insert_from(self.graph, target, args, self.like, **kwargs)

    def call_as_typed(self, target: object, *args: object) -> Node:
        return insert_from(self.graph, target, args, self.like, as_typed=True)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        if value_of(x).dtype == dtype:
            return x
        return self.call(aten.to.dtype, x, dtype)

    def reshape(self, x: Node, shape: Sequence[sympy.Expr]) -> Node:
        """``x`` in ``shape``; a view of a view is a view of the source."""
        wanted = list(shape)
        source = x
        while True:
            if [size_expr(s) for s in value_of(source).shape] == wanted:
                return source
            if source.op != "call_function" or op_name(source) not in VIEWS:
                break
            source = source.args[0]
        sizes = [size_of_expr(self.graph, size, self.like) for size in wanted]
        return self.call(aten.reshape.default, x, sizes)

    def expand(self, x: Node, shape: Sequence[sympy.Expr]) -> Node:
        if [size_expr(s) for s in value_of(x).shape] == list(shape):
            return x
        sizes = [size_of_expr(self.graph, size, self.like) for size in shape]
        return self.call(aten.expand.default, x, sizes)

    def to_lead(self, x: Node, lead: Lead, wanted: Lead, *, heads: bool) -> Node:
        """``x``, which broadcasts against ``lead + (q, k)``, against ``wanted + (q, k)``.

        With ``heads`` a trailing 1 of a lead of three means grouped heads: they stay fewer.
        """
        rank = value_of(x).dim()
        if rank <= 2 and not heads:
            return x
        shape = [size_expr(s) for s in value_of(x).shape]
        shape = [sympy.S.One] * (len(lead) + 2 - rank) + shape
        have, tail = tuple(shape[:-2]), shape[-2:]
        if have == wanted or (len(have) == 2 and not heads):
            return self.reshape(x, [*have, *tail])
        if all(size == 1 for size in have) and not heads:
            return self.reshape(x, [sympy.S.One, sympy.S.One, *tail])
        if len(have) <= 1:
            if have and have[0] == 1:
                have = tuple(lead)
                x = self.expand(self.reshape(x, [sympy.S.One, *tail]), [*have, *tail])
            return self.reshape(x, [*wanted, *tail])
        if len(have) == 2:
            # Grouped or missing heads stay; a missing batch is made.
            return self.expand(
                self.reshape(x, [*have, *tail]), [wanted[0], have[1], *tail]
            )
        first, rest = have[0], have[1:]
        if heads and rest[-1] == 1:
            rest = (*rest[:-1], sympy.S.One)
            merged = sympy.Mul(*rest)
        elif all(size == 1 for size in rest):
            merged = sympy.S.One
        else:
            x = self.expand(self.reshape(x, [*have, *tail]), [first, *lead[1:], *tail])
            merged = sympy.Mul(*lead[1:])
        x = self.reshape(x, [first, merged, *tail])
        return self.expand(x, [wanted[0], merged, *tail]) if heads else x

    def transposed(self, x: Node) -> Node:
        """``x`` with its last two dims swapped; undoes a transpose that made it."""
        rank = value_of(x).dim()
        name = op_name(x) if x.op == "call_function" else ""
        if name in ("transpose", "swapaxes", "swapdims"):
            if {d % rank for d in x.args[1:3]} == {rank - 2, rank - 1}:
                return x.args[0]
        if name in ("mT",) or (name == "t" and rank == 2):
            return x.args[0]
        if name == "permute":
            order = [d % rank for d in x.args[1]]
            if order == [*range(rank - 2), rank - 1, rank - 2]:
                return x.args[0]
        return self.call(aten.transpose.int, x, -1, -2)

    def finish(
        self,
        q: Node,
        k: Node,
        v: Node,
        logits: Node,
        sinks: Node | None,
        dropout_p: float,
    ) -> Node:
        seed = None
        if dropout_p > 0.0:
            device = value_of(q).device
            seed = self.call(aten.randint.low, 0, MAX_SEED, [], device=device)
        return self.call_as_typed(
            attention_from_scores, q, k, v, logits, sinks, seed, dropout_p
        )


class _FromSpelled(_Writer):
    """Rewrites one spelled-out attention."""

    def __init__(self, match: Spelled) -> None:
        super().__init__(match.output)
        self.match = match
        self.lead = two_dims(match.leads)

    def result(self) -> Node:
        match, product = self.match, self.match.product
        is_sum = op_name(product) == "baddbmm"
        left, right = product.args[1:3] if is_sum else product.args[:2]
        lead = lead_of(product)
        q = self.to_lead(left, lead, self.lead, heads=True)
        k = self.to_lead(self.transposed(right), lead, self.lead, heads=True)
        v = self.to_lead(match.values, lead_of(match.output), self.lead, heads=True)
        # Under autocast either product may cast; where they differ, the wider type serves both.
        dtype = torch.promote_types(
            value_of(product).dtype, value_of(match.output).dtype
        )
        q, k, v = (self.cast(x, dtype) for x in (self.with_heads(q), k, v))
        scores = self.call_as_typed(attention_scores, q, k)
        if is_sum:
            scores = self.added(product, scores)
        made = {product: scores}
        for node in match.chain:
            made[node] = self.again(node, made)
        logits = made[self.behind(match.logits)]
        result = self.finish(q, k, v, logits, self.sinks(), match.dropout_p)
        wanted = value_of(match.output)
        result = self.cast(result, wanted.dtype)
        return self.reshape(result, [size_expr(s) for s in wanted.shape])

    def with_heads(self, q: Node) -> Node:
        """Queries carry all H heads."""
        shape = [size_expr(s) for s in value_of(q).shape]
        return self.expand(q, [*self.lead, *shape[2:]])

    def behind(self, node: Node) -> Node:
        while node in self.match.same:
            node = self.match.same[node]
        return node

    def added(self, product: Node, scores: Node) -> Node:
        """``beta * side + alpha * scores``."""
        alpha, beta = arg(product, 4, "alpha", 1), arg(product, 3, "beta", 1)
        side = self.to_lead(product.args[0], lead_of(product), self.lead, heads=False)
        if alpha != 1:
            scores = self.call(aten.mul.Scalar, scores, alpha)
        if beta == 0:
            return scores
        if beta != 1:
            side = self.call(aten.mul.Scalar, side, beta)
        return self.call(aten.add.Tensor, scores, side)

    def again(self, node: Node, made: dict[Node, Node]) -> Node:
        """One operator of the chain on ``[B, H, q, k]``."""
        if op_name(node) in VIEWS:
            return made[self.behind(node.args[0])]
        lead = lead_of(node)

        def convert(x: Node) -> Node:
            source = self.behind(x)
            if source in made:
                return made[source]
            return self.to_lead(x, lead, self.lead, heads=False) if is_tensor(x) else x

        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), convert)
        return self.call(node.target, *args, **kwargs)

    def sinks(self) -> Node | None:
        """The sink logits as [H], from the column they were expanded to."""
        node = self.match.sink
        if node is None:
            return None
        heads = self.lead[1]
        while True:
            shape = [size_expr(s) for s in value_of(node).shape]
            if sympy.Mul(*shape) == heads:
                return self.reshape(node, [heads])
            if op_name(node) not in ("expand", "unsqueeze", *VIEWS):
                raise refuse(
                    self.match.sink,
                    "joins a column to the attention scores that is not one logit a head",
                    "use one sink logit for each head",
                )
            node = node.args[0]


class _FromSdpa(_Writer):
    """Rewrites one SDPA call: to four dimensions, and to explicit scores where needed."""

    def result(self) -> Node:
        node = self.like
        q, k, v = node.args[:3]
        lead = lead_of(q)
        wanted = two_dims([lead])
        q, k, v = (
            self.cast(
                self.flat_lead(x, wanted if x is q else two_dims([lead_of(x)])),
                value_of(node).dtype,
            )
            for x in (q, k, v)
        )
        mask = arg(node, 3, "attn_mask")
        if isinstance(mask, Node):
            mask = self.to_lead(mask, lead, wanted, heads=False)
        causal, scale = bool(arg(node, 5, "is_causal", False)), arg(node, 6, "scale")
        dropout_p = float(arg(node, 4, "dropout_p", 0.0))
        if not needs_scores(node):
            if is_causal_across(node):
                mask, causal = self.causal_mask(q, k), False
            result = self.call(
                node.target,
                *(q, k, v, mask, dropout_p, causal),
                scale=scale,
                enable_gqa=bool(arg(node, 7, "enable_gqa", False)),
            )
        else:
            scores = self.call_as_typed(attention_scores, q, k)
            if scale is None:
                scale = int(value_of(q).shape[-1]) ** -0.5
            target = aten.mul.Tensor if isinstance(scale, Node) else aten.mul.Scalar
            scores = self.call(target, scores, scale)
            mask = self.causal_mask(q, k) if causal else mask
            logits = self.masked(scores, mask)
            result = self.finish(q, k, v, logits, None, dropout_p)
        return self.reshape(result, [size_expr(s) for s in value_of(node).shape])

    def flat_lead(self, x: Node, wanted: Lead) -> Node:
        tail = [size_expr(s) for s in value_of(x).shape[-2:]]
        if value_of(x).dim() > 4:
            shape = [size_expr(s) for s in value_of(x).shape]
            wanted = (sympy.Mul(*shape[:-3]), shape[-3])
        return self.reshape(x, [*wanted, *tail])

    def causal_mask(self, q: Node, k: Node) -> Node:
        """[q, k], True where the key is none of the later ones; both count from their own start."""
        rows, columns = (
            self.call(
                aten.arange.default,
                size_of_expr(self.graph, size_expr(value_of(x).shape[-2]), self.like),
                device=value_of(x).device,
            )
            for x in (q, k)
        )
        rows = self.call(aten.unsqueeze.default, rows, 1)
        return self.call(aten.le.Tensor, columns, rows)

    def masked(self, scores: Node, mask: object) -> Node:
        if not isinstance(mask, Node):
            return scores
        if value_of(mask).dtype is torch.bool:
            return self.call(aten.where.ScalarOther, mask, scores, -torch.inf)
        return self.call(aten.add.Tensor, scores, mask)
