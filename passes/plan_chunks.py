"""Choose the chunk lengths and count what a step stores.

In: the cut and the configuration. Out: a :class:`ChunkPlan`. This is where graph widths become the
plain numbers of ``cost/``; the cost model never sees FX.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
from torch.fx import Graph, Node

from ..config import FpdtConfig, num_ranks, tiers_of
from ..cost.memory import (
    RESIDENT_BYTES,
    chunk_length,
    head_length,
    power_of_two_below,
)
from ..graph import Attention, NodeKind, is_tensor, value_of
from ..plan import BlockBytes, ChunkPlan
from .cut_regions import BlockCut, Cut, bytes_per_token
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
    limit = config.max_intermediate_bytes
    chunk_len = config.chunk_len or bounded(
        chunk_length(per_token, widest(body, symbols), device),
        limit,
        max((bytes_per_token(n, symbols) for n in body), default=1),
    )
    head_nodes = [n for n in wide if n in in_head]
    head_width = max((bytes_per_token(n, symbols) for n in head_nodes), default=1)
    head_len = config.head_len or bounded(
        head_length(head_width, widest(head_nodes, symbols), device), limit, head_width
    )
    tiers = tiers_of(config.offload)
    resident = config.resident_bytes
    return ChunkPlan(
        chunk_len=chunk_len,
        head_len=min(head_len, chunk_len),
        hidden=tiers["hidden"],
        attention=tiers["attention"],
        kv=tiers["kv"],
        save=config.save,
        save_bytes=config.save_bytes,
        order=config.order,
        lookahead=config.lookahead,
        overlap=config.overlap,
        reduce_gradients=config.reduce_gradients,
        resident_bytes=RESIDENT_BYTES[device] if resident is None else resident,
        seq_parallel=num_ranks(config.seq_parallel),
        num_blocks=len(cut.blocks),
        stored_bytes_per_token=stored_bytes(cut, symbols, config.save),
        blocks=tuple(block_bytes(block, symbols) for block in cut.blocks),
    )


def bounded(length: int, limit: int | None, bytes_per_token: int) -> int:
    """A length whose largest intermediate is not larger than ``limit``."""
    if limit is None:
        return length
    return max(1, min(length, power_of_two_below(limit // max(1, bytes_per_token))))


def widest(nodes: Iterable[Node], symbols: Iterable[sympy.Symbol]) -> int:
    return max(
        (bytes_per_token(n, symbols) // value_of(n).dtype.itemsize for n in nodes),
        default=1,
    )


def stored_bytes(cut: Cut, symbols: Iterable[sympy.Symbol], save: str) -> int:
    """Bytes kept for the backward per token (of every batch row): states and what ``save`` adds."""
    kept: dict[Node, None] = dict.fromkeys(cut.entry)
    for block in cut.blocks:
        kept.update(dict.fromkeys(block.state_out))
    total = sum(bytes_per_token(n, symbols) for n in kept if n.op != "placeholder")
    for block in cut.blocks:
        found = block_bytes(block, symbols)
        total += found.attention if save != "hidden" else 0
        total += found.qkv if save == "qkv" else 0
    return total


def block_bytes(block: BlockCut, symbols: Iterable[sympy.Symbol]) -> BlockBytes:
    """What one block's attentions take per token."""
    outs = qkv = sums = 0
    made: dict[Node, None] = {}
    for barrier in block.barriers:
        if not isinstance(barrier, Attention):
            continue
        out = value_of(barrier.node)
        outs += bytes_per_token(barrier.node, symbols)
        # logsumexp: one number a row and head, fp32 (float64 for float64)
        width = max(4, out.dtype.itemsize)
        rows = bytes_per_token(barrier.node, symbols) // out.dtype.itemsize
        outs += width * rows // int(out.shape[-1])
        for node in (barrier.q, barrier.k, barrier.v):
            made.setdefault(node)
            numbers = bytes_per_token(node, symbols) // value_of(node).dtype.itemsize
            sums += width * numbers
    qkv = sum(bytes_per_token(node, symbols) for node in made)
    return BlockBytes(attention=outs, qkv=qkv, kv=qkv + sums)
