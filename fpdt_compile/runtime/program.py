"""The chunked program: regions, attentions and blocks by name, free of FX graphs.

Made once per captured graph by ``passes/lower``; read at every step by ``schedule`` and
``executor``. A *value* is named after its node in the captured graph; a chunk of it is
``(name, i)``. Vectors are small whole tensors computed once a call; state is parameters and
buffers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor

from ..graph import MaskGraph, ScoreGraph, TokenAxis
from .layout import HeadShare


class OperandKind(enum.Enum):
    """Where an input of a region comes from."""

    TOKEN = "token"  # this chunk of a value
    VECTOR = "vector"  # this chunk's part of a whole vector
    WHOLE = "whole"  # a vector without a token axis
    STATE = "state"  # a graph input: parameter, buffer
    SYMBOL = "symbol"  # a graph input: an integer


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One input of a region body. ``dim_order`` is the memory order of the body's input."""

    kind: OperandKind
    name: str
    axis: TokenAxis | None = None
    needs_grad: bool = False
    dim_order: tuple[int, ...] | None = None
    size: sympy.Expr | None = None  # SYMBOL: its value in terms of the size symbols


class GradForm(enum.Enum):
    """How a region's backward hands over one gradient."""

    NONE = "none"
    DENSE = "dense"  # the gradient
    PRODUCT = "product"  # factors A, B: the gradient is A @ B, added in place by addmm_
    ROWS = "rows"  # rows and where they go: index_add_ (embeddings)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradSlot:
    """Where, in the flat results of a backward body, one operand's gradient is."""

    operand: int
    form: GradForm
    results: tuple[int, ...] = ()
    padding_row: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBytes:
    """Bytes that a body needs besides its inputs: at most, in results, and in copies of results
    that are views of larger tensors."""

    peak: int
    results: int
    copies: int


class Body(Protocol):
    """A region's compiled code, shared by all regions of the same structure."""

    key: str

    def slots(self, form: str) -> tuple[GradSlot, ...]:
        """Where the gradients are in the results of ``backward`` or ``forward_backward``."""

    def forward(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The outputs for one chunk."""

    def backward(self, inputs: Sequence[Any], grads: Sequence[Tensor]) -> list[Tensor]:
        """Recompute and differentiate: flat gradients, see ``grad_slots``."""

    def forward_backward(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The outputs, then the flat gradients for a unit gradient of the one total."""

    def live_bytes(self, form: str, inputs: Sequence[Any]) -> LiveBytes:
        """What a call with inputs of these shapes will need, in "forward", "backward" or
        "forward_backward"; gradients that go into a backward are not among the inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One output of a region: a value per token (``axis``) or a part of a total (None)."""

    name: str
    axis: TokenAxis | None
    needs_grad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionCall:
    """A region: a body with this block's operands and results.

    Its chunks are those of the sequence whose length is ``symbol``. ``read_by`` has, per operand,
    the names of the results that depend on it.
    """

    label: str
    symbol: sympy.Symbol
    body: Body
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    read_by: tuple[frozenset[str], ...]

    def has_grad(self, operand: int, arrived: Set[str]) -> bool:
        """Whether an operand gets a gradient when those of the results ``arrived`` are there: as in
        eager, what only unused results depend on gets none."""
        return not self.read_by[operand].isdisjoint(arrived)

    @property
    def needs_backward(self) -> bool:
        return any(r.needs_grad for r in self.results) and any(
            o.needs_grad for o in self.operands
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """One attention over values ``q``, ``k``, ``v``; its output is the value ``name``.

    ``key_symbol`` is the length of the sequence of k and v, ``value_size`` v's Dv. ``lse`` names
    the logsumexp value. ``dtype`` is what the op computes in (autocast may cast). ``shares`` are
    the heads of each rank; ``score``, ``sinks`` and ``tile_mask`` are for this rank's heads, while
    ``mask`` is for all of them, so that all ranks skip the same tiles.
    ``score``, ``sinks``, ``seed`` and ``dropout_p`` as in :class:`Attention`; ``operands`` are the
    parameters its score arithmetic reads.
    """

    name: str
    q: str
    k: str
    v: str
    key_symbol: sympy.Symbol
    value_size: int
    mask: MaskGraph | None
    tile_mask: MaskGraph | None
    is_causal: bool
    scale: float | None
    dtype: torch.dtype
    needs_grad: bool
    num_heads: int
    shares: tuple[HeadShare, ...]
    score: ScoreGraph | None = None
    sinks: MaskGraph | None = None
    seed: str | None = None
    dropout_p: float = 0.0
    operands: tuple[Operand, ...] = ()

    @property
    def lse(self) -> str:
        return f"{self.name}.lse"


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerCall:
    """Ops that run whole: ``run`` maps the whole inputs to the whole outputs."""

    name: str
    run: Callable[..., list[Tensor]]
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockProgram:
    """state_in -> pre -> attentions and mixers -> post -> state_out, by value names.

    ``pre`` / ``post`` are None when there is nothing to compute. All these belong to the sequence
    whose length is ``symbols[0]``; attentions and mixers may read values of others, which ``keys``
    (one region for each of ``symbols[1:]``, or None) makes from ``key_state``.
    """

    index: int
    symbols: tuple[sympy.Symbol, ...]
    pre: RegionCall | None
    keys: tuple[RegionCall | None, ...]
    attentions: tuple[AttentionCall, ...]
    mixers: tuple[MixerCall, ...]
    post: RegionCall | None
    state_in: tuple[str, ...]
    key_state: tuple[str, ...]
    key_symbols: dict[str, sympy.Symbol]  # of key_state
    state_out: tuple[str, ...]

    @property
    def calls(self) -> tuple[RegionCall | AttentionCall | MixerCall | None, ...]:
        """Everything the block runs."""
        return (self.pre, *self.keys, self.post, *self.mixers, *self.attentions)


class OutputKind(enum.Enum):
    CONSTANT = "constant"
    WHOLE = "whole"  # computed by the epilogue from totals, vectors and inputs
    TOKEN = "token"  # per token, assembled from chunks
    DROPPED = "dropped"  # not materialized


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """One flat output of the graph."""

    kind: OutputKind
    name: str = ""
    constant: Any = None
    shape: tuple[sympy.Expr | int, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSpec:
    """Shape (in terms of the size symbols) and type of a value."""

    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkProgram:
    """Everything a step needs. ``axes``, ``needs_grad`` and ``specs`` are per value name.

    There is an entry per sequence that has one, and a head or two: what follows the LM head linear
    is apart from other results if it is one loss. ``one_pass``, per head: it computes its gradients
    in its forward (one total, nothing else differentiable leaves it). ``digest`` is equal for equal
    programs (``text`` says what is in them); ``draws``: the prologue draws random numbers;
    ``vector_inputs``: inputs that vectors, masks and score arithmetic are made of;
    ``size_inputs``: those that are sizes, in terms of the size symbols; ``input_labels``: inputs as
    the model names them.
    """

    input_names: tuple[str, ...]
    prologue: Callable[[dict[str, Any]], list[Any]] | None
    vector_names: tuple[str, ...]
    entries: tuple[RegionCall, ...]
    entry_state: tuple[str, ...]
    blocks: tuple[BlockProgram, ...]
    heads: tuple[RegionCall, ...]
    one_pass: tuple[bool, ...]
    epilogue: Callable[[dict[str, Any]], list[Any]] | None
    epilogue_outputs: tuple[str, ...]
    outputs: tuple[OutputSpec, ...]
    token_symbols: tuple[sympy.Symbol, ...]
    axes: dict[str, TokenAxis]
    needs_grad: dict[str, bool]
    specs: dict[str, ValueSpec]
    vector_inputs: frozenset[str]
    size_inputs: dict[str, sympy.Expr]
    input_labels: dict[str, str]
    text: str
    digest: int
    draws: bool
    symbol_sources: dict[sympy.Symbol, tuple[int, int | None]]
    lengths: dict[sympy.Symbol, sympy.Expr]

    def symbols(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of every size symbol at this call."""
        found = {
            symbol: int(inputs[index]) if dim is None else int(inputs[index].shape[dim])
            for symbol, (index, dim) in self.symbol_sources.items()
        }
        for symbol, length in self.lengths.items():
            found[symbol] = int(length.subs(found))
        return found
