"""A mask's and a score's graph as one tile program, and its leaves on a tile.

In: the graphs of one attention and the whole values of their leaves. Out: the text of
``kernels.tile_program`` for all its masked tiles (and one for its unmasked ones), and per tile the
leaves as tensors broadcastable to [B, H, q, k], views of the whole ones.

Algorithm: from the output backwards. Every dimension of every node gets its place among
(batch, head, query, key), the output's last dimension being the key; views only move places about,
so that what is left is pointwise. Lengths in the arithmetic become leaves: one text serves all.

Limits: what a kernel cannot have inlined raises :class:`NotInlined`: tables read by computed rows
(a gather), and operators that ``OPERATORS`` lacks. Parameters' gradients are not computed there, so
the caller must not ask for a graph that has any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..kernels.tile_program import OPERATORS, Operand, Writer
from .intervals import Range
from .masks import MaskEvaluator
from .scores import ScoreEvaluator
from .tile_graphs import slice_leaf

Places = tuple["int | None", ...]  # of each dim: 0 batch, 1 head, 2 query, 3 key
Evaluator = MaskEvaluator | ScoreEvaluator


class NotInlined(Exception):
    """A graph that no kernel can have inlined; says which operator and why."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where a leaf of the program comes from: a graph's leaf, its dims' places; or a number."""

    source: Evaluator | None
    index: int
    places: Places
    number: int | float = 0

    def on_tile(self, q_range: Range, k_range: Range, device: torch.device) -> Tensor:
        """[B|1, H|1, q|1, k|1]."""
        if self.source is None:
            return torch.tensor(self.number, device=device).view(1, 1, 1, 1)
        leaf, value = self.source.leaves[self.index], self.source.values[self.index]
        return placed(slice_leaf(leaf, value.detach(), q_range, k_range), self.places)


def placed(value: Tensor, places: Places) -> Tensor:
    """``value`` as 4 dimensions, each of its own at its place; those without one have size 1."""
    kept = [d for d, place in enumerate(places) if place is not None]
    dropped = [d for d, place in enumerate(places) if place is None]
    value = value.squeeze(tuple(dropped)) if dropped else value
    order = sorted(range(len(kept)), key=lambda i: places[kept[i]] or 0)
    value = value.permute(order)
    for place in range(4):
        if place not in places:
            value = value.unsqueeze(place)
    return value


class ProgramBuilder:
    """Writes graphs into one program."""

    def __init__(self, work: torch.dtype) -> None:
        self.work = work
        self.writer = Writer(score=work)
        self.leaves: list[Leaf] = []

    def new_leaf(self, leaf: Leaf, dtype: torch.dtype) -> str:
        name = f"leaf{len(self.leaves)}"
        if leaf in self.leaves:
            return f"leaf{self.leaves.index(leaf)}"
        self.leaves.append(leaf)
        self.writer.dtypes[name] = dtype
        return name

    def number(self, value: int | float) -> str:
        dtype = torch.int64 if isinstance(value, int) else torch.float32
        return self.new_leaf(Leaf(None, 0, (), value), dtype)

    def write(self, source: Evaluator, score: Operand | None) -> Operand:
        """The value of the source's graph; ``score`` is that of its first placeholder, if any."""
        return GraphWriter(self, source, score).result()


class GraphWriter:
    """Writes one graph; a node is written once for each set of places its dims are used in."""

    def __init__(
        self, builder: ProgramBuilder, source: Evaluator, score: Operand | None
    ) -> None:
        self.builder, self.source, self.score = builder, source, score
        inputs = [n for n in source.nodes if n.op == "placeholder"]
        self.score_input = inputs.pop(0) if score is not None else None
        self.index = {node: i for i, node in enumerate(inputs)}
        self.made: dict[tuple[Node, Places], Operand] = {}
        # ``val`` is that of the captured node, which may have more dims than the copy.
        self.ranks: dict[Node, int] = {}
        for node in source.nodes[:-1]:
            self.ranks[node] = self.rank(node)

    def rank(self, node: Node) -> int:
        if node is self.score_input:
            return 4
        if node.op == "get_attr":
            return 0
        if node.op == "placeholder":
            return self.source.values[self.index[node]].dim()
        name = name_of(node)
        if name == "full":
            return len(node.args[0])
        inputs = [self.ranks[x] for x in node.all_input_nodes]
        if name == "squeeze":
            return inputs[0] - len(node.args[1])
        return max(inputs, default=0) + (name == "unsqueeze")

    def result(self) -> Operand:
        output = self.source.nodes[-1].args[0]
        rank = self.ranks[output]
        return self.value(output, tuple(range(4 - rank, 4)))

    def value(self, x: Any, places: Places) -> Operand:
        if isinstance(x, (bool, int, float)):
            return x
        if not isinstance(x, Node):
            raise NotInlined(f"{x!r} is neither a tensor nor a number")
        if (x, places) not in self.made:
            self.made[x, places] = self.write(x, places)
        return self.made[x, places]

    def write(self, node: Node, places: Places) -> Operand:
        if node is self.score_input:
            if places != (0, 1, 2, 3):
                raise NotInlined("the scores are transposed")
            return self.score
        if node.op == "get_attr":
            return self.builder.number(self.source.numbers[node.name])
        if node.op == "placeholder":
            index = self.index[node]
            value = self.source.values[index]
            own = tuple(
                None
                if value.shape[d] == 1 and not self.along_tokens(index, d)
                else place
                for d, place in enumerate(places)
            )
            return self.builder.new_leaf(Leaf(self.source, index, own), value.dtype)
        name = name_of(node)
        if name in VIEWS:
            return self.value(
                node.args[0], VIEWS[name](node, places, self.ranks[node.args[0]])
            )
        if name in ("tril", "triu"):
            return self.triangle(node, places, name)
        if name == "full":
            return self.cast(node.args[1], node.kwargs.get("dtype"))
        return self.pointwise(node, places, name)

    def along_tokens(self, index: int, dim: int) -> bool:
        leaf = self.source.leaves[index]
        axes = (leaf.q_axis, leaf.k_axis)
        return any(axis is not None and axis.dim == dim for axis in axes)

    def operands(self, node: Node, places: Places) -> list[Operand]:
        """The node's positional tensors and numbers; broadcasting aligns the last dims."""
        found = []
        for x in node.args:
            own = self.aligned(x, places) if isinstance(x, Node) else ()
            found.append(self.value(x, own))
        return found

    def aligned(self, x: Node, places: Places) -> Places:
        if self.ranks[x] > len(places):
            raise NotInlined(f"{x.target} has more dimensions than what is made of it")
        return places[len(places) - self.ranks[x] :]

    def pointwise(self, node: Node, places: Places, name: str) -> Operand:
        name = SAME.get(name, name)
        if name in CASTS:
            dtype = node.kwargs.get("dtype")
            dtype = next((x for x in node.args if isinstance(x, torch.dtype)), dtype)
            x = node.args[0]
            return self.cast(self.value(x, self.aligned(x, places)), dtype)
        if any(v not in (None, 1) for k, v in node.kwargs.items() if k == "alpha"):
            raise NotInlined(f"{node.target} with alpha")
        if name in REWRITTEN:
            return REWRITTEN[name](
                self.builder.writer, node, self.operands(node, places)
            )
        if name not in OPERATORS:
            raise NotInlined(f"{node.target} is not among the operators of a kernel")
        if name == "div" and node.kwargs.get("rounding_mode") is not None:
            name = {"floor": "floor_div"}.get(node.kwargs["rounding_mode"], "trunc")
            if name == "trunc":
                raise NotInlined(f"{node.target} that rounds towards zero")
        return self.builder.writer.line(name, *self.operands(node, places))

    def cast(self, x: Operand, dtype: torch.dtype | None) -> Operand:
        if dtype is None or (
            isinstance(x, str) and self.builder.writer.dtypes[x] == dtype
        ):
            return x
        return self.builder.writer.line("cast", x, dtype=dtype)

    def triangle(self, node: Node, places: Places, name: str) -> Operand:
        """Column - row of the whole mask is column - row - offset of the tile."""
        line = self.builder.writer.line
        x, diagonal = self.operands(node, places)[:2]
        back = line("sub", line("sub", "column", "row"), "offset")
        if places[-2:] == (3, 2):
            back = line("neg", back)
        inside = line("le" if name == "tril" else "ge", back, diagonal)
        dtype = node_dtype(x, self.builder.writer)
        return self.cast(line("where", inside, x, 0), dtype)


def name_of(node: Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise NotInlined(f"{node.target} is not an operator of torch")
    return node.target._schema.name.split("::")[-1]


def node_dtype(x: Operand, writer: Writer) -> torch.dtype:
    return writer.dtypes[x] if isinstance(x, str) else torch.tensor(x).dtype


def _unsqueeze(node: Node, places: Places, rank: int) -> Places:
    dim = node.args[1] % len(places)
    return places[:dim] + places[dim + 1 :]


def _squeeze(node: Node, places: Places, rank: int) -> Places:
    dropped = {d % rank for d in node.args[1]}
    rest = iter(places)
    return tuple(None if d in dropped else next(rest) for d in range(rank))


def _permute(node: Node, places: Places, rank: int) -> Places:
    source: list[int | None] = [None] * len(places)
    for place, d in zip(places, node.args[1], strict=True):
        source[d % len(places)] = place
    return tuple(source)


# The places of the input's dims, of which there are ``rank``.
VIEWS: dict[str, Callable[[Node, Places, int], Places]] = {
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "permute": _permute,
}
CASTS = ("to", "_to_copy", "type_as", "convert_element_type")
SAME = {
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "bitwise_not": "logical_not",
    "__and__": "logical_and",
    "__or__": "logical_or",
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "floor_divide": "floor_div",
    "clone": "to",
    "alias": "to",
    "contiguous": "to",
    "detach": "to",
    "lift_fresh_copy": "to",
}


def _clamp(writer: Writer, node: Node, operands: Sequence[Operand]) -> Operand:
    x, *bounds = operands
    low = bounds[0] if bounds else node.kwargs.get("min")
    high = bounds[1] if len(bounds) > 1 else node.kwargs.get("max")
    for op, bound in (("maximum", low), ("minimum", high)):
        if isinstance(bound, Node):
            raise NotInlined(f"{node.target} with a tensor's bound by keyword")
        if bound is not None:
            x = writer.line(op, x, bound, dtype=node_dtype(x, writer))
    return x


def _pow(writer: Writer, node: Node, operands: Sequence[Operand]) -> Operand:
    x, exponent = operands
    if exponent == 2:
        return writer.line("mul", x, x)
    if exponent == 0.5:
        return writer.line("sqrt", x)
    raise NotInlined(f"{node.target} with an exponent other than 2 and 0.5")


REWRITTEN: dict[str, Callable[[Writer, Node, Sequence[Operand]], Operand]] = {
    "masked_fill": lambda w, n, x: w.line(
        "where", x[1], x[2], x[0], dtype=node_dtype(x[0], w)
    ),
    "rsub": lambda w, n, x: w.line("sub", x[1], x[0]),
    "rsqrt": lambda w, n, x: w.line("div", 1.0, w.line("sqrt", x[0])),
    "reciprocal": lambda w, n, x: w.line("div", 1.0, x[0]),
    "square": lambda w, n, x: w.line("mul", x[0], x[0]),
    "relu": lambda w, n, x: w.line("maximum", x[0], 0),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "pow": _pow,
}


@dataclass(frozen=True, slots=True)
class InlinedTile:
    """The program of one kind of tile: its text and what its leaves are."""

    text: str
    leaves: tuple[Leaf, ...]

    def arguments(
        self, q_range: Range, k_range: Range, device: torch.device
    ) -> dict[str, Any]:
        """``program``, ``leaves`` and ``offset`` of ``fpdt::attend`` for one tile."""
        return {
            "program": self.text,
            "leaves": [x.on_tile(q_range, k_range, device) for x in self.leaves],
            "offset": q_range[0] - k_range[0],
        }


def inline(
    score: ScoreEvaluator | None,
    mask: MaskEvaluator | None,
    scale: float,
    work: torch.dtype,
) -> InlinedTile:
    """The program of tiles with this score arithmetic and this mask (None: neither).

    Raises NotInlined, or NotImplementedError for arithmetic without a derivative.
    """
    builder = ProgramBuilder(work)
    line = builder.writer.line
    if score is None:
        logits: Operand = line("mul", "score", scale)
    else:
        logits = builder.write(score, "score")
    if mask is not None:
        value = builder.write(mask, None)
        graph = mask.mask
        if not graph.is_bool:
            logits = line("add", logits, value)
        else:
            hidden = -torch.inf if graph.fill is None else graph.fill
            logits = line("where", value, logits, hidden)
    return InlinedTile(builder.writer.finish(logits, work), tuple(builder.leaves))
