"""Records that the stages hand to each other.

Symbols as in the paper: B batch, S sequence length, H query heads, G key/value heads, D head
size. ``s`` is the sympy symbol that stands for S in the captured graph; a model with two sequences
(encoder-decoder) has one for each, and each is a *stream* of its own.

Everything here is data: a record is made by one stage and only read by the later ones.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from .errors import Rejection


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAxis:
    """One token axis of a tensor: dimension ``dim`` has size ``outer * s * inner``, s ``symbol``.

    The dimension is laid out ``[outer, s, inner]``: flattening ``[B, s, d]`` to ``[B*s, d]`` gives
    ``outer = B, inner = 1``. ``dim`` is non-negative.

    ``order`` names the sort whose permutation the rows are in ("" is the order above): row j holds
    what belongs to row ``permutation[j]``. Such a value means something inside its chunk only.
    """

    dim: int
    symbol: sympy.Symbol
    outer: sympy.Expr = sympy.S.One
    inner: sympy.Expr = sympy.S.One
    order: str = ""

    @property
    def plain(self) -> bool:
        """Whether the dimension is the sequence and nothing else."""
        return self.outer == 1 and self.inner == 1

    def at(self, dim: int) -> TokenAxis:
        """The same axis as dimension ``dim``."""
        return replace(self, dim=dim)


class NodeKind(enum.Enum):
    """What a node of the captured graph is to the chunked program."""

    SYMBOL = "symbol"  # a SymInt / SymFloat / SymBool
    STATE = "state"  # no token axis, from parameters and buffers only
    VECTOR = "vector"  # small, from integer inputs only; computed whole, once a call
    TOKENWISE = (
        "tokenwise"  # one token axis, row t of the output needs row t of the inputs
    )
    MASK = "mask"  # two token axes, from vectors only; evaluated tile by tile
    SCORE = "score"  # two token axes, read by attention only; evaluated tile by tile
    ATTENTION = "attention"
    MIXER = "mixer"  # part of an op group that runs whole
    TOTAL = "total"  # a sum over all tokens
    EPILOGUE = "epilogue"  # no token axis, computed from totals
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskLeaf:
    """An input of a mask graph: a whole tensor, named after its node in the captured graph.

    ``q_axis`` / ``k_axis`` is the leaf's dimension that runs along the queries / keys, or None.
    ``needs_grad``: a parameter (no token axis) whose gradient the attention computes.
    """

    name: str
    q_axis: TokenAxis | None
    k_axis: TokenAxis | None
    needs_grad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskGraph:
    """A mask as a graph over short vectors, never evaluated for all (query, key) pairs at once.

    ``module``'s placeholders are ``leaves`` in order, its one output the mask, broadcastable to
    ``[B, H, S, S]``; ``is_bool`` says whether it selects (bool) or is added to the scores.

    A selecting mask with ``fill`` replaces the scores of hidden pairs by that finite number, so
    that a row without a visible key attends to all keys alike; without, such a row is 0. An added
    mask with fills in it has ``passes``: True for pairs whose scores get a gradient in such a row.
    """

    name: str
    module: GraphModule
    leaves: tuple[MaskLeaf, ...]
    is_bool: bool
    fill: float | None = None
    passes: MaskGraph | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreGraph:
    """Arithmetic on attention scores that is more than a scale and a mask.

    ``module``'s first placeholder is the tile of unscaled scores ``[B, H, q, k]``, the others are
    ``leaves`` in order; its output are the logits before the mask, broadcastable to the scores.
    """

    name: str
    module: GraphModule
    leaves: tuple[MaskLeaf, ...]


class TileKind(enum.Enum):
    """How a (query chunk, key chunk) pair is computed."""

    EMPTY = "empty"  # no query sees any key: skipped
    FULL = "full"  # every query sees every key: no mask
    CAUSAL = (
        "causal"  # equal ranges, key j visible to query i iff j <= i: the kernel's flag
    )
    PARTIAL = "partial"  # anything else: the mask graph is evaluated on the tile


@dataclass(frozen=True, kw_only=True, slots=True)
class TileTable:
    """``kinds[i][j]`` for query chunk i and key chunk j; hashable: schedules are cached by it."""

    kinds: tuple[tuple[TileKind, ...], ...]

    def keys_of(self, query_chunk: int) -> tuple[int, ...]:
        """Key chunks that ``query_chunk`` attends to, in order."""
        row = self.kinds[query_chunk]
        return tuple(j for j, kind in enumerate(row) if kind is not TileKind.EMPTY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One attention: ``q`` [B,H,S,D], ``k`` [B,G,T,D], ``v`` [B,G,T,Dv] nodes, G divides H.

    T is S, or the length of another sequence (cross-attention).

    ``mask`` is a :class:`MaskGraph`, or None; ``is_causal`` is the op's own flag (mask is None
    then). ``scale`` None means 1/sqrt(D). With a ``score`` graph the scale is in the graph.
    ``sinks`` [H] are logits without a value; ``seed`` (a scalar) and ``dropout_p`` drop weights.
    ``members`` are the nodes of the score arithmetic, which only attention reads.
    """

    name: str
    node: Node
    q: Node
    k: Node
    v: Node
    mask: MaskGraph | None
    is_causal: bool
    scale: float | None
    score: ScoreGraph | None = None
    sinks: MaskGraph | None = None
    seed: Node | None = None
    dropout_p: float = 0.0
    members: tuple[Node, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixer:
    """Ops that mix tokens in a way we have no chunked form for; run whole as one group.

    ``rejection`` is None for what makes a tower's tokens: there is nothing to cut before it.
    """

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    rejection: Rejection | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    """``down(act(up(x)))`` or ``down(act(gate(x)) * up(x))``: products by role, for the report.

    With experts the products have a matrix per expert; ``hidden_size`` is that of one.
    """

    down: Node
    ups: tuple[Node, ...]
    hidden_size: int
    kind: str  # "plain", "gated" or "experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The LM head: the linear whose rows feed a total or a token output, and its input."""

    linear: Node
    hidden: Node
    vocab_size: int


@dataclass(kw_only=True, slots=True)
class CapturedGraph:
    """The pre-dispatch ATen graph and what is known about it from outside.

    ``module`` takes the flat inputs of Dynamo's graph in order. ``token_symbols`` are the lengths
    of the sequences (none: no dynamic token dimension). ``requires_grad[i]`` is per flat input.
    ``lengths`` are those of ``token_symbols`` that are no input's size, and their values.
    ``graph_break`` is (file and line, reason) where the code goes on after the graph's end.
    ``refused`` says why there is no such graph: ``module`` is then Dynamo's own, without ``val``.
    """

    module: GraphModule
    token_symbols: tuple[sympy.Symbol, ...]
    requires_grad: tuple[bool, ...]
    grad_enabled: bool
    lengths: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    specialized: tuple[
        tuple[int, str], ...
    ] = ()  # input sizes the model's code fixed, and where
    refused: Rejection | None = None
    graph_break: tuple[str, str] | None = None


Axes = dict[Node, tuple[TokenAxis, ...]]


def value_of(node: Node) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def size_expr(size: int | torch.SymInt) -> sympy.Expr:
    """A dimension's size as a sympy expression."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.Integer(size)


FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_of(node: Node) -> str:
    """The innermost line of the user's code that made ``node``, as ``file:line``.

    Frames inside torch are not the user's. ``"unknown"`` when the node carries no trace.
    """
    trace = node.meta.get("stack_trace") or ""
    frames = FRAME.findall(trace)
    inside_torch = torch.__path__[0]
    for path, line in reversed(frames):
        if not path.startswith(inside_torch):
            return f"{path}:{line}"
    return "unknown"
