"""Give token counts that are numbers (or computed sizes) a symbol, so that they can be cut.

A vision or audio tower attends over a number of tokens that its configuration fixes, or that a
convolution computes from the length of its input. In: the captured graph. Out: the same graph with
``as_tokens`` where such tokens first appear: it gives the dimension a symbol u of its own, and
every operator after it that had the number in its arguments takes u instead.

Contract: u is equal to the number whenever the program runs (``CapturedGraph.lengths``), so the
rewrite changes no value; and every operator runs on sizes it was captured with, so what it asks of
them is guarded already. What it must not do is confuse the token count with another size of the
same number: then some operator's sizes stop fitting, and the graph is left as it was.

Algorithm, per length that an attention has and no input does: walk the graph; the first values that
depend on an input, lead to such an attention and have the length as a size are wrapped; so is every
other value of that size (a table of positions) where it meets them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from .._torch_private import decided_by_hints, new_size, statically_known_true
from ..errors import CantChunk
from ..graph import CapturedGraph, is_tensor, size_expr, value_of
from ..kernels.reference import as_length, as_tokens
from .base import GraphPass, set_value
from .find_token_axes import SCORE_PRODUCTS, dynamic_sizes
from .sizes import size_of_expr
from .token_rules import op_name

SOFTMAX = ("softmax", "_softmax", "_safe_softmax")
# Operators on the way from a product of queries and keys to its softmax.
SCORE_STEPS = frozenset(
    "add sub mul div true_divide to _to_copy masked_fill where view reshape _unsafe_view float "
    "contiguous clone type_as dropout".split()
)


# Not worth cutting; one query is a pooling token and no sequence.
FEW = 8


class NameLengths(GraphPass):
    name = "name_lengths"
    leaves_pure = False  # it runs before normalize

    def find(self, captured: CapturedGraph) -> Iterable[sympy.Expr]:
        known = dynamic_sizes(captured.module.graph)
        lengths: dict[sympy.Expr, None] = {}
        for node in attentions(captured.module.graph):
            for size in attended_sizes(node):
                if size not in known and not (size.is_Integer and size <= FEW):
                    lengths.setdefault(size)
        yield from lengths

    def apply(self, captured: CapturedGraph, match: sympy.Expr) -> None:
        try:
            renamed = _Renamer(captured, match)
            with decided_by_hints(renamed.known_in):
                renamed.run()
        except (
            RuntimeError,
            ValueError,
            TypeError,
            AssertionError,
            CantChunk,
            _DoesNotFit,
        ):
            return  # the length stays a number: what attends over it runs whole, and is reported
        captured.module = renamed.finished()
        captured.lengths[renamed.symbol] = match
        inputs = dynamic_sizes(captured.module.graph)
        attended = {
            s for n in attentions(captured.module.graph) for s in attended_sizes(n)
        }
        kept = [s for s in captured.token_symbols if s in attended & inputs]
        earlier = [s for s in captured.lengths if s in attended]
        captured.token_symbols = tuple(dict.fromkeys([*kept, *earlier]))


class _DoesNotFit(Exception):
    """The length is also the size of something else."""


def attentions(graph: Graph) -> list[Node]:
    """Attention calls, and products of queries and keys that a softmax reads."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not is_tensor(node):
            continue
        if op_name(node) == "scaled_dot_product_attention":
            found.setdefault(node)
        elif op_name(node) in SOFTMAX and value_of(node).dim() >= 3:
            product = product_behind(node.args[0])
            if product is not None:
                found.setdefault(product)
    return list(found)


def product_behind(node: Node | None) -> Node | None:
    while node is not None and node.op == "call_function":
        if op_name(node) in SCORE_PRODUCTS:
            return node
        if op_name(node) not in SCORE_STEPS:
            return None
        tensors = [x for x in node.args if isinstance(x, Node) and is_tensor(x)]
        node = next((x for x in tensors if same_size(x, node)), None)
    return None


def same_size(a: Node, b: Node) -> bool:
    """Whether two tensors have equally many elements (a view or a broadcast over a mask)."""
    sizes = [sympy.Mul(*(size_expr(s) for s in value_of(x).shape)) for x in (a, b)]
    return sympy.expand(sizes[0] - sizes[1]) == 0


def attended_sizes(node: Node) -> tuple[sympy.Expr, ...]:
    if op_name(node) == "scaled_dot_product_attention":
        return tuple(size_expr(value_of(x).shape[-2]) for x in node.args[:2])
    return tuple(size_expr(s) for s in value_of(node).shape[-2:])


class _Renamer:
    """Writes the new graph for one length."""

    def __init__(self, captured: CapturedGraph, length: sympy.Expr) -> None:
        self.module = captured.module
        self.length = length
        nodes = list(captured.module.graph.nodes)
        goals = {
            n for n in attentions(captured.module.graph) if length in attended_sizes(n)
        }
        self.leading = ancestors(goals)
        self.from_inputs = depend_on_inputs(nodes)
        like = next(n for n in goals)
        self.known = self.size_in(like)
        self.known_in = value_of(like)
        fixed = not isinstance(self.known, torch.SymInt)
        self.size = new_size(value_of(like), hint_of(self.known), fixed=fixed)
        self.symbol = size_expr(self.size)
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.named: set[Node] = set()  # copies whose sizes depend on the symbol
        self.wrapped: dict[Node, Node] = {}
        self.size_node: Node | None = None
        self.like = like

    def size_in(self, node: Node) -> int | torch.SymInt:
        """The length itself, as a size of one of the attention's inputs."""
        sizes = [size for x in node.args[:2] for size in value_of(x).shape]
        return next(size for size in sizes if size_expr(size) == self.length)

    def is_length(self, size: int | torch.SymInt) -> bool:
        """Whether a size is the length, as it is written or by the guards of the capture."""
        return size_expr(size) == self.length or (
            hint_of(size) == hint_of(self.known)
            and isinstance(self.known, torch.SymInt)
            and statically_known_true(size == self.known)
        )

    def run(self) -> None:
        for node in self.module.graph.nodes:
            if node.op != "placeholder" and self.size_node is None:
                self.size_node = self.write_length()
            copy = self.copies[node] = self.copy(node)
            if self.begins(node):
                self.copies[node] = self.wrap(copy)
        self.graph.lint()

    def write_length(self) -> Node:
        """The symbol's value, from the inputs' sizes, before anything else is computed."""
        for node, copy in self.copies.items():
            copy.meta = dict(node.meta)
        value = size_of_expr(self.graph, self.length, self.like)
        node = self.graph.call_function(as_length, (value,))
        node.meta = {"val": self.size}
        return node

    def finished(self) -> GraphModule:
        return GraphModule(self.module, self.graph)

    def has_length(self, node: Node) -> bool:
        return is_tensor(node) and any(map(self.is_length, value_of(node).shape))

    def begins(self, node: Node) -> bool:
        """Whether tokens first appear in ``node``."""
        return (
            node.op == "call_function"
            and node in self.leading
            and node in self.from_inputs
            and self.has_length(node)
            and self.copies[node] not in self.named
            and not any(
                self.has_length(x)
                for x in node.all_input_nodes
                if x in self.from_inputs
            )
        )

    def wrap(self, copy: Node) -> Node:
        """``as_tokens`` of a value whose dims of this length are not named yet."""
        if copy in self.wrapped:
            return self.wrapped[copy]
        value = value_of(copy)
        dims = [d for d, s in enumerate(value.shape) if self.is_length(s)]
        node = self.graph.call_function(as_tokens, (copy, dims))
        node.meta = {
            key: item for key, item in copy.meta.items() if key != "requires_grad"
        }
        shape = [self.size if d in dims else s for d, s in enumerate(value.shape)]
        with value.fake_mode, torch.no_grad():
            node.meta["val"] = value.new_empty(shape)
        self.named.add(node)
        self.wrapped[copy] = node
        return node

    def copy(self, node: Node) -> Node:
        follows = any(self.copies[x] in self.named for x in node.all_input_nodes)
        if not follows or node.op != "call_function":
            return self.graph.node_copy(node, self.copies.__getitem__)

        def convert(x: Any, *, is_size: bool) -> Any:
            if isinstance(x, Node):
                copy = self.copies[x]
                if self.has_length(x) and copy not in self.named:
                    return self.wrap(copy)
                value = x.meta.get("val")
                if isinstance(value, torch.SymInt) and self.is_length(value):
                    return self.size_node
                return copy
            return self.size_node if is_size and self.is_length(x) else x

        sizes = size_arguments(node.target)

        def converted(name: int | str, value: Any) -> Any:
            turn = partial(convert, is_size=name in sizes)
            return pytree.tree_map_only((Node, int), turn, value)

        args = tuple(converted(i, x) for i, x in enumerate(node.args))
        kwargs = {name: converted(name, x) for name, x in node.kwargs.items()}
        made = self.graph.call_function(node.target, args, kwargs)
        made.meta = dict(node.meta)
        if "val" in node.meta:
            set_value(made, node)
            if any(self.depends(v) for v in pytree.tree_leaves(made.meta["val"])):
                self.named.add(made)
        return made

    def depends(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return any(self.symbol in size_expr(s).free_symbols for s in value.shape)
        return (
            isinstance(value, torch.SymInt)
            and self.symbol in value.node.expr.free_symbols
        )


def size_arguments(target: Any) -> set[int | str]:
    """Places and names of the arguments that are sizes (and no dimensions, say)."""
    if not isinstance(target, torch._ops.OpOverload):
        return set()
    # A schema's text tells SymInt from int, its arguments' types do not.
    sizes = set(re.findall(r"SymInt\S* (\w+)", str(target._schema)))
    names = [argument.name for argument in target._schema.arguments]
    return sizes | {place for place, name in enumerate(names) if name in sizes}


def hint_of(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def ancestors(nodes: set[Node]) -> set[Node]:
    found, pending = set(nodes), list(nodes)
    while pending:
        for x in pending.pop().all_input_nodes:
            if x not in found:
                found.add(x)
                pending.append(x)
    return found


def depend_on_inputs(nodes: list[Node]) -> set[Node]:
    """Values made from an input that is no parameter."""
    found: set[Node] = set()
    for node in nodes:
        own = (
            node.op == "placeholder"
            and is_tensor(node)
            and not node.meta["requires_grad"]
        )
        if own or any(x in found for x in node.all_input_nodes):
            found.add(node)
    return found
