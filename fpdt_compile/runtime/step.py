"""One call of the chunked program: its inputs, chunks, stores and sums.

A :class:`Step` is made at every call of the compiled function and lives as long as its autograd
graph does: there is no state between steps, so an error in one leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from ..graph import MaskGraph, ScoreGraph, TileKind, TileTable
from ..plan import ChunkPlan
from .agreement import agree_on_step
from .attention import TileRunner
from .chunks import (
    Bounds,
    arrange,
    chunk_bounds,
    cut,
    join_axis,
    parts,
    split_axis,
)
from .copies import Placement
from .gradients import ParameterGradients, ValueGradients, grad_of, sum_dtype
from .layout import SequenceLayout
from .masks import MaskEvaluator
from .program import (
    AttentionCall,
    ChunkProgram,
    Operand,
    OperandKind,
    RegionCall,
)
from .ranks import Ranks
from .scores import ScoreEvaluator
from .sharing import gather_inputs, same_randomness
from .stores import Key, ValueStore

MaskKey = tuple[str, sympy.Symbol, sympy.Symbol]


class Step:
    """State of one call.

    ``bounds`` are the chunks of every sequence, ``own`` this rank's parts of them, both in global
    token numbers. ``outside`` are the same parts in tensors that enter or leave the program: whole
    ones, or with ``sharded`` inputs this rank's tokens laid one after the other.
    """

    def __init__(
        self,
        program: ChunkProgram,
        inputs: Sequence[Any],
        plan: ChunkPlan,
        *,
        offload_dir: str | os.PathLike[str] | None = None,
        ranks: Ranks | None = None,
        sharded: bool = False,
    ) -> None:
        self.program = program
        self.ranks = Ranks() if ranks is None else ranks
        self.sharded = sharded and self.parallel
        self.overlap = plan.overlap
        self.reduce_gradients = plan.reduce_gradients
        self.outside_symbols = program.symbols(inputs)
        self.symbols = self.outside_symbols
        if self.parallel:
            self.symbols = agree_on_step(self.ranks, program, inputs, self.sharded)
        size, rank = self.ranks.size, self.ranks.rank
        self.layouts = {
            symbol: SequenceLayout.of(self.symbols[symbol], plan.chunk_len, size)
            for symbol in program.token_symbols
        }
        self.bounds: dict[sympy.Symbol, Bounds] = {
            symbol: layout.chunks for symbol, layout in self.layouts.items()
        }
        self.own: dict[sympy.Symbol, Bounds] = {
            symbol: layout.own(rank) for symbol, layout in self.layouts.items()
        }
        self.outside: dict[sympy.Symbol, Bounds] = {
            symbol: layout.local(rank) if self.sharded else self.own[symbol]
            for symbol, layout in self.layouts.items()
        }
        self.head_len = plan.head_len
        num_tokens = max((x.num_tokens(rank) for x in self.layouts.values()), default=0)
        self.saves = plan.saves(num_tokens)
        self.order = plan.order
        self.inputs = dict(zip(program.input_names, inputs, strict=True))
        self.vectors: dict[str, Any] = {}
        self.store = ValueStore(
            self.device, directory=offload_dir, record=self.ranks.record
        )
        self.placement = Placement(
            hidden=plan.hidden,
            attention=plan.attention,
            kv=plan.kv_tier(num_tokens),
            copied=tuple(self.store.tiers),
            lookahead=plan.lookahead,
        )
        self.grads = ValueGradients(self.store)
        self.pending_backwards = 0
        # Of one-pass heads: the gradient of its total, by which its gradients are multiplied.
        self.unit_scales: dict[int, Tensor] = {}
        self.keep_graph = False
        self.random_states: dict[str, tuple[Tensor, Tensor | None]] = {}
        self.result_shapes: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self.parameter_grads = ParameterGradients()
        self.masks: dict[MaskKey, MaskEvaluator] = {}
        self.tables: dict[MaskKey, TileTable] = {}
        self.local_inputs: frozenset[str] = frozenset()
        if self.sharded:
            self.local_inputs = gather_inputs(self)
        if program.prologue is not None:
            with torch.no_grad(), same_randomness(self, program.draws):
                values = program.prologue(self.inputs)
            self.vectors = dict(zip(program.vector_names, values, strict=True))

    @property
    def parallel(self) -> bool:
        return self.ranks.size > 1

    @property
    def device(self) -> torch.device:
        return next(x.device for x in self.inputs.values() if isinstance(x, Tensor))

    def own_chunks(self, symbol: sympy.Symbol) -> list[int]:
        """Chunks of which this rank has tokens."""
        return [i for i, (a, b) in enumerate(self.own[symbol]) if b > a]

    def empty(
        self, name: str, num_tokens: int, device: str | torch.device | None = None
    ) -> Tensor:
        """An uninitialized value of so many tokens, in joined form; a total has none."""
        spec, axis = self.program.specs[name], self.program.axes.get(name)
        shape = [int(size.subs(self.symbols)) for size in spec.shape]
        if axis is not None:
            outer, inner = parts(axis, self.symbols)
            shape[axis.dim] = outer * num_tokens * inner
        return torch.empty(shape, dtype=spec.dtype, device=device or self.device)

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
        where = self.outside if name in self.local_inputs else self.own
        bounds = where[axis.symbol][chunk]
        piece = cut(self.whole(name).detach(), axis, self.symbols, *bounds)
        return join_axis(piece, axis)

    def put(self, name: str, chunk: int, value: Tensor) -> None:
        self.store.put((name, chunk), value)

    def save(self, name: str, chunk: int, tier: str) -> None:
        """Move a value to the tier where it waits (graph inputs stay where they are)."""
        if (name, chunk) in self.store:
            self.store.save((name, chunk), tier)

    def save_hidden(self, name: str, chunk: int) -> None:
        """The same for a hidden state or its gradient."""
        self.save(name, chunk, self.placement.hidden)

    def prefetch(self, name: str, chunk: int) -> None:
        """Start to bring back a value; with a gradient, those of one-pass heads."""
        for key in self.with_units(name, chunk):
            if key in self.store:
                self.store.prefetch(key)

    def with_units(self, name: str, chunk: int) -> list[Key]:
        """A value; if it is a gradient, with those that one-pass heads left for it."""
        heads = len(self.program.heads) if name.endswith("'") else 0
        return [(name, chunk), *((f"{name}{head}", chunk) for head in range(heads))]

    def release(self, name: str, chunk: int) -> None:
        if (name, chunk) in self.store:
            self.store.release((name, chunk))

    def drop(self, name: str, chunk: int) -> None:
        if (name, chunk) in self.store:
            self.store.drop((name, chunk))

    def operand(
        self,
        operand: Operand,
        chunk: int,
        piece: tuple[int, int] | None,
        fake: bool = False,
    ) -> Any:
        """One input of a region for a chunk, or for tokens ``piece`` of it (global numbers)."""
        if operand.kind is OperandKind.SYMBOL:
            assert operand.size is not None
            return int(operand.size.subs(self.symbols))
        if operand.kind in (OperandKind.STATE, OperandKind.WHOLE):
            value = self.whole(operand.name)
            return value.detach() if isinstance(value, Tensor) else value
        assert operand.axis is not None
        bounds = self.own[operand.axis.symbol]
        start, end = piece if piece is not None else bounds[chunk]
        if operand.kind is OperandKind.VECTOR:
            value = cut(
                self.whole(operand.name), operand.axis, self.symbols, start, end
            )
        else:
            length = bounds[chunk][1] - bounds[chunk][0]
            have = (
                self.empty(operand.name, length, "meta")
                if fake
                else self.value(operand.name, chunk)
            )
            value, dim = split_axis(have, operand.axis, self.symbols)
            if piece is not None:
                value = value.narrow(dim, start - bounds[chunk][0], end - start)
        return arrange(value.detach(), operand.dim_order)

    def operands(
        self,
        call: RegionCall,
        chunk: int,
        piece: tuple[int, int] | None = None,
        fake: bool = False,
    ) -> list[Any]:
        """A region's inputs; ``fake`` ones have shapes only (on the meta device)."""
        return [self.operand(o, chunk, piece, fake) for o in call.operands]

    def head_pieces(self, bounds: tuple[int, int]) -> Bounds:
        """The pieces the head runs a part of a chunk in, in global token numbers."""
        start, end = bounds
        if start == end:
            return ()
        return tuple(
            (start + a, start + b) for a, b in chunk_bounds(end - start, self.head_len)
        )

    # gradients --------------------------------------------------------------

    def take_value_grad(self, name: str, chunk: int) -> Tensor | None:
        """The finished gradient of a chunk value; None if nothing gave one (a detach)."""
        grad = self.grads.take((name, chunk))
        for head, scale in self.unit_scales.items():
            key = unit_grad(name, chunk, head)
            if key not in self.store:
                continue
            if self.keep_graph:
                unit = self.store.get(key)
                scaled = unit * scale.to(unit.dtype)
            else:
                unit = self.store.pop(key)
                assert unit is not None
                scaled = unit.mul_(scale.to(unit.dtype))
            grad = scaled if grad is None else grad + scaled
        return grad

    def sum_gradients(self, label: str, names: Sequence[str]) -> None:
        """Add up a stage's parameter gradients over ranks, unless somebody else does."""
        if self.parallel and self.reduce_gradients:
            like = {
                name: (self.inputs[name].shape, sum_dtype(self.inputs[name].dtype))
                for name in names
            }
            self.ranks.sum_gradients(
                f"sum of gradients of {label}", self.parameter_grads.sums, like
            )

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
            self.mask(call.tile_mask, call),
            self.evaluator(call.score),
            self.evaluator(call.sinks),
            None if call.seed is None else self.whole(call.seed),
            self.mask(None if call.tile_mask is None else call.tile_mask.passes, call),
            call.shares[self.ranks.rank].queries,
            self.store,
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


def unit_grad(name: str, chunk: int, head: int) -> Key:
    """Where a one-pass head's gradient of a value waits for that of its total."""
    return f"{grad_of(name)}{head}", chunk


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
