"""What a program needs to run on several ranks: each rank's heads, and what the ranks compare.

In: the parts of a lowered graph. Out: fields of the :class:`ChunkProgram`. The instructions of a
shared sequence are written at run time (``runtime.parallel_schedule``), from lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import sympy
import torch
from torch.fx import Graph, Node

from ..errors import CantChunk, Rejection
from ..graph import Attention, CapturedGraph, is_tensor, size_expr, value_of
from ..plan import ChunkPlan
from ..runtime.layout import HeadShare, share_heads
from ..runtime.program import ValueSpec
from ..runtime.ranks import Ranks
from .base import target_name
from .cut_regions import Cut
from .find_token_axes import TokenAnalysis
from .shard_heads import shard_graph


def head_shares(record: Attention, size: int) -> tuple[HeadShare, ...]:
    num_heads, num_key_heads = (int(value_of(x).shape[1]) for x in (record.q, record.k))
    return tuple(share_heads(num_heads, num_key_heads, size))


def shard_attention(record: Attention, ranks: Ranks) -> dict[str, object]:
    """The fields of an AttentionCall that depend on the rank."""
    num_heads = int(value_of(record.q).shape[1])
    shares = head_shares(record, ranks.size)
    mask, score, sinks = record.mask, record.score, record.sinks
    if ranks.size > 1:
        heads = shares[ranks.rank].queries
        if mask is not None:
            mask = shard_graph(mask, heads, num_heads)
        if score is not None:
            score = shard_graph(score, heads, num_heads)
        if sinks is not None:
            sinks = shard_graph(
                sinks, heads, num_heads, dim=sinks_dim(sinks, num_heads)
            )
    return dict(
        tile_mask=mask, score=score, sinks=sinks, num_heads=num_heads, shares=shares
    )


def sinks_dim(sinks: object, num_heads: int) -> int:
    """Where sink logits, [H] up to dimensions of size 1, have their heads; negative."""
    (output,) = sinks.module.graph.find_nodes(op="output")
    shape = list(value_of(output.args[0]).shape)
    return shape.index(num_heads) - len(shape) if num_heads in shape else -1


def value_specs(graph: Graph) -> dict[str, ValueSpec]:
    return {
        node.name: ValueSpec(
            shape=tuple(size_expr(s) for s in value_of(node).shape),
            dtype=value_of(node).dtype,
        )
        for node in graph.nodes
        if is_tensor(node)
    }


def size_inputs(graph: Graph) -> dict[str, sympy.Expr]:
    """Graph inputs that are sizes, and what they are in terms of the size symbols."""
    return {
        node.name: value_of(node).node.expr
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(value_of(node), torch.SymInt)
    }


def input_labels(graph: Graph) -> dict[str, str]:
    """Dynamo's names of the inputs, without what it adds to the model's."""
    return {
        node.name: str(node.meta.get("input_name", node.name))
        .removeprefix("l_")
        .removeprefix("kwargs_")
        .rstrip("_")
        for node in graph.nodes
        if node.op == "placeholder"
    }


def draws_numbers(vectors: Iterable[Node]) -> bool:
    """Whether computing these values draws random numbers."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        for n in ancestors(vectors)
    )


def vector_inputs(vectors: Iterable[Node]) -> frozenset[str]:
    """Graph inputs that vectors are made of."""
    return frozenset(n.name for n in ancestors(vectors) if n.op == "placeholder")


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def program_text(captured: CapturedGraph, plan: ChunkPlan) -> str:
    """Equal for programs that exchange and compute the same, line by line."""
    lines = [f"plan {plan.to_json()}"]
    for node in captured.module.graph.nodes:
        if node.op == "placeholder" and is_tensor(node):
            value = value_of(node)
            lines.append(
                f"input {node.meta.get('input_name', node.name)} "
                f"{str(value.dtype).removeprefix('torch.')} "
                f"{[str(size_expr(s)) for s in value.shape]} "
                f"trained={node.meta.get('needs_grad', False)}"
            )
        elif node.op == "call_function":
            lines.append(f"{node.name} = {target_name(node)}")
    return "\n".join(lines)


def digest_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def check_sharded(
    captured: CapturedGraph,
    tokens: TokenAnalysis,
    cut: Cut,
    whole: Sequence[Node],
) -> None:
    """Refuse what has no meaning when every rank passes only its own tokens."""
    for node in captured.module.graph.nodes:
        if node.op == "placeholder" and len(tokens.axes.get(node, ())) > 1:
            raise refused(
                node,
                "is a mask over pairs of tokens, of which each rank has only its own",
                "pass no mask (attention is causal then), or vectors (positions, documents, "
                "padding) to the model and compile the whole model",
            )
    if captured.lengths:
        raise refused(
            captured.module.graph,
            "computes its number of tokens from other sizes",
            'use inputs="whole"',
        )
    if ancestors(whole) & {n for n in cut.token_outputs if n not in whole}:
        raise refused(
            whole[0],
            "is computed from all tokens' results",
            'use inputs="whole", or compute it outside of the compiled module',
        )


def refused(node: Node | Graph, reason: str, change: str) -> CantChunk:
    name = "graph"
    if isinstance(node, Node):
        name = str(node.meta.get("input_name", node.name))
    return CantChunk(Rejection(op=name, source="inputs", reason=reason, change=change))
