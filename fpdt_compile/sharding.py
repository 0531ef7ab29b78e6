"""Cutting a batch into every rank's tokens, and putting it together again.

The layout is that of ``runtime.layout``: chunk after chunk, each shared by all ranks, so that
causal work is balanced. ``chunk_len`` is the one the model is compiled with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .config import num_ranks
from .runtime.layout import SequenceLayout
from .runtime.ranks import Ranks


def shard_tokens(
    batch: Any,
    *,
    seq_parallel: int | DeviceMesh,
    chunk_len: int,
    dim: int = 1,
    rank: int | None = None,
) -> Any:
    """This rank's tokens of ``batch``, for a model compiled with ``inputs="sharded"``.

    ``batch`` is a tensor with S tokens in dimension ``dim``, or a mapping: its tensors that have
    the sequence's length there are cut, everything else is passed through. The length is that of
    the first tensor with that dimension. ``rank`` (default: this process') counts within the ranks
    that share a sequence. No token is lost, whatever S is. Labels are cut as they are: the model
    shifts them over the whole sequence.

    Raises ValueError if a rank would get fewer than two tokens, or for a mapping without tokens.
    """
    size = num_ranks(seq_parallel)
    if rank is None:
        rank = own_rank(seq_parallel)
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank}: allowed are integers from 0 to {size - 1}")
    layout = SequenceLayout.of(token_count(batch, dim), positive(chunk_len), size)
    fewest = min(layout.num_tokens(r) for r in range(size))
    if size > 1 and fewest < 2:
        raise ValueError(
            f"batch has {layout.length} tokens: a rank would get {fewest} of them; allowed are at "
            f'least {2 * size} for seq_parallel={size}, or inputs="whole"'
        )

    def cut(x: Any) -> Any:
        if not (isinstance(x, Tensor) and has_tokens(x, dim, layout.length)):
            return x
        parts = [x.narrow(dim, a, b - a) for a, b in layout.own(rank) if b > a]
        return torch.cat(parts, dim)

    return (
        {k: cut(v) for k, v in batch.items()}
        if isinstance(batch, Mapping)
        else cut(batch)
    )


def unshard_tokens(
    shards: Tensor | Sequence[Tensor],
    *,
    chunk_len: int,
    seq_parallel: DeviceMesh | None = None,
    dim: int = 1,
) -> Tensor:
    """The whole tensor from all ranks' shards of it: the inverse of :func:`shard_tokens`.

    ``shards`` are those of all ranks in order; or this rank's own, which are then gathered over
    ``seq_parallel`` (default: all ranks of the process group), on every rank.
    """
    if isinstance(shards, Tensor):
        shards = gather_shards(shards, seq_parallel, dim)
    length = sum(x.shape[dim] for x in shards)
    layout = SequenceLayout.of(length, positive(chunk_len), len(shards))
    held = [layout.num_tokens(r) for r in range(len(shards))]
    given = [x.shape[dim] for x in shards]
    if given != held:
        raise ValueError(
            f"shards have {given} tokens; with chunk_len={chunk_len} allowed are {held}"
        )
    shape = list(shards[0].shape)
    shape[dim] = length
    whole = shards[0].new_empty(shape)
    for r, shard in enumerate(shards):
        for (a, b), (c, d) in zip(layout.own(r), layout.local(r), strict=True):
            whole.narrow(dim, a, b - a).copy_(shard.narrow(dim, c, d - c))
    return whole


def gather_shards(shard: Tensor, mesh: DeviceMesh | None, dim: int) -> list[Tensor]:
    if not dist.is_initialized():
        raise ValueError(
            "shards is one tensor: without a process group allowed is the list of all ranks' shards"
        )
    group = dist.group.WORLD if mesh is None else mesh.get_group()
    ranks = Ranks(group)
    count = torch.tensor([shard.shape[dim]], device=ranks.device)
    counts = [int(x) for x in ranks.gather("shard lengths", count, [1] * ranks.size)]
    shape = list(shard.shape)
    per_token = shard.numel() // max(1, shape[dim])
    flat = ranks.gather("shards", shard.contiguous(), [n * per_token for n in counts])
    found = []
    for n, values in zip(counts, flat, strict=True):
        shape[dim] = n
        found.append(values.view(shape))
    return found


def own_rank(seq_parallel: int | DeviceMesh) -> int:
    if isinstance(seq_parallel, DeviceMesh):
        return seq_parallel.get_local_rank()
    if seq_parallel == 1:
        return 0
    if not dist.is_initialized():
        raise ValueError("rank=None: without a process group allowed is an integer")
    return dist.get_rank() % seq_parallel


def token_count(batch: Any, dim: int) -> int:
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    for x in values:
        if isinstance(x, Tensor) and x.dim() > dim:
            return x.shape[dim]
    raise ValueError(
        f"batch: allowed is a tensor (or a mapping with one) of more than {dim} dims"
    )


def has_tokens(x: Tensor, dim: int, length: int) -> bool:
    return x.dim() > dim and x.shape[dim] == length


def positive(chunk_len: object) -> int:
    if isinstance(chunk_len, bool) or not isinstance(chunk_len, int) or chunk_len < 1:
        raise ValueError(f"chunk_len={chunk_len!r}: allowed are integers >= 1")
    return chunk_len
