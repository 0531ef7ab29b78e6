"""Attention of one query chunk over one key chunk, forward and backward.

Shapes: q [B, H, q, D], k [B, G, k, D], v [B, G, k, Dv], G divides H; out [B, H, q, Dv],
lse [B, H, q] natural log. ``bias`` is added to the scaled scores (-inf hides a pair),
broadcastable to [B, H, q, k]; ``causal`` hides key j from query i < j.

Contract: forward returns (out, lse) of this tile alone; backward takes the GLOBAL out and lse of
the row, so that its dq, dk, dv are this tile's part of the whole gradient. A row without a key in
the tile comes back with lse = -inf and out = 0.

Implementations: aten's flash kernel for CPU, and plain math (any device and head sizes), in row
blocks so that no score matrix is larger than ``MAX_SCORES`` elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
FLASH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_SCORES = 1 << 19


def has_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether aten's CPU flash kernel takes these operands."""
    return (
        q.device.type == "cpu"
        and q.dtype in FLASH_DTYPES
        and q.shape[-1] == v.shape[-1]
        and min(q.numel(), k.numel()) > 0
    )


def forward_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
    dead_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one tile; ``dead_rows`` [..., q] marks rows ``bias`` hides every key from."""
    if has_flash(q, k, v):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
        if dead_rows is not None:  # the kernel returns out = 0, lse = 0 for such a row
            lse = lse.masked_fill(dead_rows, -torch.inf)
        return out, lse
    return math_forward(q, k, v, scale=scale, causal=causal, bias=bias)


def backward_tile(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This tile's part of (dq, dk, dv); rows without any key must come with a finite lse."""
    if has_flash(q, k, v):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    return math_backward(grad, q, k, v, out, lse, scale=scale, causal=causal, bias=bias)


def row_blocks(q: Tensor, k: Tensor) -> list[slice]:
    rows = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(a, min(a + rows, q.shape[2])) for a in range(0, q.shape[2], rows)]


def scores_of(
    q: Tensor, k: Tensor, rows: slice, scale: float, causal: bool, bias: Tensor | None
) -> Tensor:
    """Scaled, masked scores [B, G, H/G, rows, k] in the accumulator type."""
    batch, heads, _, size = q.shape
    groups, keys = k.shape[1], k.shape[2]
    work = torch.promote_types(q.dtype, torch.float32)
    part = q[:, :, rows].to(work).reshape(batch, groups, heads // groups, -1, size)
    scores = torch.matmul(part, k.to(work).unsqueeze(2).transpose(-1, -2)) * scale
    if causal:
        index = torch.arange(keys, device=q.device)
        hidden = index > torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    if bias is not None:
        full = bias[..., rows, :] if bias.shape[-2] != 1 else bias
        full = full.expand(batch, -1, -1, -1) if full.dim() == 4 else full
        if full.dim() == 4 and full.shape[1] not in (1,):
            full = full.reshape(batch, groups, heads // groups, *full.shape[-2:])
        elif full.dim() == 4:
            full = full.unsqueeze(2)
        scores = scores + full.to(work)
    return scores


def math_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Plain math in row blocks."""
    batch, heads, queries, _ = q.shape
    work = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(batch, heads, queries, v.shape[-1])
    lse = q.new_full((batch, heads, queries), -torch.inf, dtype=work)
    values = v.to(work).unsqueeze(2)
    for rows in row_blocks(q, k):
        scores = scores_of(q, k, rows, scale, causal, bias)
        part = torch.logsumexp(scores, dim=-1)
        finite = part.masked_fill(part == -torch.inf, 0.0)
        weights = torch.exp(scores - finite.unsqueeze(-1))
        out[:, :, rows] = torch.matmul(weights, values).flatten(1, 2).to(out.dtype)
        lse[:, :, rows] = part.flatten(1, 2)
    return out, lse


def math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P * (dO V^T - rowsum(dO * O)); dq = dS K, dk = dS^T Q, dv = P^T dO."""
    batch, heads = q.shape[:2]
    groups = k.shape[1]
    work = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=work), torch.zeros_like(v, dtype=work)
    keys, values = k.to(work), v.to(work)
    for rows in row_blocks(q, k):
        scores = scores_of(q, k, rows, scale, causal, bias)

        upstream, logsum, output, query = (
            x[:, :, rows]
            .to(work)
            .reshape(batch, groups, heads // groups, -1, x.shape[-1])
            for x in (grad, lse.unsqueeze(-1), out, q)
        )
        weights = torch.exp(scores - logsum)
        delta = (upstream * output).sum(-1, keepdim=True)
        inner = torch.matmul(upstream, values.unsqueeze(2).transpose(-1, -2)) - delta
        inner = inner * weights * scale
        dq[:, :, rows] = (
            torch.matmul(inner, keys.unsqueeze(2)).flatten(1, 2).to(dq.dtype)
        )
        dk += torch.matmul(inner.transpose(-1, -2), query).sum(2)
        dv += torch.matmul(weights.transpose(-1, -2), upstream).sum(2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
