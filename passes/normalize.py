"""Rewrite the captured graph to fewer forms, so that later passes have fewer cases.

In: the graph as captured. Out: the same values, with

1. in-place operators replaced by their functional form (see ``functionalize``);
2. operators that do nothing erased (``to`` the same dtype and device, whole slices, ``contiguous``,
   dropout that is off, expands to the same shape), ``view`` made ``reshape`` so that erasing a
   ``contiguous`` cannot break it;
3. ``expand_as`` and ``full_like`` of scores written with sizes, which is all they read of their
   argument;
4. an einsum of two tensors over sequences written as a matrix product;
5. masks flattened over batch and heads and unflattened again left as they were;
6. mean losses and means over tokens written as a sum over a count, because sums over chunks add up;
   so are parts of the sequence, see ``token_parts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import sympy
import torch
from torch.fx import Node

from ..errors import CantChunk
from ..graph import CapturedGraph, is_tensor, size_expr, value_of
from .base import GraphPass, insert_call
from .einsum_products import Product, match_product, write_product
from .find_totals import LOSSES
from .functionalize import is_mutation, write_out_of_place
from .sizes import find_size, size_of_expr
from .token_parts import (
    Symbols,
    is_row_pick,
    is_sum_of_part,
    is_token_pick,
    pick_as_sum,
    row_pick_as_sum,
    token_part,
    whole_of_part,
)
from .token_rules import arg, op_name
from .unflatten_leads import unflatten, unflattens

aten = torch.ops.aten
MODE_CALLS = ("_set_grad_enabled",)
LOSS_IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class Rewrite:
    node: Node
    apply: Callable[[CapturedGraph, Node], None]


class Normalize(GraphPass):
    name = "normalize"

    def find(self, captured: CapturedGraph) -> Iterable[Rewrite]:
        symbols = frozenset(captured.token_symbols)
        calls = [n for n in captured.module.graph.nodes if n.op == "call_function"]
        # Mutations go first: erasing the clone that a write was made safe by would undo it.
        for node in calls:
            if is_mutation(node):
                yield Rewrite(node, functionalize)
        for node in calls:
            if is_mutation(node):
                continue
            if getattr(node.target, "__name__", "") in MODE_CALLS:
                yield Rewrite(node, erase_effect)  # its state is in each node's meta
            elif node.target is aten.sym_size.int and node.args[0].op != "placeholder":
                yield Rewrite(node, size_from_input)
            elif op_name(node) == "cat" and any(
                is_empty_vector(x) for x in node.args[0]
            ):
                yield Rewrite(node, drop_empty_parts)
            elif does_nothing(node):
                yield Rewrite(node, replace_by_input)
            elif (product := match_product(node, symbols)) is not None:
                yield Rewrite(node, partial(product_of_einsum, product=product))
            elif unflattens(node):
                yield Rewrite(node, without_flattening)
            elif node.target is aten.expand_as.default:
                yield Rewrite(node, expand_to_sizes)
            elif op_name(node) in FILLED_LIKE and has_two_sequences(node, symbols):
                yield Rewrite(node, fill_of_sizes)
            elif node.target is aten.view.default:
                yield Rewrite(node, view_to_reshape)
            elif is_mean_loss(node, symbols):
                yield Rewrite(node, split_mean_loss)
            elif is_pointwise_loss(node, symbols):
                yield Rewrite(node, split_pointwise_loss)
            elif is_token_mean(node, symbols):
                yield Rewrite(node, split_mean)
            elif is_token_pick(node, symbols):
                yield Rewrite(node, pick_by_sum)
            elif is_row_pick(node, symbols):
                yield Rewrite(node, row_pick_by_sum)
            elif is_sum_of_part(node, symbols):
                yield Rewrite(node, sum_whole)

    def apply(self, captured: CapturedGraph, match: Rewrite) -> None:
        match.apply(captured, match.node)


def erase_effect(captured: CapturedGraph, node: Node) -> None:
    """Erase an enter/exit call; an exit takes its enter as input, so enters go last."""
    if not node.users:
        node.graph.erase_node(node)
    else:
        node.replace_all_uses_with(None)
        node.graph.erase_node(node)


def functionalize(captured: CapturedGraph, node: Node) -> None:
    write_out_of_place(node)


def does_nothing(node: Node) -> bool:
    name = op_name(node)
    x = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if x is None or not is_tensor(node) or not is_tensor(x):
        return False
    before, after = value_of(x), value_of(node)
    same_type = before.dtype == after.dtype and before.device == after.device
    same_shape = [size_expr(s) for s in before.shape] == [
        size_expr(s) for s in after.shape
    ]
    if name in (
        "to",
        "_to_copy",
        "type_as",
        "contiguous",
        "clone",
        "alias",
        "lift_fresh",
    ):
        return same_type
    if name in ("expand", "expand_as", "slice", "narrow", "view_as"):
        return (
            same_type
            and same_shape
            and (name != "slice" or arg(node, 4, "step", 1) == 1)
        )
    if name in ("dropout", "feature_dropout", "alpha_dropout"):
        return not arg(node, 2, "train") or arg(node, 1, "p") == 0.0
    if name in ("add", "sub") and node.args[1:] == (0,):
        return same_type
    if (
        name in ("mul", "div")
        and len(node.args) == 2
        and type(node.args[1]) in (int, float)
    ):
        return node.args[1] == 1 and same_type
    return False


def is_empty_vector(node: Node) -> bool:
    """torch.cat ignores tensors of shape [0], whatever the others' rank (a fresh cache is one)."""
    return is_tensor(node) and [size_expr(s) for s in value_of(node).shape] == [0]


def drop_empty_parts(captured: CapturedGraph, node: Node) -> None:
    rest = [x for x in node.args[0] if not is_empty_vector(x)]
    if len(rest) == 1 and value_of(rest[0]).dtype == value_of(node).dtype:
        node.replace_all_uses_with(rest[0])
        node.graph.erase_node(node)
    elif rest:
        node.args = (rest, *node.args[1:])


def replace_by_input(captured: CapturedGraph, node: Node) -> None:
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def view_to_reshape(captured: CapturedGraph, node: Node) -> None:
    node.target = aten.reshape.default


def product_of_einsum(captured: CapturedGraph, node: Node, *, product: Product) -> None:
    write_product(node, product)


def without_flattening(captured: CapturedGraph, node: Node) -> None:
    unflatten(node)


def expand_to_sizes(captured: CapturedGraph, node: Node) -> None:
    """``x.expand_as(y)`` reads no more of y than its shape."""
    with node.graph.inserting_before(node):
        sizes = sizes_of(node)
        if sizes is None:
            return
        new = insert_call(
            node.graph, aten.expand.default, (node.args[0], sizes), {}, node
        )
    replace_keeping_grad(node, new, [new])


FILLED_LIKE = {"zeros_like": 0, "ones_like": 1, "full_like": None}


def has_two_sequences(node: Node, symbols: Symbols) -> bool:
    sizes = [size_expr(s) for s in value_of(node).shape]
    return sum(bool(symbols & size.free_symbols) for size in sizes) > 1


def fill_of_sizes(captured: CapturedGraph, node: Node) -> None:
    """``torch.full_like(scores, -inf)`` reads no more of the scores than their shape."""
    fill = FILLED_LIKE[op_name(node)]
    fill = arg(node, 1, "fill_value") if fill is None else fill
    value = value_of(node)
    kwargs = {"dtype": value.dtype, "device": value.device}
    with node.graph.inserting_before(node):
        sizes = sizes_of(node)
        if sizes is None:
            return
        new = insert_call(node.graph, aten.full.default, (sizes, fill), kwargs, node)
    replace_keeping_grad(node, new, [new])


def sizes_of(node: Node) -> list[int | Node] | None:
    """The sizes as numbers and nodes; None if one cannot be had from the inputs' sizes."""
    shape = [size_expr(size) for size in value_of(node).shape]
    try:
        return [size_of_expr(node.graph, size, node) for size in shape]
    except CantChunk:
        return None


def has_symbol(node: Node, symbols: Symbols) -> bool:
    return any(symbols & size_expr(s).free_symbols for s in value_of(node).shape)


def is_mean_loss(node: Node, symbols: Symbols) -> bool:
    """A mean classification loss over tokens whose count is the labels that are not ignored."""
    if op_name(node) not in LOSSES or int(arg(node, 3, "reduction", 1)) != 1:
        return False
    weight = arg(node, 2, "weight")
    fixed = weight is None or not weight.meta.get("needs_grad", False)
    return fixed and has_symbol(node.args[1], symbols)


def split_mean_loss(captured: CapturedGraph, node: Node) -> None:
    """mean = sum over rows / number of rows whose label is not ``ignore_index``.

    With class weights the number is the sum of the labels' weights; with class probabilities it
    is that of all rows.
    """
    graph, args, kwargs = node.graph, list(node.args), dict(node.kwargs)
    if len(args) > 3:
        args[3] = 2
    else:
        kwargs["reduction"] = 2
    with graph.inserting_before(node):
        total = insert_call(graph, node.target, tuple(args), kwargs, node)
        count = number_of_rows(node)
        mean = insert_call(graph, aten.div.Tensor, (total, count), {}, node)
    replace_keeping_grad(node, mean, [total, mean])


def number_of_rows(node: Node) -> Node | int:
    """What the mean of a classification loss divides by."""
    graph, labels, weight = node.graph, node.args[1], arg(node, 2, "weight")
    if value_of(labels).is_floating_point():
        shape = [size_expr(s) for s in value_of(labels).shape]
        del shape[min(1, len(shape) - 1)]
        return size_of_expr(graph, sympy.Mul(*shape), node)
    ignored = arg(node, 4, "ignore_index", LOSS_IGNORE_INDEX)

    def call(target: object, *args: object) -> Node:
        return insert_call(graph, target, args, {}, node)

    counted = call(aten.ne.Scalar, labels, ignored)
    if weight is not None:
        known = call(
            aten.masked_fill.Scalar, labels, call(aten.logical_not.default, counted), 0
        )
        each = call(aten.index.Tensor, weight, [known])
        counted = call(aten.mul.Tensor, each, counted)
    return call(aten.sum.default, counted)


# Losses that are a mean or sum of a pointwise function: where their reduction argument is.
POINTWISE_LOSSES = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "kl_div": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}


def is_pointwise_loss(node: Node, symbols: Symbols) -> bool:
    index = POINTWISE_LOSSES.get(op_name(node))
    return (
        index is not None
        and int(arg(node, index, "reduction", 1)) in (1, 2)
        and has_symbol(node.args[0], symbols)
    )


def split_pointwise_loss(captured: CapturedGraph, node: Node) -> None:
    """The loss per element, then its sum (over the number of elements for a mean)."""
    graph, args, kwargs = node.graph, list(node.args), dict(node.kwargs)
    index = POINTWISE_LOSSES[op_name(node)]
    mean = int(arg(node, index, "reduction", 1)) == 1
    if len(args) > index:
        args[index] = 0
    else:
        kwargs["reduction"] = 0
    with graph.inserting_before(node):
        each = insert_call(graph, node.target, tuple(args), kwargs, node)
        result = total = insert_call(graph, aten.sum.default, (each,), {}, node)
        if mean:
            size = sympy.Mul(*(size_expr(s) for s in value_of(each).shape))
            count = size_of_expr(graph, size, node)
            result = insert_call(graph, aten.div.Tensor, (total, count), {}, node)
    replace_keeping_grad(node, result, [each, total, result])


def is_token_mean(node: Node, symbols: Symbols) -> bool:
    """A float mean whose result no longer has the token axis its input had."""
    return (
        op_name(node) == "mean"
        and has_symbol(node.args[0], symbols)
        and not has_symbol(node, symbols)
    )


def split_mean(captured: CapturedGraph, node: Node) -> None:
    graph, x = node.graph, node.args[0]
    shape = value_of(x).shape
    dims = arg(node, 1, "dim")
    if dims is None or dims == []:
        dims = list(range(len(shape)))
    dims = [dims] if isinstance(dims, int) else list(dims)
    keepdim = bool(arg(node, 2, "keepdim", False))
    dtype = {"dtype": node.kwargs["dtype"]} if node.kwargs.get("dtype") else {}
    with graph.inserting_before(node):
        if token_part(x, frozenset(captured.token_symbols)):
            x = whole_of_part(node, x)
        total = insert_call(
            graph, aten.sum.dim_IntList, (x, dims, keepdim), dtype, node
        )
        size = sympy.Mul(*(size_expr(shape[dim]) for dim in dims))
        count = size_of_expr(graph, size, node)
        mean = insert_call(graph, aten.div.Tensor, (total, count), {}, node)
    replace_keeping_grad(node, mean, [total, mean])


def pick_by_sum(captured: CapturedGraph, node: Node) -> None:
    with node.graph.inserting_before(node):
        total, made = pick_as_sum(node)
    replace_keeping_grad(node, total, made)


def row_pick_by_sum(captured: CapturedGraph, node: Node) -> None:
    with node.graph.inserting_before(node):
        total, made = row_pick_as_sum(node)
    replace_keeping_grad(node, total, made)


def sum_whole(captured: CapturedGraph, node: Node) -> None:
    with node.graph.inserting_before(node):
        node.replace_input_with(node.args[0], whole_of_part(node, node.args[0]))


def size_from_input(captured: CapturedGraph, node: Node) -> None:
    """Take a size from an input's shape, so that no data flow hides in shape arithmetic."""
    with node.graph.inserting_before(node):
        size = find_size(node.graph, size_expr(value_of(node)), node)
    if size is not None:
        node.replace_all_uses_with(size)
        node.graph.erase_node(node)


def replace_keeping_grad(old: Node, new: Node, made: list[Node]) -> None:
    for node in made:
        node.meta["needs_grad"] = old.meta.get("needs_grad", False)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
