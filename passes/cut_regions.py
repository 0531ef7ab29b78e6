"""Cut the graph at its attentions: what runs per chunk, and what is stored in between.

In: the graph, its analysis, the attentions and mixers ("barriers": they need other tokens). Out: a
:class:`Cut`: blocks in order, and between them the state, the values that are stored per token.

Contract: everything at or after block k can be computed per token from ``state[k]``, the outputs of
the barriers of block k and later, the small vectors, and the parameters. ``state[k + 1]`` can be
computed from ``state[k]`` and the outputs of block k's barriers. With several sequences each has a
state of its own, and a block changes that of its queries' sequence: per-token work never joins two.

Algorithm:
1. The depth of a barrier is the largest number of barriers on a path to it; block k holds those of
   one depth whose results are of one sequence. level(node) = the first block it does not depend on;
   what follows the LM head linear gets a level of its own, so that the head is a region.
2. state[0] is the minimum vertex cut, in bytes per token, between the embeddings (or float inputs)
   and everything that later levels read; state[k + 1] is the same with ``state[k]`` and block k's
   outputs as sources. Light values (rotary tables) cost nothing: they are recomputed from vectors.
   Among equal cuts the one
   after the most matrix products and before the most pointwise work is taken: what follows the
   state is recomputed in the backward, so it should be cheap.

For a decoder the state is the residual stream. Source: networkx.minimum_cut (max-flow min-cut).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import networkx as nx
import sympy
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .._torch_private import symbol_hint
from ..errors import InvariantError
from ..graph import Attention, Head, Mixer, NodeKind, is_tensor, size_expr, value_of
from .base import refuse
from .find_mixers import CHANGE
from .find_token_axes import TokenAnalysis
from .match_lm_head import PRODUCTS, find_head
from .token_rules import op_name

Barrier = Attention | Mixer
TIE_POINTWISE = 1 << 8
TIE_TOTAL = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCut:
    """One block: ``state_in`` -> pre -> barriers -> post -> ``state_out``.

    ``symbol`` is the length of the sequence these are of; ``key_state`` the state of other
    sequences that the barriers' inputs come from.
    """

    symbol: sympy.Symbol
    barriers: tuple[Barrier, ...]
    state_in: tuple[Node, ...]
    key_state: tuple[Node, ...]
    state_out: tuple[Node, ...]

    @property
    def barrier_inputs(self) -> tuple[Node, ...]:
        found: dict[Node, None] = {}
        for barrier in self.barriers:
            for node in inputs_of(barrier):
                found.setdefault(node)
        return tuple(found)

    @property
    def barrier_outputs(self) -> tuple[Node, ...]:
        return tuple(n for barrier in self.barriers for n in outputs_of(barrier))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The blocks, the state before and after them, and what the graph returns, by kind."""

    entry: tuple[Node, ...]
    blocks: tuple[BlockCut, ...]
    exit: tuple[Node, ...]
    head: Head | None
    totals: tuple[Node, ...]
    token_outputs: tuple[Node, ...]


def inputs_of(barrier: Barrier) -> tuple[Node, ...]:
    if isinstance(barrier, Attention):
        return (barrier.q, barrier.k, barrier.v)
    return barrier.inputs


def outputs_of(barrier: Barrier) -> tuple[Node, ...]:
    if isinstance(barrier, Attention):
        return (barrier.node,)
    return barrier.outputs


def returned_nodes(graph: Graph) -> list[Any]:
    """The graph's flat outputs: nodes and constants."""
    (output,) = [n for n in graph.nodes if n.op == "output"]
    return list(
        pytree.tree_leaves(output.args[0], is_leaf=lambda x: isinstance(x, Node))
    )


def bytes_per_token(node: Node, symbols: Iterable[sympy.Symbol]) -> int:
    """Bytes of a tensor for one token of every batch row."""
    value = value_of(node)
    total = sympy.Integer(value.dtype.itemsize)
    for size in value.shape:
        total *= size_expr(size)
    total = total.subs(dict.fromkeys(symbols, 1))
    return int(total.subs({s: symbol_hint(value, s) for s in total.free_symbols}))


class Cutter:
    """One graph's levels, and the minimum cuts between them."""

    def __init__(
        self,
        graph: Graph,
        analysis: TokenAnalysis,
        symbols: tuple[sympy.Symbol, ...],
        barriers: list[Barrier],
        kept_outputs: list[Node],
    ) -> None:
        self.graph = graph
        self.analysis = analysis
        self.symbols = symbols
        self.barriers = barriers
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.owner = {n: b for b in barriers for n in members_of(b)}
        self.totals = [n for n in graph.nodes if analysis.kinds[n] is NodeKind.TOTAL]
        self.kept = [n for n in kept_outputs if self.is_stored_kind(n)]
        self.head = find_head(graph, analysis, self.totals, self.kept)
        self.levels: dict[Node, int] = dict.fromkeys(graph.nodes, 0)
        self.places: list[tuple[int, int]] = []  # of blocks: (depth, sequence)
        self.block_of = self.assign_blocks()
        self.assign_levels()
        self.measure_depths()

    def is_stored_kind(self, node: Node) -> bool:
        """A value per token that must come from the chunks (light ones are recomputed)."""
        kind = self.analysis.kinds[node]
        return node not in self.analysis.light and (
            kind in (NodeKind.TOKENWISE, NodeKind.ATTENTION)
            or (kind is NodeKind.MIXER and len(self.analysis.axes.get(node, ())) == 1)
        )

    def sequence_of(self, node: Node) -> int:
        """The number of the sequence a value per token belongs to."""
        return self.symbols.index(self.analysis.axes[node][0].symbol)

    def sequence_of_barrier(self, barrier: Barrier) -> int:
        found = {self.sequence_of(x) for x in outputs_of(barrier)}
        if len(found) > 1:
            assert isinstance(barrier, Mixer)
            what = barrier.rejection.reason if barrier.rejection else "makes tokens"
            raise refuse(barrier.nodes[0], f"{what}, of two sequences at once", CHANGE)
        return found.pop()

    def assign_blocks(self) -> dict[str, int]:
        """The block of each barrier, by name: depth first, then sequence."""
        depths = dict.fromkeys(self.graph.nodes, 0)
        below = dict.fromkeys((b.name for b in self.barriers), 0)
        changed = True
        while (
            changed
        ):  # a mixer's nodes may stand among nodes that it does not depend on
            before = dict(below)
            for node in self.graph.nodes:
                barrier = self.owner.get(node)
                if barrier is None:
                    sources = node.all_input_nodes
                    depths[node] = max((depths[x] for x in sources), default=0)
                else:
                    sources = inputs_of(barrier)
                    depth = max((depths[x] for x in sources), default=0)
                    below[barrier.name], depths[node] = depth, depth + 1
            changed = below != before
        places = {
            b.name: (below[b.name], self.sequence_of_barrier(b)) for b in self.barriers
        }
        self.places = sorted(set(places.values()))
        return {name: self.places.index(place) for name, place in places.items()}

    def use_level(self, node: Node) -> int:
        barrier = self.owner.get(node)
        if barrier is not None:
            return self.block_of[barrier.name] + 1
        return self.levels[node]

    def assign_levels(self) -> None:
        for node in self.graph.nodes:
            if node not in self.owner:
                self.levels[node] = max(
                    (self.use_level(x) for x in node.all_input_nodes), default=0
                )
        self.depth = len(self.places)
        if self.head is not None:
            after = {self.head.linear}
            for node in self.graph.nodes:
                if node in after or any(x in after for x in node.all_input_nodes):
                    after.add(node)
                    self.levels[node] = self.depth + 1

    def read_later(self, node: Node, level: int) -> bool:
        """Whether something after ``state[level]`` reads ``node``."""
        if node in self.kept and self.use_level(node) <= self.depth:
            return True
        for user in node.users:
            barrier = self.owner.get(user)
            if barrier is not None:
                if self.owner.get(node) is not barrier and (
                    self.block_of[barrier.name] >= level
                ):
                    return True
            elif self.analysis.kinds[user] is NodeKind.TOTAL:
                return True
            elif self.is_stored_kind(user) and self.levels[user] > level:
                return True
        return False

    def minimum_state(self, sources: list[Node], level: int) -> tuple[Node, ...]:
        """The cheapest set of values per token from which everything later follows."""
        network = nx.DiGraph()
        pending, seen = list(sources), set(sources)
        while pending:
            node = pending.pop()
            storable = is_tensor(node) and node not in self.analysis.local
            capacity = {"capacity": self.cost(node)} if storable else {}
            network.add_edge((node, "in"), (node, "out"), **capacity)
            if self.read_later(node, level):
                network.add_edge((node, "out"), "sink")
            for user in node.users:
                inside = user not in self.owner and self.is_stored_kind(user)
                if not inside or self.levels[user] > level:
                    continue
                network.add_edge((node, "out"), (user, "in"))
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
        for node in sources:
            network.add_edge("source", (node, "in"))
        if "sink" not in network or "source" not in network:
            return ()
        _, (near, far) = nx.minimum_cut(network, "source", "sink")
        chosen = [n for n in seen if (n, "in") in near and (n, "out") in far]
        return tuple(sorted(chosen, key=self.order.__getitem__))

    def cost(self, node: Node) -> int:
        """Bytes per token first; among equals see the module docstring."""
        products, pointwise = self.depths[node]
        tie = (self.most_products - products) * TIE_POINTWISE + min(
            pointwise, TIE_POINTWISE - 1
        )
        return bytes_per_token(node, self.symbols) * TIE_TOTAL + min(tie, TIE_TOTAL - 1)

    def measure_depths(self) -> None:
        """Per node: matrix products on a path to it, and operators since the last of them."""
        self.depths: dict[Node, tuple[int, int]] = {}
        for node in self.graph.nodes:
            before = [self.depths[x] for x in node.all_input_nodes]
            products = max((p for p, _ in before), default=0)
            pointwise = min((w for p, w in before if p == products), default=0)
            if node.op == "call_function" and op_name(node) in PRODUCTS:
                self.depths[node] = (products + 1, 0)
            else:
                self.depths[node] = (products, pointwise + 1)
        self.most_products = max((p for p, _ in self.depths.values()), default=0)

    def entry_sources(self) -> list[Node]:
        """Float inputs, and what is first made per token from integers (embeddings)."""
        found = []
        for node in self.graph.nodes:
            if node in self.owner or not self.is_stored_kind(node):
                continue
            if not any(
                x in self.owner or self.is_stored_kind(x) for x in node.all_input_nodes
            ):
                found.append(node)
        return found

    def cut(self) -> Cut:
        sources = self.entry_sources()
        states = [
            self.minimum_state([n for n in sources if self.sequence_of(n) == i], 0)
            for i in range(len(self.symbols))
        ]
        entry = tuple(n for state in states for n in state)
        blocks: list[BlockCut] = []
        for level, (_, own) in enumerate(self.places):
            barriers = tuple(b for b in self.barriers if self.block_of[b.name] == level)
            made = [n for b in barriers for n in outputs_of(b)]
            others = {
                self.sequence_of(x)
                for b in barriers
                for x in inputs_of(b)
                if self.is_stored_kind(x)
            } - {own}
            after = self.minimum_state([*states[own], *made], level + 1)
            blocks.append(
                BlockCut(
                    symbol=self.symbols[own],
                    barriers=barriers,
                    state_in=states[own],
                    key_state=tuple(n for i in sorted(others) for n in states[i]),
                    state_out=after,
                )
            )
            states[own] = after
        return Cut(
            entry=entry,
            blocks=tuple(blocks),
            exit=tuple(n for state in states for n in state),
            head=self.head,
            totals=tuple(self.totals),
            token_outputs=tuple(dict.fromkeys(self.kept)),
        )


def members_of(barrier: Barrier) -> tuple[Node, ...]:
    return (barrier.node,) if isinstance(barrier, Attention) else barrier.nodes


def cut_regions(
    graph: Graph,
    analysis: TokenAnalysis,
    symbols: tuple[sympy.Symbol, ...],
    barriers: list[Barrier],
    kept_outputs: list[Node],
) -> Cut:
    """Cut ``graph``; see the module docstring. ``kept_outputs`` must leave the program whole."""
    cutter = Cutter(graph, analysis, symbols, barriers, kept_outputs)
    cut = cutter.cut()
    found = sum(len(block.barriers) for block in cut.blocks)
    if found != len(barriers):
        raise InvariantError(f"{len(barriers)} barriers, {found} in blocks")
    return cut
