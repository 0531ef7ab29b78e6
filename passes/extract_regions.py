"""Take a region out of the captured graph as a body that works for any chunk length.

In: the values a region must produce and the values it may start from. Out: a :class:`Region`: a
standalone graph whose token dimensions are a chunk's, its operands, and a key that is equal for
regions of equal structure, so that all layers share one compiled body.

Contract: a body contains only what its outputs need. Sizes that depend on s become the chunk's own
(only shape arguments hold such sizes inside a region: ``find_token_axes`` proved it). An operand
whose token dimension is flattened, ``outer * c * inner``, enters as three dims and is flattened
inside, so that one symbol c describes every input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import InvariantError
from ..graph import NodeKind, TokenAxis, is_tensor, size_expr, value_of
from ..runtime.program import Operand, OperandKind
from .find_token_axes import TokenAnalysis

aten = torch.ops.aten


@dataclass(kw_only=True, slots=True)
class Region:
    """A body with its operands (in placeholder order) and output nodes of the captured graph."""

    module: GraphModule
    operands: tuple[Operand, ...]
    sources: tuple[Node, ...]
    outputs: tuple[Node, ...]
    key: str


class RegionExtractor:
    """Extracts regions from one captured graph."""

    def __init__(self, root: GraphModule, analysis: TokenAnalysis) -> None:
        graph = root.graph
        self.root = root
        self.analysis = analysis
        self.order = {n: i for i, n in enumerate(graph.nodes)}

    def extract(
        self, outputs: Sequence[Node], stops: set[Node], symbol: sympy.Symbol
    ) -> Region:
        """The region that computes ``outputs``, values of the sequence of length ``symbol``, from
        ``stops``, vectors, state and symbols."""
        self.symbol = symbol
        members, leaves = self.slice(outputs, stops)
        body, copies = Graph(), {}
        operands = []
        for leaf in leaves:
            operand = self.operand(leaf, leaf in stops)
            operands.append(operand)
            copies[leaf] = self.add_input(body, leaf, operand)
        self.length = self.chunk_length(body, leaves, operands)
        for leaf, operand in zip(leaves, operands, strict=True):
            if operand.axis is not None and not operand.axis.plain:
                copies[leaf] = self.flatten_input(
                    body, copies[leaf], operand.axis, leaf
                )
        for node in members:
            copies[node] = self.copy(body, node, copies)
        body.output([copies[n] for n in outputs])
        body.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
        body.lint()
        return Region(
            module=GraphModule(self.root, body),
            operands=tuple(operands),
            sources=tuple(leaves),
            outputs=tuple(outputs),
            key=self.structure_key(body, leaves, operands, outputs),
        )

    def slice(
        self, outputs: Sequence[Node], stops: set[Node]
    ) -> tuple[list[Node], list[Node]]:
        """Members in graph order, and leaves in the order they are first needed."""
        members: set[Node] = set()
        leaves: dict[Node, None] = {}
        pending = list(outputs)
        while pending:
            node = pending.pop()
            if node in members or node in leaves:
                continue
            kind = self.analysis.kinds[node]
            if node in stops or kind is NodeKind.VECTOR or node.op == "placeholder":
                if kind is not NodeKind.SYMBOL:
                    leaves.setdefault(node)
                continue
            if kind is NodeKind.SYMBOL:
                continue  # sizes are rebuilt in the body
            if kind not in (NodeKind.TOKENWISE, NodeKind.STATE, NodeKind.TOTAL):
                raise InvariantError(f"{node.name} ({kind.value}) inside a region")
            members.add(node)
            pending.extend(node.all_input_nodes)
        symbols = self.symbol_inputs(members)
        ordered = sorted(members, key=self.order.__getitem__)
        first_use: dict[Node, None] = {}
        for node in ordered:
            for x in node.all_input_nodes:
                if x in leaves:
                    first_use.setdefault(x)
        for node in outputs:
            if node in leaves:
                first_use.setdefault(node)
        return ordered, [*first_use, *symbols]

    def symbol_inputs(self, members: set[Node]) -> list[Node]:
        """Integer graph inputs other than s that shape arguments of the region read."""
        found: dict[Node, None] = {}
        for node in sorted(members, key=self.order.__getitem__):
            pending = [
                x
                for x in node.all_input_nodes
                if self.analysis.kinds[x] is NodeKind.SYMBOL
            ]
            while pending:
                x = pending.pop()
                if is_length(value_of(x), self.symbol):
                    continue
                if x.op == "placeholder" or any(
                    is_tensor(y) for y in x.all_input_nodes
                ):
                    found.setdefault(x)
                else:
                    pending.extend(x.all_input_nodes)
        return list(found)

    def operand(self, leaf: Node, is_value: bool) -> Operand:
        axes = self.analysis.axes.get(leaf, ())
        kind = self.analysis.kinds[leaf]
        axis = axes[0] if axes else None
        if kind is NodeKind.SYMBOL:
            return Operand(
                kind=OperandKind.SYMBOL, name=leaf.name, size=size_expr(value_of(leaf))
            )
        if is_value:
            where = OperandKind.TOKEN
        elif kind is NodeKind.VECTOR or axis is not None:
            where = OperandKind.VECTOR if axis is not None else OperandKind.WHOLE
        else:
            where = OperandKind.STATE
        rank = value_of(leaf).dim() + (2 if axis is not None and not axis.plain else 0)
        order: tuple[int, ...] | None = None
        if where is not OperandKind.STATE:
            order = tuple(range(rank))
        if kind is NodeKind.ATTENTION:
            order = (0, 2, 1, 3)  # [B, c, H, D] in memory: what output projections read
        return Operand(
            kind=where,
            name=leaf.name,
            axis=axis,
            needs_grad=bool(leaf.meta.get("needs_grad", False)),
            dim_order=order,
        )

    def add_input(self, body: Graph, leaf: Node, operand: Operand) -> Node:
        node = body.placeholder(leaf.name)
        node.meta["leaf"] = leaf
        return node

    def chunk_length(
        self, body: Graph, leaves: Sequence[Node], operands: Sequence[Operand]
    ) -> Node | None:
        """A node equal to c, taken from the first operand that has a token axis."""
        inputs = [n for n in body.nodes if n.op == "placeholder"]
        for node, operand in zip(inputs, operands, strict=True):
            axis = operand.axis
            if axis is not None:
                dim = axis.dim if axis.plain else axis.dim + 1
                return body.call_function(aten.sym_size.int, (node, dim))
        return None

    def flatten_input(
        self, body: Graph, node: Node, axis: TokenAxis, leaf: Node
    ) -> Node:
        rank = value_of(leaf).dim()
        return (
            body.call_function(aten.flatten.using_ints, (node, axis.dim, axis.dim + 2))
            if rank
            else node
        )

    def copy(self, body: Graph, node: Node, copies: dict[Node, Node]) -> Node:
        new = body.node_copy(node, lambda x: self.lookup(body, x, copies))
        new.meta = {
            key: node.meta[key]
            for key in ("autocast", "grad_off", "stack_trace")
            if key in node.meta
        }
        return new

    def lookup(self, body: Graph, x: Node, copies: dict[Node, Node]) -> Node:
        if x in copies:
            return copies[x]
        if self.analysis.kinds[x] is not NodeKind.SYMBOL:
            raise InvariantError(f"{x.name} is read by a region but not part of it")
        if is_length(value_of(x), self.symbol):
            if self.length is None:
                raise InvariantError(f"{x.name}: a region without a token operand")
            return self.length
        copies[x] = body.node_copy(x, lambda y: self.lookup(body, y, copies))
        return copies[x]

    def structure_key(
        self,
        body: Graph,
        leaves: Sequence[Node],
        operands: Sequence[Operand],
        outputs: Sequence[Node],
    ) -> str:
        """Equal for bodies that compute the same from operands of the same shapes and types."""
        number: dict[Node, int] = {}
        lines = []
        for leaf, operand in zip(leaves, operands, strict=True):
            lines.append(
                f"{operand.kind.value} {operand.axis} {operand.needs_grad} "
                f"{operand.dim_order} {describe(leaf, operand)}"
            )
        for node in body.nodes:
            number[node] = len(number)
            if node.op == "placeholder":
                continue
            args = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda x: _Ref(number[x])
            )
            target = node.target
            if node.op == "get_attr":  # equal constants have different names
                constant = getattr(self.root, node.target)
                target = (constant.dtype, constant.tolist())
            mode = (node.meta.get("autocast"), node.meta.get("grad_off"))
            lines.append(f"{node.op} {target} {args} {mode}")
        lines.extend(f"-> {n.meta.get('needs_grad', False)}" for n in outputs)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def is_length(value: Any, symbol: sympy.Symbol) -> bool:
    return isinstance(value, torch.SymInt) and value.node.expr == symbol


class _Ref(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"


def describe(node: Node, operand: Operand) -> str:
    value: Any = value_of(node)
    if not is_tensor(node):
        return str(operand.size)
    shape = [str(size_expr(s)) for s in value.shape]
    # Chunks are handed over in the operand's dim_order; only state keeps its own strides.
    strides = value.stride() if operand.kind is OperandKind.STATE else ()
    return f"{value.dtype} {value.device} {shape} {list(strides)}"


def read_by(region: Region) -> tuple[frozenset[str], ...]:
    """Per operand, the names of the outputs that depend on it."""
    graph = region.module.graph
    (output,) = [n for n in graph.nodes if n.op == "output"]
    found: dict[Node, set[str]] = {n: set() for n in graph.nodes}
    for node, source in zip(output.args[0], region.outputs, strict=True):
        found[node].add(source.name)
    for node in reversed(graph.nodes):
        for x in node.all_input_nodes if node is not output else ():
            found[x] |= found[node]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    return tuple(frozenset(found[n]) for n in inputs)
