"""Token rules of the operators that compute: products, reductions, lookups, losses.

Same contract as ``token_rules``; see there for what a rule proves.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph import TokenAxis, is_tensor, value_of
from .token_rules import (
    NotTokenwise,
    RuleContext,
    arg,
    broadcast,
    not_over_tokens,
    only_axes,
    op_name,
    rule,
)
from .token_rules_rows import counts_of_one_hot


@rule("linear")
def linear(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x = node.args[0]
    only_axes(ctx, node, [x])
    not_over_tokens(ctx, x, [-1], "linear")
    return ctx.of(x)


def product(
    ctx: RuleContext, node: Node, a: Node, b: Node, extra: Node | None = None
) -> tuple[TokenAxis, ...]:
    """``a @ b`` with broadcasting batch dims; the contracted dim may hold no token axis."""
    rank_a, rank_b, rank = ctx.rank(a), ctx.rank(b), ctx.rank(node)
    if rank_a < 2 or rank_b < 2:
        return vector_product(ctx, node, a, b)
    not_over_tokens(ctx, a, [-1], "a matrix product's sum")
    not_over_tokens(ctx, b, [-2], "a matrix product's sum")
    found: dict[int, TokenAxis] = {}
    for x, own in ((a, rank_a), (b, rank_b)):
        for axis in ctx.of(x):
            dim = axis.dim + rank - own
            moved = axis.at(dim)
            if found.setdefault(dim, moved) != moved:
                raise NotTokenwise(
                    "factors are flattened over tokens in different orders"
                )
    for x, own in ((a, rank_a), (b, rank_b)):
        mine = {axis.dim + rank - own for axis in ctx.of(x)}
        shape = ctx.shape(x)
        for dim in found:
            batch = rank - own <= dim < rank - 2
            if batch and dim not in mine and shape[dim - rank + own] != 1:
                raise NotTokenwise(
                    f"{x.name} meets the token axis with another dimension"
                )
    result = tuple(found[dim] for dim in sorted(found))
    if extra is not None and ctx.of(extra) and ctx.of(extra) != result:
        raise NotTokenwise("the added matrix has other token axes than the product")
    return result


def vector_product(
    ctx: RuleContext, node: Node, a: Node, b: Node
) -> tuple[TokenAxis, ...]:
    if ctx.rank(b) == 1 and not ctx.of(b):
        not_over_tokens(ctx, a, [-1], "a matrix product's sum")
        return ctx.of(a)
    raise NotTokenwise("a product with a vector over tokens")


@rule("matmul", "bmm", "mm")
def matmul(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    return product(ctx, node, node.args[0], node.args[1])


@rule("einsum")
def einsum(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """Tokenwise iff the token axis is one letter, in every operand that has one and the result."""
    equation, tensors = node.args[0].replace(" ", ""), list(node.args[1])
    if "->" not in equation or "." in equation:
        raise NotTokenwise("an einsum without a full equation")
    left, right = equation.split("->")
    letters: dict[str, TokenAxis] = {}
    for term, x in zip(left.split(","), tensors, strict=True):
        for axis in ctx.of(x):
            letter = term[axis.dim]
            known = letters.setdefault(letter, axis)
            if letter not in right or known.at(0) != axis.at(0):
                raise NotTokenwise("an einsum that sums over the token axis")
    found = [axis.at(right.index(letter)) for letter, axis in letters.items()]
    return tuple(sorted(found, key=lambda axis: axis.dim))


@rule("addmm", "baddbmm")
def addmm(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    return product(ctx, node, node.args[1], node.args[2], extra=node.args[0])


@rule(
    "softmax",
    "log_softmax",
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "topk",
    "flip",
    "roll",
)
def along_dim(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """Keeps the shape (topk: but for its own dim) and works along one or more dims."""
    x, name = node.args[0], op_name(node)
    index, default = {
        "topk": (2, -1),
        "roll": (2, None),
    }.get(name, (1, None))
    dims = arg(node, index, "dims" if name in ("flip", "roll") else "dim", default)
    if dims is None or dims == []:
        dims = range(ctx.rank(x))
    dims = [dims] if isinstance(dims, int) else list(dims)
    not_over_tokens(ctx, x, dims, name)
    return ctx.of(x)


@rule(
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "prod",
    "any",
    "all",
    "var",
    "std",
    "var_mean",
    "logsumexp",
    "norm",
    "linalg_vector_norm",
    "count_nonzero",
    "median",
)
def reduction(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, name = node.args[0], op_name(node)
    if len(node.args) > 1 and isinstance(node.args[1], Node) and name in ("max", "min"):
        return broadcast(ctx, node, [node.args[0], node.args[1]])
    if name == "sum" and counts_of_one_hot(ctx, node):
        return ()
    index = 2 if name in ("norm", "linalg_vector_norm") else 1
    dims = arg(node, index, "dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        dims = range(ctx.rank(x))
    dims = [dims] if isinstance(dims, int) else list(dims)
    gone = not_over_tokens(ctx, x, dims, name)
    if ctx.rank(node) == ctx.rank(x):
        return ctx.of(x)
    return tuple(a.at(a.dim - sum(d < a.dim for d in gone)) for a in ctx.of(x))


@rule("layer_norm", "rms_norm", "_fused_rms_norm", "native_layer_norm")
def layer_norm(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, shape = node.args[0], list(node.args[1])
    only_axes(ctx, node, [x])
    rank = ctx.rank(x)
    not_over_tokens(ctx, x, range(rank - len(shape), rank), "the norm")
    return ctx.of(x)


@rule("embedding")
def embedding(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    only_axes(ctx, node, [node.args[1]])
    return ctx.of(node.args[1])


@rule("index")
def index(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """``table[rows]``: a lookup by token, or of the same rows of other dims for every token."""
    table, indices = node.args[0], list(node.args[1])
    used = [d for d, i in enumerate(indices) if i is not None]
    if used != list(range(used[0], used[0] + len(used))):
        raise NotTokenwise("indexes dimensions that are apart")
    rows = [i for i in indices if i is not None]
    if any(value_of(i).dtype in (torch.bool, torch.uint8) for i in rows):
        raise NotTokenwise("selects rows by a mask: the result's length varies")
    rank = max(ctx.rank(i) for i in rows)
    if ctx.of(table):
        if any(ctx.of(i) for i in rows):
            raise NotTokenwise("indexes a tensor that has a token axis by token")
        not_over_tokens(ctx, table, used, "indexing")
        grown = rank - len(used)
        return tuple(
            a.at(a.dim + (grown if a.dim > used[0] else 0)) for a in ctx.of(table)
        )
    found: dict[int, TokenAxis] = {}
    for i in rows:
        for axis in ctx.of(i):
            dim = used[0] + axis.dim + rank - ctx.rank(i)
            if found.setdefault(dim, axis.at(dim)) != axis.at(dim):
                raise NotTokenwise("indices are flattened over tokens differently")
    return tuple(found[dim] for dim in sorted(found))


@rule("index_put")
def index_put(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """``x[mask] = number`` with a mask of the same shape: a choice per element."""
    x, indices, value = node.args[:3]
    mask = indices[0]
    if (
        len(indices) != 1
        or mask is None
        or value_of(mask).dtype is not torch.bool
        or ctx.shape(mask) != ctx.shape(x)
        or ctx.rank(value) != 0
        or arg(node, 3, "accumulate", False)
    ):
        raise NotTokenwise("writes rows by their numbers")
    return broadcast(ctx, node, [x, mask])


@rule("index_select")
def index_select(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, dim, rows = (
        node.args[0],
        int(node.args[1]) % ctx.rank(node.args[0]),
        node.args[2],
    )
    if ctx.of(x) and ctx.of(rows):
        raise NotTokenwise("selects tokens by tokens")
    if ctx.of(rows):
        (axis,) = ctx.of(rows)
        return (axis.at(dim),)
    not_over_tokens(ctx, x, [dim], "index_select")
    return ctx.of(x)


@rule("gather", "take_along_dim", "scatter", "scatter_add")
def gather(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    x, dim, rows = node.args[0], int(node.args[1]), node.args[2]
    not_over_tokens(ctx, x, [dim], op_name(node))
    if not isinstance(rows, Node) or ctx.of(rows) != ctx.of(x):
        raise NotTokenwise("its index has other token axes than its input")
    for other in node.args[3:]:
        if isinstance(other, Node) and is_tensor(other) and ctx.of(other) != ctx.of(x):
            raise NotTokenwise("its source has other token axes than its input")
    return ctx.of(x)


@rule("one_hot")
def one_hot(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    if int(arg(node, 1, "num_classes", -1)) < 0:
        raise NotTokenwise("one_hot without num_classes looks at all tokens")
    return ctx.of(node.args[0])


@rule("broadcast_tensors")
def broadcast_tensors(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    return broadcast(ctx, node, list(node.args[0]))


@rule("bucketize", "isin")
def lookup(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    only_axes(ctx, node, [node.args[0]])
    return ctx.of(node.args[0])


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss")
def token_loss(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """With reduction "none": a loss per row. Sums and means are totals, see find_token_axes."""
    scores, labels = node.args[0], node.args[1]
    if int(arg(node, 3, "reduction", 1)) != 0:
        raise NotTokenwise("reduces over tokens")
    return loss_rows(ctx, scores, labels)


def loss_rows(ctx: RuleContext, scores: Node, labels: Node) -> tuple[TokenAxis, ...]:
    """Axes of the rows of a classification loss: scores ``[N, C, ...]`` against ``[N, ...]``."""
    if ctx.rank(scores) < 2:
        raise NotTokenwise("a loss of one row")
    not_over_tokens(ctx, scores, [1], "the loss")
    rows = tuple(a.at(a.dim - (a.dim > 1)) for a in ctx.of(scores))
    is_share = value_of(
        labels
    ).is_floating_point()  # of every class, as large as the scores
    if ctx.of(labels) != (ctx.of(scores) if is_share else rows):
        raise NotTokenwise("scores and labels are flattened over tokens differently")
    return rows


@rule("scaled_dot_product_attention")
def attention_per_token(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """Attention inside each token (over heads or patches): tokens are a batch dimension."""
    q, k, v = node.args[:3]
    for x in (q, k, v):
        not_over_tokens(ctx, x, [-2, -1], "attention")
    return broadcast(ctx, node, [q, k, v])


@rule("attention_scores")
def attention_scores(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """[B, H, q, k] from [B, H, q, D] and [B, G, k, D]."""
    q, k = node.args
    found = []
    for x, dim in ((q, 2), (k, 3)):
        not_over_tokens(ctx, x, [0, 1, -1], "attention")
        found += [axis.at(dim) for axis in ctx.of(x)]
    return tuple(found)


@rule("attention_from_scores")
def attention_from_scores(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    raise NotTokenwise("attends to other tokens")
