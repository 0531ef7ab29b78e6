"""From a cut graph to a :class:`ChunkProgram`: regions become compiled bodies, the rest by name.

In: the captured graph, its analysis and cut, the body cache and the plan's lengths. Out: the
program. Regions of identical structure share one compiled body; what is small runs whole before the
chunks (prologue: vectors from integer inputs) or after them (epilogue: from the totals).

Contract: every output of the captured graph is in the program: whole, per token, constant, or
dropped by the caller's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy
import torch
from torch.fx import Graph, Node

from ..graph import (
    Attention,
    CapturedGraph,
    Mixer,
    NodeKind,
    TokenAxis,
    is_tensor,
    size_expr,
    value_of,
)
from ..plan import ChunkPlan
from ..runtime.program import (
    AttentionCall,
    BlockProgram,
    ChunkProgram,
    MixerCall,
    Operand,
    OperandKind,
    OutputKind,
    OutputSpec,
    RegionCall,
    Result,
)
from ..runtime.ranks import Ranks
from .compile_bodies import BodyCache
from .cut_regions import BlockCut, Cut, returned_nodes
from .extract_regions import Region, RegionExtractor, read_by
from .find_token_axes import TokenAnalysis
from .match_lm_head import after_head
from .shard_sequence import (
    check_sharded,
    digest_of,
    draws_numbers,
    input_labels,
    program_text,
    shard_attention,
    size_inputs,
    value_specs,
    vector_inputs,
)
from .trace_bodies import BodyInterpreter
from .whole_graphs import by_name, whole_graph


class Lowering:
    """Lowers one captured graph."""

    def __init__(
        self,
        captured: CapturedGraph,
        analysis: TokenAnalysis,
        cut: Cut,
        dropped: dict[int, Node],
        cache: BodyCache,
        *,
        plan: ChunkPlan,
        ranks: Ranks,
        sharded: bool = False,
    ) -> None:
        self.captured = captured
        self.graph = captured.module.graph
        self.analysis = analysis
        self.cut = cut
        self.dropped = dropped
        self.cache = cache
        self.plan = plan
        self.ranks = ranks
        self.sharded = sharded
        self.extractor = RegionExtractor(captured.module, analysis)
        self.vectors: dict[Node, None] = {}
        self.regions: list[tuple[RegionCall, Region]] = []
        self.train = captured.grad_enabled and any(captured.requires_grad)

    def needs_grad(self, node: Node) -> bool:
        return self.train and bool(node.meta.get("needs_grad", False))

    # regions ------------------------------------------------------------------

    def region(
        self,
        label: str,
        symbol: sympy.Symbol,
        outputs: Sequence[Node],
        stops: Iterable[Node],
        length: int,
    ) -> RegionCall | None:
        if not outputs:
            return None
        region = self.extractor.extract(outputs, set(stops), symbol)
        for source, operand in zip(region.sources, region.operands, strict=True):
            if operand.kind in (OperandKind.VECTOR, OperandKind.WHOLE):
                self.vectors.setdefault(source)
        call = RegionCall(
            label=label,
            symbol=symbol,
            body=self.cache.get(region, length),
            operands=region.operands,
            results=tuple(self.result(n) for n in outputs),
            read_by=read_by(region),
        )
        self.regions.append((call, region))
        return call

    def result(self, node: Node) -> Result:
        axes = self.analysis.axes.get(node, ())
        return Result(
            name=node.name,
            axis=axes[0] if axes else None,
            needs_grad=self.needs_grad(node),
        )

    def compiled(
        self,
        label: str,
        symbol: sympy.Symbol,
        outputs: Sequence[Node],
        stops: Iterable[Node],
    ) -> RegionCall | None:
        """A region of a block (or the entry), with the forms training needs compiled now."""
        call = self.region(label, symbol, outputs, stops, self.plan.chunk_len)
        if call is None:
            return None
        call.body.prepare("forward")
        if self.train and call.needs_backward:
            call.body.prepare("backward")
        return call

    def block(self, index: int, cut: BlockCut) -> BlockProgram:
        made, own = set(cut.barrier_outputs), cut.symbol
        state = {*cut.state_in, *cut.key_state}
        before: dict[sympy.Symbol, list[Node]] = {own: []}
        for node in cut.barrier_inputs:
            if len(self.analysis.axes.get(node, ())) == 1:
                group = before.setdefault(self.symbol_of(node), [])
                computed = node not in state and node.op != "placeholder"
                if computed and self.analysis.kinds[node] is NodeKind.TOKENWISE:
                    group.append(node)
        after = [n for n in cut.state_out if n not in state and n not in made]
        return BlockProgram(
            index=index,
            symbols=tuple(before),
            pre=self.compiled("pre", own, before.pop(own), state),
            keys=tuple(
                self.compiled("keys", symbol, nodes, state)
                for symbol, nodes in before.items()
            ),
            attentions=tuple(
                self.attention(b) for b in cut.barriers if isinstance(b, Attention)
            ),
            mixers=tuple(self.mixer(b) for b in cut.barriers if isinstance(b, Mixer)),
            post=self.compiled("post", own, after, {*cut.state_in, *made}),
            state_in=tuple(n.name for n in cut.state_in),
            key_state=tuple(n.name for n in cut.key_state),
            key_symbols={n.name: self.symbol_of(n) for n in cut.key_state},
            state_out=tuple(n.name for n in cut.state_out),
        )

    def symbol_of(self, node: Node) -> sympy.Symbol:
        """The length of the sequence a value per token (or a part of a total) belongs to."""
        axes = self.analysis.axes.get(node, ())
        if axes:
            return axes[0].symbol
        found = {
            a.symbol
            for x in node.all_input_nodes
            for a in self.analysis.axes.get(x, ())
        }
        (symbol,) = found
        return symbol

    def attention(self, record: Attention) -> AttentionCall:
        by_name = {n.name: n for n in self.graph.nodes}
        operands: dict[str, Operand] = {}
        for graph in (record.mask, record.score, record.sinks):
            for leaf in graph.leaves if graph is not None else ():
                self.vectors.setdefault(by_name[leaf.name])
                if self.needs_grad(by_name[leaf.name]):
                    operands[leaf.name] = Operand(
                        kind=OperandKind.STATE, name=leaf.name, needs_grad=True
                    )
        if record.seed is not None:
            self.vectors.setdefault(record.seed)
        for node in (record.q, record.k, record.v):
            if self.analysis.kinds[node] is NodeKind.VECTOR:
                self.vectors.setdefault(node)
        return AttentionCall(
            name=record.name,
            q=record.q.name,
            k=record.k.name,
            v=record.v.name,
            key_symbol=self.symbol_of(record.k),
            value_size=int(value_of(record.v).shape[-1]),
            mask=record.mask,
            is_causal=record.is_causal,
            scale=record.scale,
            dtype=value_of(record.node).dtype,
            needs_grad=self.needs_grad(record.node),
            seed=None if record.seed is None else record.seed.name,
            dropout_p=record.dropout_p,
            operands=tuple(operands.values()),
            **shard_attention(record, self.ranks),
        )

    def mixer(self, record: Mixer) -> MixerCall:
        operands = []
        for node in record.inputs:
            axes = self.analysis.axes.get(node, ())
            kind = self.analysis.kinds[node]
            where, size = OperandKind.STATE, None
            if kind is NodeKind.SYMBOL:
                where, size = OperandKind.SYMBOL, size_expr(value_of(node))
            elif kind in (NodeKind.VECTOR, NodeKind.MASK):
                where = OperandKind.WHOLE
                self.vectors.setdefault(node)
            elif axes:
                where = OperandKind.TOKEN
            elif node.op != "placeholder":
                where = OperandKind.WHOLE
                self.vectors.setdefault(node)
            operands.append(
                Operand(
                    kind=where,
                    name=node.name,
                    axis=axes[0] if len(axes) == 1 else None,
                    needs_grad=self.needs_grad(node) and where is not OperandKind.WHOLE,
                    size=size,
                )
            )
        module = whole_graph(self.captured.module, record.outputs, record.inputs)
        return MixerCall(
            name=record.name,
            run=lambda flat: list(BodyInterpreter(module).run(*flat)),
            operands=tuple(operands),
            results=tuple(self.result(n) for n in record.outputs),
        )

    def outputs(self) -> tuple[list[OutputSpec], list[Node]]:
        """Specs of the graph's outputs, and the nodes the epilogue must return."""
        specs, whole = [], []
        token_outputs = set(self.cut.token_outputs)
        for index, leaf in enumerate(returned_nodes(self.graph)):
            if index in self.dropped:
                value = value_of(self.dropped[index])
                specs.append(
                    OutputSpec(
                        kind=OutputKind.DROPPED,
                        name=self.dropped[index].name,
                        shape=tuple(size_expr(s) for s in value.shape),
                        dtype=value.dtype,
                    )
                )
            elif not isinstance(leaf, Node):
                specs.append(OutputSpec(kind=OutputKind.CONSTANT, constant=leaf))
            elif leaf in token_outputs:
                specs.append(OutputSpec(kind=OutputKind.TOKEN, name=leaf.name))
            else:
                specs.append(OutputSpec(kind=OutputKind.WHOLE, name=leaf.name))
                whole.append(leaf)
        return specs, list(dict.fromkeys(whole))

    def lower(self) -> ChunkProgram:
        entries = [
            self.compiled("entry", symbol, nodes, ())
            for symbol, nodes in self.by_symbol(
                [n for n in self.cut.entry if n.op != "placeholder"]
            )
        ]
        blocks = tuple(self.block(i, b) for i, b in enumerate(self.cut.blocks))
        specs, whole = self.outputs()
        heads, one_pass = self.lower_heads()
        # Whole outputs that do not come from totals are vectors; those that do end the program.
        given = {*self.cut.totals, *self.cut.token_outputs}
        for node in self.light_ancestors(whole, given):
            self.vectors.setdefault(node)
        vectors = [n for n in self.vectors if n.op != "placeholder"]
        if self.sharded:
            check_sharded(self.captured, self.analysis, self.cut, whole)
        text = program_text(self.captured, self.plan)
        return ChunkProgram(
            input_names=tuple(
                n.name for n in self.graph.nodes if n.op == "placeholder"
            ),
            prologue=by_name(self.captured.module, vectors, ()) if vectors else None,
            vector_names=tuple(n.name for n in vectors),
            entries=tuple(call for call in entries if call is not None),
            entry_state=tuple(n.name for n in self.cut.entry),
            blocks=blocks,
            heads=heads,
            one_pass=one_pass,
            epilogue=by_name(self.captured.module, whole, [*given, *vectors])
            if whole
            else None,
            epilogue_outputs=tuple(n.name for n in whole),
            outputs=tuple(specs),
            token_symbols=self.captured.token_symbols,
            axes=self.value_axes(),
            needs_grad={
                n.name: self.needs_grad(n) for n in self.graph.nodes if is_tensor(n)
            },
            specs=value_specs(self.graph),
            vector_inputs=vector_inputs(self.vectors),
            size_inputs=size_inputs(self.graph),
            input_labels=input_labels(self.graph),
            text=text,
            digest=digest_of(text),
            draws=draws_numbers(vectors),
            symbol_sources=symbol_sources(self.graph),
            lengths=self.captured.lengths,
        )

    def light_ancestors(self, outputs: Sequence[Node], given: set[Node]) -> list[Node]:
        """Vectors the epilogue reads."""
        found: dict[Node, None] = {}
        seen: set[Node] = set()
        pending = list(outputs)
        while pending:
            node = pending.pop()
            if node in seen or node in given:
                continue
            seen.add(node)
            if node in self.analysis.light and is_tensor(node):
                found.setdefault(node)
                continue
            pending.extend(node.all_input_nodes)
        return list(found)

    def by_symbol(self, nodes: Iterable[Node]) -> list[tuple[sympy.Symbol, list[Node]]]:
        """Nodes by the sequence they belong to, in the order of the sequences."""
        groups = {symbol: [] for symbol in self.captured.token_symbols}
        for node in nodes:
            groups[self.symbol_of(node)].append(node)
        return [(symbol, group) for symbol, group in groups.items() if group]

    def lower_heads(self) -> tuple[tuple[RegionCall, ...], tuple[bool, ...]]:
        """The heads, and which of them compute their gradients in the forward."""
        heads, one_pass = [], []
        for symbol, results in self.by_symbol(
            [*self.cut.totals, *self.cut.token_outputs]
        ):
            for nodes in self.head_groups(results):
                call = self.region(
                    "head", symbol, nodes, self.cut.exit, self.plan.head_len
                )
                assert call is not None
                heads.append(call)
                trains = self.train and call.needs_backward
                one_pass.append(trains and self.is_one_loss(nodes))
                if one_pass[-1]:
                    call.body.prepare("forward_backward")
                    continue
                call.body.prepare("forward")
                if trains:
                    call.body.prepare("backward")
        return tuple(heads), tuple(one_pass)

    def head_groups(self, results: list[Node]) -> list[list[Node]]:
        """Other results (hidden states, a router's sums) apart, if the LM head's are one loss."""
        after = after_head(self.cut.head)
        mine = [n for n in results if n in after]
        rest = [n for n in results if n not in after]
        apart = self.is_one_loss(mine) and any(self.needs_grad(n) for n in rest)
        return [rest, mine] if apart else [results]

    def is_one_loss(self, nodes: Sequence[Node]) -> bool:
        found = [n for n in nodes if self.needs_grad(n)]
        scalars = [n for n in found if value_of(n).dim() == 0]
        return len(found) == len(scalars) == 1 and found[0] in self.cut.totals

    def value_axes(self) -> dict[str, TokenAxis]:
        return {
            node.name: axes[0]
            for node, axes in self.analysis.axes.items()
            if len(axes) == 1
        }


def symbol_sources(graph: Graph) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Where each size symbol is read from at a call: (input number, dim or None)."""
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for index, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if size_expr(size).is_Symbol:
                    found.setdefault(size_expr(size), (index, dim))
        elif isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            found.setdefault(value.node.expr, (index, None))
    return found
