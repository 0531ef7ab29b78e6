"""Attention from explicit scores in plain math: what a raised attention means when it runs whole.

Shapes: q [B, H, q, D], k [B, G, k, D], v [B, G, k, Dv], G divides H; scores [B, H, q, k].

``raise_attention`` writes these two functions into the captured graph: ``attention_scores``, then
the score arithmetic of the model, then ``attention_from_scores``. The chunked program replaces all
of it by tiles; a graph part that runs whole calls them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

LOW = (1 << 32) - 1
MIX = 0x45D9F3B


def as_tokens(x: Tensor, dims: Sequence[int]) -> Tensor:
    """``x`` itself: ``name_lengths`` marks with it that ``dims`` count tokens."""
    return x


@has_side_effect  # kept while nobody reads it: a later pass may need the size
def as_length(n: int) -> int:
    """``n`` itself: the number of tokens that a symbol of its own stands for."""
    return n


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    """Unscaled scores ``q @ k^T``, [B, H, q, k]; query head h reads key head h // (H / G)."""
    if q.shape[1] != k.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return torch.matmul(q, k.transpose(-1, -2))


def attention_from_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Softmax of ``scores`` (fp32 at least) times v, [B, H, q, Dv], in the type of v.

    ``sinks`` [H] are logits that take part in the softmax and select no value. ``seed`` (an
    integer scalar) and ``dropout_p`` drop weights, see :func:`keep_mask`. q and k are what the
    scores were made from; they are not read.
    """
    work = torch.promote_types(scores.dtype, torch.float32)
    logits = scores.to(work)
    if sinks is not None:
        column = sinks.to(work).reshape(1, -1, 1, 1)
        column = column.expand(*logits.shape[:3], 1)
        weights = torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch._safe_softmax(logits, dim=-1)
    if seed is not None and dropout_p > 0.0:
        batch, heads, queries, keys = weights.shape
        ranges = (0, heads), (0, queries), (0, keys)
        keep = keep_mask(seed, (batch, heads), *ranges, dropout_p)
        weights = weights * keep.to(work) / (1.0 - dropout_p)
    if v.shape[1] != weights.shape[1]:
        v = v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    return torch.matmul(weights.to(v.dtype), v)


def keep_mask(
    seed: Tensor,
    sizes: tuple[int, int],
    heads: tuple[int, int],
    q_range: tuple[int, int],
    k_range: tuple[int, int],
    dropout_p: float,
) -> Tensor:
    """Which weights of a tile stay, bool [B, heads, q, k]: a hash of the seed and the position.

    ``sizes`` are (B, H) of the whole attention; the ranges are heads, queries and keys of the whole
    sequence, so every tiling (every recomputation, every number of ranks) drops the same weights.
    The hash is two rounds of a 32-bit multiply-xorshift mix, in int64 where no product overflows,
    as in ``counter_dropout``.
    """
    batch, num_heads = sizes
    device = seed.device
    rows = torch.arange(*q_range, device=device)
    columns = torch.arange(*k_range, device=device)
    lanes = torch.arange(batch * num_heads, device=device).view(batch, num_heads, 1, 1)
    lanes = lanes[:, heads[0] : heads[1]]
    mixed = _mix(_mix(seed ^ lanes) ^ (rows[:, None] & LOW))
    mixed = _mix(mixed ^ (columns & LOW))
    return mixed >= int(dropout_p * (LOW + 1))


def _mix(x: Tensor) -> Tensor:
    for _ in range(2):
        x = (((x >> 16) ^ x) * MIX) & LOW
    return (x >> 16) ^ x
