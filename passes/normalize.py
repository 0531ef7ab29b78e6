"""Rewrite the captured graph to fewer forms, so that later passes have fewer cases.

In: the graph as captured. Out: the same values, with

1. in-place operators replaced by their functional form (refused where a view of the target is
   alive: the rewrite would change what that view sees);
2. operators that do nothing erased (``to`` the same dtype and device, whole slices, ``contiguous``,
   dropout that is off, expands to the same shape), ``view`` made ``reshape`` so that erasing a
   ``contiguous`` cannot break it;
3. ``expand_as`` and ``full_like`` of scores written with sizes, which is all they read of their
   argument;
4. an einsum of two tensors over sequences written as a matrix product;
5. masks flattened over batch and heads and unflattened again left as they were;
6. mean losses and means over tokens written as a sum over a count, because sums over chunks add up.
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
from .base import GraphPass, insert_call, refuse
from .einsum_products import Product, match_product, write_product
from .find_token_axes import LOSSES
from .sizes import find_size, size_of_expr
from .token_rules import arg, op_name
from .unflatten_leads import unflatten, unflattens

aten = torch.ops.aten
MODE_CALLS = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")
LOSS_IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class Rewrite:
    node: Node
    apply: Callable[[CapturedGraph, Node], None]


class Normalize(GraphPass):
    name = "normalize"

    def find(self, captured: CapturedGraph) -> Iterable[Rewrite]:
        symbol = captured.token_symbol
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
            elif (product := match_product(node, symbol)) is not None:
                yield Rewrite(node, partial(product_of_einsum, product=product))
            elif unflattens(node):
                yield Rewrite(node, without_flattening)
            elif node.target is aten.expand_as.default:
                yield Rewrite(node, expand_to_sizes)
            elif op_name(node) in FILLED_LIKE and has_two_sequences(node, symbol):
                yield Rewrite(node, fill_of_sizes)
            elif node.target is aten.view.default:
                yield Rewrite(node, view_to_reshape)
            elif symbol is not None and is_mean_loss(node, symbol):
                yield Rewrite(node, split_mean_loss)
            elif symbol is not None and is_pointwise_loss(node, symbol):
                yield Rewrite(node, split_pointwise_loss)
            elif symbol is not None and is_token_mean(node, symbol):
                yield Rewrite(node, split_mean)

    def apply(self, captured: CapturedGraph, match: Rewrite) -> None:
        match.apply(captured, match.node)


def erase_effect(captured: CapturedGraph, node: Node) -> None:
    """Erase an enter/exit call; an exit takes its enter as input, so enters go last."""
    if not node.users:
        node.graph.erase_node(node)
    else:
        node.replace_all_uses_with(None)
        node.graph.erase_node(node)


def is_mutation(node: Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
    )


def is_view(node: Node) -> bool:
    """Whether the node's result may share memory with its input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        # A user's autograd.Function may return its input, which autograd makes a view.
        return getattr(target, "__name__", "") in ("getitem", "custom_function")
    return any(r.alias_info is not None for r in target._schema.returns) or op_name(
        node
    ) in (
        "reshape",
        "contiguous",
        "to",
        "flatten",
        "expand_as",
        "type_as",
    )


def functionalize(captured: CapturedGraph, node: Node) -> None:
    write_out_of_place(node)


def write_out_of_place(node: Node) -> None:
    """``x.add_(y)`` becomes ``z = x.add(y)``; later uses of x become uses of z."""
    name, target = op_name(node), node.args[0]
    change = f"write the {name} out of place in the model"
    if not name.endswith("_") or not isinstance(target, Node):
        raise refuse(node, "writes into a tensor", change)
    if target.op == "placeholder" or is_view(target):
        raise refuse(
            node, "writes into an input or into a view of another tensor", change
        )
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    if any(
        is_view(user) and any(order[u] > order[node] for u in user.users)
        for user in target.users
        if user is not node
    ):
        raise refuse(node, "writes into a tensor that a view of is used later", change)
    packet = getattr(aten, name[:-1], None)
    overload = node.target._overloadname
    if packet is None or overload not in packet.overloads():
        raise refuse(node, "has no out-of-place form", change)
    with node.graph.inserting_before(node):
        new = insert_call(
            node.graph, getattr(packet, overload), node.args, dict(node.kwargs), node
        )
        wanted = value_of(node).dtype
        if value_of(new).dtype != wanted:
            new = insert_call(node.graph, aten.to.dtype, (new, wanted), {}, node)
    new.meta["needs_grad"] = node.meta.get("needs_grad", False)
    for user in list(target.users):
        if order.get(user, -1) > order[node]:
            user.replace_input_with(target, new)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


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


def has_two_sequences(node: Node, symbol: sympy.Symbol | None) -> bool:
    sizes = [size_expr(s) for s in value_of(node).shape]
    return sum(symbol in size.free_symbols for size in sizes) > 1


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
    """The sizes as numbers and nodes; None if one is no sum of products of input sizes."""
    shape = [size_expr(size) for size in value_of(node).shape]
    try:
        return [size_of_expr(node.graph, size, node) for size in shape]
    except CantChunk:
        return None


def has_symbol(node: Node, symbol: sympy.Symbol) -> bool:
    return any(symbol in size_expr(s).free_symbols for s in value_of(node).shape)


def is_mean_loss(node: Node, symbol: sympy.Symbol) -> bool:
    """A mean classification loss over tokens whose count is the labels that are not ignored."""
    if op_name(node) not in LOSSES or int(arg(node, 3, "reduction", 1)) != 1:
        return False
    labels, weight = node.args[1], arg(node, 2, "weight")
    return (
        weight is None
        and not value_of(labels).is_floating_point()
        and has_symbol(labels, symbol)
    )


def split_mean_loss(captured: CapturedGraph, node: Node) -> None:
    """mean = sum over rows / number of rows whose label is not ``ignore_index``."""
    graph, args, kwargs = node.graph, list(node.args), dict(node.kwargs)
    if len(args) > 3:
        args[3] = 2
    else:
        kwargs["reduction"] = 2
    ignored = arg(node, 4, "ignore_index", LOSS_IGNORE_INDEX)
    with graph.inserting_before(node):
        total = insert_call(graph, node.target, tuple(args), kwargs, node)
        counted = insert_call(graph, aten.ne.Scalar, (args[1], ignored), {}, node)
        count = insert_call(graph, aten.sum.default, (counted,), {}, node)
        mean = insert_call(graph, aten.div.Tensor, (total, count), {}, node)
    replace_keeping_grad(node, mean, [total, mean])


# Losses that are a mean or sum of a pointwise function: where their reduction argument is.
POINTWISE_LOSSES = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}


def is_pointwise_loss(node: Node, symbol: sympy.Symbol) -> bool:
    index = POINTWISE_LOSSES.get(op_name(node))
    return (
        index is not None
        and int(arg(node, index, "reduction", 1)) in (1, 2)
        and has_symbol(node.args[0], symbol)
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


def is_token_mean(node: Node, symbol: sympy.Symbol) -> bool:
    """A float mean whose result no longer has the token axis its input had."""
    return (
        op_name(node) == "mean"
        and has_symbol(node.args[0], symbol)
        and not has_symbol(node, symbol)
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
        total = insert_call(
            graph, aten.sum.dim_IntList, (x, dims, keepdim), dtype, node
        )
        size = sympy.Mul(*(size_expr(shape[dim]) for dim in dims))
        count = size_of_expr(graph, size, node)
        mean = insert_call(graph, aten.div.Tensor, (total, count), {}, node)
    replace_keeping_grad(node, mean, [total, mean])


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
