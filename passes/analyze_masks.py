"""Read an attention mask as a graph over short vectors, without evaluating it.

In: the mask's node in the captured graph and the token axes of every node. Out: a
:class:`MaskGraph`, a standalone module that yields any tile of the mask.

Terms. A *leaf* is a tensor with at most one token axis (positions, document ids, padding
flags, scalars), computed whole elsewhere, or a two-axis tensor that exists anyway: a graph
input, or a view of one. *Roles* say which dimension of a tensor runs along the queries and
which along the keys. A node is copied once for each pair of roles it is used in.

Contract: the module holds no size that depends on the sequence. It is built to be lazily
broadcast: factories make tensors of size 1 in every dimension and ``expand`` only adds
dimensions, so the result is broadcastable to ``[B, H, S, S]``, and every tensor keeps the
captured rank. Lengths that enter the arithmetic are ``get_attr`` nodes of sympy expressions.
``tril`` and ``triu`` carry ``meta["rows_are_queries"]``; their diagonal means global indices.
Nodes keep ``val`` and ``stack_trace`` of the captured node (``val`` is of the whole mask).

Algorithm: from the mask (queries at dim -2, keys at dim -1) backwards; each operator's rule
passes the roles on to its inputs and copies the call.

Limits: pointwise operators, views that add or drop dimensions of size 1, permutations,
factories and triangles; token axes must be plain. All else raises :class:`CantChunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from ..graph import Axes, MaskGraph, MaskLeaf, is_tensor, value_of
from .base import refuse
from .mask_nodes import (
    is_input_view,
    is_pointwise,
    mutated_storages,
    op_name,
    shape_of,
    storage_of,
    with_meta,
)

aten = torch.ops.aten

ONES, ZEROS = ("ones", "new_ones", "ones_like"), ("zeros", "new_zeros", "zeros_like")
FACTORY_FILL = dict.fromkeys(ONES, 1) | dict.fromkeys(ZEROS, 0)
OUT_OF_REACH = "build the mask from comparisons of positions, ids or padding flags"


@dataclass(frozen=True, slots=True)
class Roles:
    """The dimension along the queries and the one along the keys, or None."""

    q: int | None
    k: int | None

    def moved(self, move: Callable[[int], int]) -> Roles:
        return Roles(*(None if dim is None else move(dim) for dim in (self.q, self.k)))


Rule = Callable[["MaskBuilder", Node, Roles], Node]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen operators by packet name (``"expand"``)."""

    def register(fn: Rule) -> Rule:
        for name in names:
            RULES[name] = fn
        return fn

    return register


def find_mask_graph(mask: Node, axes: Axes) -> MaskGraph:
    """The graph of ``mask``, whose dims -2 and -1 run along queries and keys.

    ``axes`` has every tensor node's token axes. Raises CantChunk with the operator that is
    in the way.
    """
    value = value_of(mask)
    if value.dtype is not torch.bool and not value.is_floating_point():
        raise refuse(mask, f"a mask of dtype {value.dtype}", "use a bool or float mask")
    builder = MaskBuilder(mask, axes)
    return builder.finish(builder.copy(mask, last_two(mask, axes)), mask.name)


def last_two(mask: Node, axes: Axes) -> Roles:
    """Queries at dimension -2, keys at -1."""
    rank, roles = value_of(mask).dim(), Roles(None, None)
    for axis in axes.get(mask, ()):
        if axis.dim == rank - 2:
            roles = Roles(axis.dim, roles.k)
        elif axis.dim == rank - 1:
            roles = Roles(roles.q, axis.dim)
        else:
            raise refuse(
                mask,
                f"dimension {axis.dim} of {rank} of the mask is a token axis",
                "queries and keys must be its last two dimensions",
            )
    return roles


class MaskBuilder:
    """The graph being built: one copy per captured node and roles."""

    def __init__(self, mask: Node, axes: Axes) -> None:
        self.mask = mask
        self.axes = axes
        self.graph = Graph()
        self.last_leaf: Node | None = None
        self.leaves: list[MaskLeaf] = []
        self.copies: dict[tuple[Node, Roles], Node] = {}
        self.sizes: dict[str, sympy.Expr] = {}
        self.short: set[Node] = set()
        self.given: dict[Node, Node] = {}  # nodes that are inputs of another kind
        self.mutated = mutated_storages(mask.graph)

    def copy(self, node: Node, roles: Roles) -> Node:
        """``node`` in the new graph, its dims in the given roles."""
        key = (node, roles)
        if key not in self.copies:
            self.check_roles(node, roles)
            self.copies[key] = self.make(node, roles)
        return self.copies[key]

    def check_roles(self, node: Node, roles: Roles) -> None:
        """Every token axis has a role, and no other dim has one."""
        axes = self.axes.get(node, ())
        if any(not axis.plain for axis in axes):
            raise refuse(
                node,
                "tokens are flattened together with another dimension in a mask",
                "keep the sequence a dimension of its own",
            )
        dims = sorted(axis.dim for axis in axes)
        if dims != sorted(d for d in (roles.q, roles.k) if d is not None):
            raise refuse(
                node,
                f"token axes {dims} do not run along queries {roles.q} and keys {roles.k}",
                OUT_OF_REACH,
            )

    def shifted(self, x: Node, roles: Roles, shift: int) -> Roles:
        """Roles of ``x``, whose dim d is broadcast to dim d + shift."""
        dims = {axis.dim for axis in self.axes.get(x, ())}
        q, k = (
            d - shift if d is not None and d - shift in dims else None
            for d in (roles.q, roles.k)
        )
        return Roles(q, k)

    def make(self, node: Node, roles: Roles) -> Node:
        name = op_name(node)
        if name in ("full", "scalar_tensor") or name in FACTORY_FILL:
            return make_factory(self, node, roles)
        two_axes = len(self.axes.get(node, ())) > 1
        if node in self.given:
            return self.given[node]
        if two_axes and storage_of(node) in self.mutated:
            raise refuse(
                node,
                "the mask is changed in place",
                "use the form that returns a new tensor (masked_fill, not masked_fill_)",
            )
        if not two_axes or is_input_view(node):
            return self.leaf(node, roles)
        found = RULES.get(name)
        if found is None and is_pointwise(node):
            found = copy_pointwise
        if found is None:
            raise refuse(
                node, "mixes (query, key) pairs: it has no tiles", OUT_OF_REACH
            )
        return found(self, node, roles)

    def leaf(self, node: Node, roles: Roles) -> Node:
        self.check_short(node)
        # A vector used in both roles is two leaves of one name.
        again = any(leaf.name == node.name for leaf in self.leaves)
        name = f"{node.name}__{len(self.leaves)}" if again else node.name
        with self.graph.inserting_after(self.last_leaf):
            copy = self.graph.placeholder(name)
        self.last_leaf = copy
        own = {axis.dim: axis for axis in self.axes.get(node, ())}
        q = None if roles.q is None else own[roles.q]
        k = None if roles.k is None else own[roles.k]
        self.leaves.append(
            MaskLeaf(
                name=node.name,
                q_axis=q,
                k_axis=k,
                needs_grad=bool(node.meta.get("needs_grad", False)),
            )
        )
        return with_meta(copy, node)

    def check_short(self, leaf: Node) -> None:
        """Nothing that ``leaf`` is computed from has two token axes."""
        stack = [leaf]
        while stack:
            node = stack.pop()
            if node in self.short or is_input_view(node):
                continue
            self.short.add(node)
            if len(self.axes.get(node, ())) > 1:
                user = next(x for x in node.users if x in self.short)
                raise refuse(
                    user,
                    "reduces a tensor of all (query, key) pairs, which would exist whole",
                    OUT_OF_REACH,
                )
            stack.extend(node.all_input_nodes)

    def call(self, like: Node, target: Any, args: tuple, **kwargs: Any) -> Node:
        return with_meta(self.graph.call_function(target, args, kwargs), like)

    def size(self, node: Node) -> Any:
        """A SymInt that enters the arithmetic: an attribute with its expression."""
        value = node.meta.get("val")
        if isinstance(value, (bool, int, float)):
            return value
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            raise refuse(node, "is neither a tensor nor a number", OUT_OF_REACH)
        expr = value.node.expr
        name = next((n for n, e in self.sizes.items() if e == expr), None)
        name = name or f"size_{len(self.sizes)}"
        self.sizes[name] = expr
        copy = self.graph.get_attr(name)
        copy.meta["val"] = value
        return copy

    def module(self, output: Node) -> GraphModule:
        self.graph.output(output)
        self.graph.eliminate_dead_code()
        module = GraphModule(dict(self.sizes), self.graph)
        module.graph.lint()
        return module

    def finish(
        self,
        output: Node,
        name: str,
        fill: float | None = None,
        passes: MaskGraph | None = None,
    ) -> MaskGraph:
        """``name`` is equal only for equal masks."""
        return MaskGraph(
            name=name,
            module=self.module(output),
            leaves=tuple(self.leaves),
            is_bool=value_of(output).dtype is torch.bool,
            fill=fill,
            passes=passes,
        )


def copy_pointwise(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    """Broadcasting: an input's dims are the output's last ones."""
    rank = value_of(node).dim()

    def convert(x: Node) -> Any:
        if not is_tensor(x):
            return builder.size(x)
        shift = rank - value_of(x).dim()
        return builder.copy(x, builder.shifted(x, roles, shift))

    if op_name(node) == "type_as" or node.target is aten.to.other:
        dtype = value_of(node).dtype
        return builder.call(node, aten.to.dtype, (convert(node.args[0]), dtype))
    args = torch.fx.map_arg(node.args, convert)
    kwargs = torch.fx.map_arg(node.kwargs, convert)
    return builder.call(node, node.target, args, **kwargs)


@rule("expand", "expand_as", "broadcast_to", "repeat")
def copy_expand(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    """Only the new dimensions are made; broadcasting does the rest."""
    x = node.args[0]
    shift = value_of(node).dim() - value_of(x).dim()
    old, new = shape_of(x), shape_of(node)[shift:]
    if op_name(node) == "repeat" and any(
        a not in (1, b) for a, b in zip(old, new, strict=True)
    ):
        raise refuse(node, "repeats a dimension that is not 1", OUT_OF_REACH)
    copy = builder.copy(x, builder.shifted(x, roles, shift))
    for _ in range(shift):
        copy = builder.call(node, aten.unsqueeze.default, (copy, 0))
    return copy


@rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as")
@rule("unsqueeze", "squeeze", "flatten", "unflatten")
def copy_view(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    """A view that only adds and drops dimensions of size 1."""
    x = node.args[0]
    old, new = shape_of(x), shape_of(node)
    old_dims = [d for d, size in enumerate(old) if size != 1]
    new_dims = [d for d, size in enumerate(new) if size != 1]
    if [old[d] for d in old_dims] != [new[d] for d in new_dims]:
        raise refuse(
            node,
            f"views {old} as {new}, which splits or merges dimensions of a mask",
            "add and drop dimensions of size 1 only",
        )
    back = dict(zip(new_dims, old_dims, strict=True))
    copy = builder.copy(x, roles.moved(lambda dim: back[dim]))
    dropped = [d for d, size in enumerate(old) if size == 1]
    if dropped:
        copy = builder.call(node, aten.squeeze.dims, (copy, dropped))
    for dim in (d for d, size in enumerate(new) if size == 1):
        copy = builder.call(node, aten.unsqueeze.default, (copy, dim))
    return copy


@rule("transpose", "permute", "t", "mT", "numpy_T", "swapaxes", "swapdims")
def copy_permute(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    x = node.args[0]
    rank = value_of(x).dim()
    # Applied to a tensor of sizes 2, 3, 4, ... the operator tells where each dim came from.
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    args = torch.fx.map_arg(node.args, lambda n: probe if n is x else n)
    order = [size - 2 for size in node.target(*args, **node.kwargs).shape]
    copy = builder.copy(x, roles.moved(lambda dim: order[dim]))
    return builder.call(node, aten.permute.default, (copy, order))


@rule("slice", "narrow")
def copy_slice(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    x = node.args[0]
    if shape_of(x) != shape_of(node) or (len(node.args) > 4 and node.args[4] != 1):
        raise refuse(node, "cuts a piece out of a mask", "cut the vectors instead")
    return builder.copy(x, roles)


@rule("select")
def copy_select(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    """Drops a dimension of size 1."""
    x, dim = node.args[0], int(node.args[1]) % value_of(node.args[0]).dim()
    if shape_of(x)[dim] != 1:
        raise refuse(node, "takes one of several masks", "select from the vectors")
    copy = builder.copy(x, roles.moved(lambda d: d + (d >= dim)))
    return builder.call(node, aten.squeeze.dims, (copy, [dim]))


@rule("tril", "triu")
def copy_triangle(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    x, rank = node.args[0], value_of(node).dim()
    if {roles.q, roles.k} != {rank - 2, rank - 1}:
        raise refuse(node, "is not a triangle of queries and keys", OUT_OF_REACH)
    diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    if isinstance(diagonal, Node):
        diagonal = builder.size(diagonal)
    copy = builder.call(node, node.target, (builder.copy(x, roles), diagonal))
    copy.meta["rows_are_queries"] = roles.q == rank - 2
    return copy


@rule("full_like", "new_full")
def make_factory(builder: MaskBuilder, node: Node, roles: Roles) -> Node:
    """A tensor of one value; every size becomes 1."""
    value, name = value_of(node), op_name(node)
    fill = FACTORY_FILL.get(name)
    if fill is None:
        index = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}[name]
        fill = node.args[index] if len(node.args) > index else node.kwargs["fill_value"]
    if isinstance(fill, Node):
        fill = builder.size(fill)
    return builder.call(
        node,
        aten.full.default,
        ([1] * value.dim(), fill),
        dtype=value.dtype,
        device=value.device,
    )
