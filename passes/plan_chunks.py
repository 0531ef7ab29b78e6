"""Choose the chunk lengths and count what a step stores.

In: the cut and the configuration. Out: a :class:`ChunkPlan`. This is where graph widths become the
plain numbers of ``cost/``; the cost model never sees FX.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
from torch.fx import Graph, Node

from ..config import FpdtConfig, num_ranks
from ..cost.memory import chunk_length, head_length
from ..graph import Attention, NodeKind, is_tensor, value_of
from ..plan import ChunkPlan
from .cut_regions import Cut, bytes_per_token
from .find_token_axes import TokenAnalysis
from .match_lm_head import after_head


def plan_chunks(
    graph: Graph,
    analysis: TokenAnalysis,
    cut: Cut,
    symbols: Iterable[sympy.Symbol],
    config: FpdtConfig,
) -> ChunkPlan:
    """The plan for one captured graph."""
    device = next(value_of(n).device.type for n in graph.nodes if is_tensor(n))
    wide = [
        n
        for n in graph.nodes
        if analysis.kinds[n] is NodeKind.TOKENWISE
        and is_tensor(n)
        and n not in analysis.light
    ]
    in_head = after_head(cut.head)
    body = [n for n in wide if n not in in_head]
    levels = max(1, len(cut.blocks))
    per_token = sum(bytes_per_token(n, symbols) for n in body) // levels
    chunk_len = config.chunk_len or chunk_length(
        per_token, widest(body, symbols), device
    )
    head_nodes = [n for n in wide if n in in_head]
    head_width = max((bytes_per_token(n, symbols) for n in head_nodes), default=1)
    head_len = config.head_len or head_length(
        head_width, widest(head_nodes, symbols), device
    )
    return ChunkPlan(
        chunk_len=chunk_len,
        head_len=min(head_len, chunk_len),
        tier="host" if config.offload == "host" else "device",
        save=config.save,
        seq_parallel=num_ranks(config.seq_parallel),
        num_blocks=len(cut.blocks),
        stored_bytes_per_token=stored_bytes(cut, symbols, config.save),
    )


def widest(nodes: Iterable[Node], symbols: Iterable[sympy.Symbol]) -> int:
    return max(
        (bytes_per_token(n, symbols) // value_of(n).dtype.itemsize for n in nodes),
        default=1,
    )


def stored_bytes(cut: Cut, symbols: Iterable[sympy.Symbol], save: str) -> int:
    """Bytes kept for the backward per token (of every batch row): states, attention outputs."""
    kept: dict[Node, None] = dict.fromkeys(cut.entry)
    for block in cut.blocks:
        kept.update(dict.fromkeys(block.state_out))
    total = sum(bytes_per_token(n, symbols) for n in kept if n.op != "placeholder")
    if save == "attention":
        for block in cut.blocks:
            for barrier in block.barriers:
                if isinstance(barrier, Attention):
                    out = value_of(barrier.node)
                    total += bytes_per_token(barrier.node, symbols)
                    # logsumexp: one number a row and head, fp32 (float64 for float64)
                    width = max(4, out.dtype.itemsize)
                    rows = bytes_per_token(barrier.node, symbols) // out.dtype.itemsize
                    total += width * rows // int(out.shape[-1])
    return total
