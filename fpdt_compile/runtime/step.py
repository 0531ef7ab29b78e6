"""One call of the chunked program: its inputs, chunks, stores and sums.

A :class:`Step` is made at every call of the compiled function and lives as long as its autograd
graph does: there is no state between steps, so an error in one leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from ..graph import MaskGraph, ScoreGraph, TileKind, TileTable
from .attention import TileRunner
from .chunks import Bounds, arrange, chunk_bounds, cut, join_axis, split_axis
from .gradients import ParameterGradients, ValueGradients
from .masks import MaskEvaluator
from .program import (
    AttentionCall,
    ChunkProgram,
    Operand,
    OperandKind,
    RegionCall,
)
from .scores import ScoreEvaluator
from .stores import ValueStore

MaskKey = tuple[str, sympy.Symbol, sympy.Symbol]


class Step:
    """State of one call. ``options`` holds the plan's choices."""

    def __init__(
        self,
        program: ChunkProgram,
        inputs: Sequence[Any],
        *,
        chunk_len: int,
        head_len: int,
        tier: str,
        save_attention: bool,
    ) -> None:
        self.program = program
        self.symbols = program.symbols(inputs)
        self.bounds: dict[sympy.Symbol, Bounds] = {
            symbol: chunk_bounds(self.symbols[symbol], chunk_len)
            for symbol in program.token_symbols
        }
        self.head_len = head_len
        self.tier = tier
        self.save_attention = save_attention
        self.inputs = dict(zip(program.input_names, inputs, strict=True))
        self.vectors: dict[str, Any] = {}
        self.store = ValueStore()
        self.grads = ValueGradients()
        # Of one-pass heads, by head: gradients for a unit gradient of its total, and that gradient.
        self.unit_grads: dict[tuple[str, int], dict[int, Tensor]] = {}
        self.unit_scales: dict[int, Tensor] = {}
        self.keep_graph = False
        self.random_states: dict[str, tuple[Tensor, Tensor | None]] = {}
        self.result_shapes: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self.parameter_grads = ParameterGradients()
        self.masks: dict[MaskKey, MaskEvaluator] = {}
        self.tables: dict[MaskKey, TileTable] = {}
        if program.prologue is not None:
            with torch.no_grad():
                values = program.prologue(self.inputs)
            self.vectors = dict(zip(program.vector_names, values, strict=True))

    def bounds_of(self, name: str) -> Bounds:
        """The chunks of the sequence a value (or vector) belongs to."""
        return self.bounds[self.program.axes[name].symbol]

    def length_of(self, name: str) -> int:
        """The length of that sequence."""
        return self.symbols[self.program.axes[name].symbol]

    def whole(self, name: str) -> Any:
        """A vector or a graph input."""
        return self.vectors[name] if name in self.vectors else self.inputs[name]

    # values -----------------------------------------------------------------

    def value(self, name: str, chunk: int) -> Tensor:
        """A chunk of a value, in joined form; graph inputs are cut on the fly."""
        if (name, chunk) in self.store:
            return self.store.get((name, chunk))
        axis = self.program.axes[name]
        bounds = self.bounds[axis.symbol][chunk]
        piece = cut(self.whole(name).detach(), axis, self.symbols, *bounds)
        return join_axis(piece, axis)

    def put(self, name: str, chunk: int, value: Tensor) -> None:
        self.store.put((name, chunk), value)

    def save(self, name: str, chunk: int) -> None:
        """Move a value to the tier where it waits (graph inputs stay where they are)."""
        if (name, chunk) in self.store:
            self.store.move((name, chunk), self.tier)

    def prefetch(self, name: str, chunk: int) -> None:
        if (name, chunk) in self.store:
            self.store.prefetch((name, chunk))

    def drop(self, name: str, chunk: int) -> None:
        if (name, chunk) in self.store:
            self.store.drop((name, chunk))

    def operand(
        self, operand: Operand, chunk: int, piece: tuple[int, int] | None
    ) -> Any:
        """One input of a region for a chunk, or for tokens ``piece`` of it (global numbers)."""
        if operand.kind is OperandKind.SYMBOL:
            assert operand.size is not None
            return int(operand.size.subs(self.symbols))
        if operand.kind in (OperandKind.STATE, OperandKind.WHOLE):
            value = self.whole(operand.name)
            return value.detach() if isinstance(value, Tensor) else value
        assert operand.axis is not None
        bounds = self.bounds[operand.axis.symbol]
        start, end = piece if piece is not None else bounds[chunk]
        if operand.kind is OperandKind.VECTOR:
            value = cut(
                self.whole(operand.name), operand.axis, self.symbols, start, end
            )
        else:
            value, dim = split_axis(
                self.value(operand.name, chunk), operand.axis, self.symbols
            )
            if piece is not None:
                value = value.narrow(dim, start - bounds[chunk][0], end - start)
        return arrange(value.detach(), operand.dim_order)

    def operands(
        self, call: RegionCall, chunk: int, piece: tuple[int, int] | None = None
    ) -> list[Any]:
        return [self.operand(o, chunk, piece) for o in call.operands]

    def head_pieces(self, bounds: tuple[int, int]) -> Bounds:
        """The pieces the head runs a chunk in, in global token numbers."""
        start, end = bounds
        return tuple(
            (start + a, start + b) for a, b in chunk_bounds(end - start, self.head_len)
        )

    # gradients --------------------------------------------------------------

    def take_value_grad(self, name: str, chunk: int) -> Tensor | None:
        """The finished gradient of a chunk value; None if nothing gave one (a detach)."""
        key = (name, chunk)
        grad = self.grads.take(key)
        units = self.unit_grads.get(key, {})
        for head, scale in self.unit_scales.items():
            if head not in units:
                continue
            factor = scale.to(units[head].dtype)
            if self.keep_graph:
                scaled = units[head] * factor
            else:
                scaled = units.pop(head).mul_(factor)
            grad = scaled if grad is None else grad + scaled
        return grad

    # masks ------------------------------------------------------------------

    def mask(
        self, graph: MaskGraph | None, call: AttentionCall
    ) -> MaskEvaluator | None:
        if graph is None:
            return None
        key = self.mask_key(graph, call)
        if key not in self.masks:
            leaves = {leaf.name: self.whole(leaf.name) for leaf in graph.leaves}
            lengths = self.length_of(call.q), self.length_of(call.k)
            self.masks[key] = MaskEvaluator(graph, leaves, *lengths, self.symbols)
        return self.masks[key]

    def mask_key(self, graph: MaskGraph | None, call: AttentionCall) -> MaskKey:
        """Equal for attentions of equal tiles."""
        axes = self.program.axes
        name = graph.name if graph is not None else f"causal={call.is_causal}"
        return name, axes[call.q].symbol, axes[call.k].symbol

    def evaluator(self, graph: ScoreGraph | MaskGraph | None) -> ScoreEvaluator | None:
        """Score arithmetic (or sink logits) with the values of its leaves."""
        if graph is None:
            return None
        leaves = {leaf.name: self.whole(leaf.name) for leaf in graph.leaves}
        return ScoreEvaluator(graph, leaves, self.symbols)

    def tile_runner(self, call: AttentionCall) -> TileRunner:
        return TileRunner(
            call,
            self.mask(call.mask, call),
            self.evaluator(call.score),
            self.evaluator(call.sinks),
            None if call.seed is None else self.whole(call.seed),
            self.mask(None if call.mask is None else call.mask.passes, call),
        )

    def table(self, call: AttentionCall) -> TileTable:
        """How each tile of an attention is computed; equal masks are classified once a step."""
        key = self.mask_key(call.mask, call)
        if key not in self.tables:
            evaluator = self.mask(call.mask, call)
            bounds = self.bounds_of(call.q), self.bounds_of(call.k)
            if evaluator is not None:
                self.tables[key] = evaluator.table(*bounds)
            else:
                self.tables[key] = plain_table(*map(len, bounds), call.is_causal)
        return self.tables[key]


def plain_table(num_queries: int, num_keys: int, is_causal: bool) -> TileTable:
    """The table of attention without a mask, for numbers of chunks."""

    def kind(i: int, j: int) -> TileKind:
        if not is_causal or j < i:
            return TileKind.FULL
        return TileKind.CAUSAL if i == j else TileKind.EMPTY

    return TileTable(
        kinds=tuple(
            tuple(kind(i, j) for j in range(num_keys)) for i in range(num_queries)
        )
    )
