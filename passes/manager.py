"""The order of the passes, and the one place where CantChunk is caught.

In: a captured graph and the configuration. Out: an :class:`Analysis` that ``lower`` (or
``explain``) reads. Order: ``name_lengths`` first, because the other passes look for token symbols;
``pad_shifted_losses`` next, because ``normalize`` splits the mean
losses it leaves behind; ``normalize`` then, because every later pass has fewer cases;
``pad_shifted_sums`` after it, on the sums it made of means; ``settle_row_numbers`` too, on
writes it made functional;
``raise_attention`` then, so that attention has one form; ``counter_dropout`` after it, on the
dropouts that are left; ``fold_repeat_kv`` before attention is matched, so that G heads are
stored; then axes, attention, mixers, cut and plan, each of which reads what the ones before it
found.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .._torch_private import NewGuard, no_new_guards
from ..config import FpdtConfig
from ..debug import op_counts, record_stage
from ..errors import CantChunk, InvariantError, Rejection
from ..graph import (
    Attention,
    CapturedGraph,
    FeedForward,
    Mixer,
    NodeKind,
    is_tensor,
    size_expr,
    value_of,
)
from ..plan import ChunkPlan
from .base import GraphPass, PassContext
from .counter_dropout import CounterDropout
from .cut_regions import Cut, cut_regions, returned_nodes
from .find_mixers import find_mixers
from .find_token_axes import TokenAnalysis, find_token_axes
from .fold_repeat_kv import FoldRepeatKV
from .match_attention import find_attentions
from .match_feed_forward import find_feed_forwards
from .match_lm_head import after_head, find_head
from .name_lengths import NameLengths
from .normalize import Normalize
from .pad_shifted_losses import PadShiftedLosses
from .pad_shifted_sums import PadShiftedSums
from .plan_chunks import plan_chunks
from .raise_attention import RaiseAttention
from .settle_row_numbers import SettleRowNumbers
from .token_rules import op_name
from .verify import verify_graph

log = logging.getLogger(__name__)


def rewriting_passes() -> list[GraphPass]:
    """In order; see the module docstring for why."""
    return [
        NameLengths(),
        PadShiftedLosses(),
        Normalize(),
        PadShiftedSums(),
        SettleRowNumbers(),
        RaiseAttention(),
        CounterDropout(),
        FoldRepeatKV(),
    ]


@dataclass(kw_only=True, slots=True)
class Analysis:
    """What was found in one captured graph. ``cut`` is None when the graph runs as it is."""

    captured: CapturedGraph
    tokens: TokenAnalysis | None = None
    attentions: list[Attention] = field(default_factory=list)
    mixers: list[Mixer] = field(default_factory=list)
    feed_forwards: list[FeedForward] = field(default_factory=list)
    cut: Cut | None = None
    plan: ChunkPlan | None = None
    dropped: dict[int, Node] = field(default_factory=dict)  # by place in the output
    rejections: list[Rejection] = field(default_factory=list)
    num_found: int = 0


def analyze(captured: CapturedGraph, config: FpdtConfig) -> Analysis:
    """Run every pass up to the plan. With ``config.strict`` the first refusal is raised."""
    result = Analysis(captured=captured)
    try:
        if captured.refused is not None:
            raise CantChunk(captured.refused)
        with no_new_guards(captured.module):
            run_passes(captured, config)
            find_everything(captured, config, result)
    except CantChunk as error:
        if config.strict:
            raise
        result.rejections.append(error.rejection)
        result.cut = None
    except NewGuard as error:
        result.rejections.append(undecided_size(error))
        result.cut = None
    if config.strict and result.rejections:
        raise CantChunk(result.rejections[0])
    return result


def undecided_size(error: NewGuard) -> Rejection:
    return Rejection(
        op="size",
        source="unknown",
        reason=f"a rewrite depends on how sizes compare: {error}",
        change="nothing; please report the model",
    )


def run_passes(captured: CapturedGraph, config: FpdtConfig) -> None:
    names = [p.name for p in rewriting_passes()]
    for name in config.disable_passes:
        if name not in names:
            raise ValueError(
                f"disable_passes={config.disable_passes!r}: allowed are {', '.join(names)}"
            )
    ctx = PassContext(fuel=config.max_rewrites)
    for graph_pass in rewriting_passes():
        if graph_pass.name in config.disable_passes:
            continue
        before, start = op_counts(captured.module), time.perf_counter()
        count = graph_pass.run(captured, ctx)
        verify_graph(captured, graph_pass.name, pure=graph_pass.leaves_pure)
        after = op_counts(captured.module)
        log.debug(
            "%s: %d rewrites in %.3f s, ops %s",
            graph_pass.name,
            count,
            time.perf_counter() - start,
            difference(before, after),
        )
        record_stage(graph_pass.name, captured.module)


def difference(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    names = {*before, *after}
    return {n: after[n] - before[n] for n in sorted(names) if after[n] != before[n]}


def find_everything(
    captured: CapturedGraph, config: FpdtConfig, result: Analysis
) -> None:
    graph, symbols = captured.module.graph, captured.token_symbols
    numbers = [n for n in captured.lengths.values() if n.is_Integer]
    if any(number in numbers for number, _ in captured.specialized):
        # Named, so it can be cut; but every length is compiled anew.
        result.rejections.append(no_token_dimension(captured))
    if not symbols and is_short(captured):
        return
    if not symbols:
        raise CantChunk(no_token_dimension(captured))
    refuse_shared_symbol(captured)
    tokens = result.tokens = find_token_axes(graph, symbols)
    nodes = list(graph.nodes)
    found = [n for n in nodes if tokens.kinds[n] is NodeKind.ATTENTION]
    result.num_found = len(found)
    result.attentions, refused = find_attentions(nodes, tokens)
    result.rejections.extend(error.rejection for error in refused)
    result.feed_forwards = find_feed_forwards(graph, tokens)
    drop_outputs(captured, config, result)
    result.mixers, tails = find_mixers(graph, tokens)
    swallowed = {n for mixer in [*result.mixers, *tails] for n in mixer.nodes}
    result.attentions = [a for a in result.attentions if a.node not in swallowed]
    known = {rejection.source for rejection in result.rejections}
    result.rejections.extend(
        m.rejection
        for m in [*result.mixers, *tails]
        if m.rejection is not None and m.rejection.source not in known
    )
    kept = [n for n in returned_nodes(graph) if isinstance(n, Node)]
    kept += [x for tail in tails for x in tail.inputs]
    barriers = [*result.attentions, *result.mixers]
    result.cut = cut_regions(graph, tokens, symbols, barriers, kept)
    if not result.attentions:
        result.rejections.append(
            Rejection(
                op="graph",
                source="unknown",
                reason="no attention over the token axis was found",
                change="nothing, if the model has none; else see the other rejections",
            )
        )
    rejected = sum(n in swallowed for n in found)
    if len(found) != len(result.attentions) + rejected:
        raise InvariantError("attentions found are not the ones rewritten and rejected")
    result.plan = plan_chunks(graph, tokens, result.cut, symbols, config)


def no_token_dimension(captured: CapturedGraph) -> Rejection:
    """Why there is no symbol for the sequence: the model's code fixed it, or nobody marked it."""
    if captured.specialized:
        number, place = captured.specialized[0]
        return Rejection(
            op="input size",
            source=place,
            reason=f"the token dimension is fixed to {number} by this line",
            change="do not compare the sequence length with a number or convert it with int(), and "
            "name every input that has a token dimension in token_dims=",
        )
    return Rejection(
        op="graph",
        source="unknown",
        reason="no input dimension is known to be the token dimension",
        change="name it with token_dims=, or use dynamic=True with the fpdt backend",
    )


def refuse_shared_symbol(captured: CapturedGraph) -> None:
    """With dynamic=True, torch gives sizes that are equal at the first call one symbol."""
    for node in captured.module.graph.nodes:
        if node.op != "placeholder" or not is_tensor(node):
            continue
        value = value_of(node)
        if value.is_floating_point() or value.dtype is torch.bool:
            continue  # a mask may well be [S, S]
        sizes = [size_expr(s) for s in value.shape]
        if any(sizes.count(symbol) > 1 for symbol in captured.token_symbols):
            raise CantChunk(
                Rejection(
                    op="input size",
                    source=str(node.meta.get("input_name", node.name)),
                    reason="its batch size and sequence length are one symbol, because they were "
                    "equal when it was traced",
                    change="nothing: other shapes are traced anew; or use fpdt_compile.optimize",
                )
            )


# torch specializes sizes 0 and 1; S - 1 or S // 2 of the model's code reach them up to here.
SHORT = 4


def is_short(captured: CapturedGraph) -> bool:
    """Whether the token dimension is a number because the sequence is only a few tokens long."""
    dims = [
        value_of(n).shape[1]
        for n in captured.module.graph.nodes
        if n.op == "placeholder"
        and is_tensor(n)
        and value_of(n).dim() >= 2
        and not value_of(n).is_floating_point()
    ]
    sizes = [size_expr(d) for d in dims]
    return bool(sizes) and all(size.is_Integer and size <= SHORT for size in sizes)


def drop_outputs(captured: CapturedGraph, config: FpdtConfig, result: Analysis) -> None:
    """Take out of the graph what training does not need: what follows the LM head, and caches.

    Only when a loss is returned and gradients are enabled, and only with ``outputs="auto"``. A
    cache is what is made of an attention's keys and values by moving them around.
    """
    graph, tokens = captured.module.graph, result.tokens
    assert tokens is not None
    returned = returned_nodes(graph)
    losses = [
        n
        for n in returned
        if isinstance(n, Node)
        and tokens.kinds[n] in (NodeKind.TOTAL, NodeKind.EPILOGUE)
        and value_of(n).dim() == 0
        and n.meta.get("needs_grad", False)
    ]
    if config.outputs != "auto" or not captured.grad_enabled or not losses:
        return
    totals = [n for n in graph.nodes if tokens.kinds[n] is NodeKind.TOTAL]
    after = after_head(find_head(graph, tokens, totals, []))
    caches = {x for a in result.attentions for x in (a.k, a.v)}
    for index, node in enumerate(returned):
        if not isinstance(node, Node) or not is_tensor(node) or node in losses:
            continue
        per_token = tokens.kinds[node] is NodeKind.TOKENWISE and node in after
        if per_token or moved_from(node, caches):
            result.dropped[index] = node
    (output,) = [n for n in graph.nodes if n.op == "output"]
    kept = [None if i in result.dropped else x for i, x in enumerate(returned)]
    output.args = (tuple(kept),)
    graph.eliminate_dead_code()


MOVES = frozenset(
    "slice cat reshape transpose permute unsqueeze squeeze expand select".split()
)


def moved_from(node: Node, sources: set[Node]) -> bool:
    """Whether ``node`` is one of ``sources`` or made of them by moving elements around."""
    while node not in sources:
        if node.op != "call_function" or op_name(node) not in MOVES:
            return False
        first = node.args[0]
        node = first[-1] if isinstance(first, (list, tuple)) else first
    return True
