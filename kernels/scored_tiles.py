"""Attention tiles whose scores go through arithmetic of the model's own, in plain math.

Shapes: q [B, H, q, D], k [B, G, k, D], v [B, G, k, Dv], G divides H; out [B, H, q, Dv],
lse [B, H, q] natural log.

``Logits`` maps unscaled scores of some rows, [B, H, rows, k] in the accumulator type, to the
logits of the softmax (scale, softcap, biases, mask); it is differentiated by autograd, so what it
reads may have gradients too. ``Keep`` gives the weights that dropout leaves, True to stay.

Contract: forward is this tile alone, backward takes the GLOBAL out and lse and returns this
tile's part, in the accumulator type. Scores exist for at most ``MAX_SCORES`` elements at once.
With dropped weights W = P * keep / (1 - p), P from the undropped softmax:

    dV = W^T dO,  dlogits = P * ((dO V^T) * keep / (1 - p) - rowsum(dO * O))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Logits = Callable[[Tensor, slice], Tensor]
Keep = Callable[[slice], Tensor]
MAX_SCORES = 1 << 19


def row_blocks(q: Tensor, k: Tensor) -> list[slice]:
    rows = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(a, min(a + rows, q.shape[2])) for a in range(0, q.shape[2], rows)]


def grouped(x: Tensor, groups: int) -> Tensor:
    """[B, H, n, D] as [B, G, H / G, n, D]."""
    batch, heads, rows, size = x.shape
    return x.reshape(batch, groups, heads // groups, rows, size)


def raw_scores(q: Tensor, k: Tensor, rows: slice, work: torch.dtype) -> Tensor:
    groups = k.shape[1]
    part = grouped(q[:, :, rows].to(work), groups)
    scores = torch.matmul(part, k.to(work).unsqueeze(2).transpose(-1, -2))
    return scores.flatten(1, 2)


def forward_scored(
    q: Tensor, k: Tensor, v: Tensor, logits_of: Logits, keep_of: Keep | None, p: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one tile; a row without a key has lse = -inf and out = 0."""
    batch, heads, queries, _ = q.shape
    groups = k.shape[1]
    work = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(batch, heads, queries, v.shape[-1], dtype=work)
    lse = q.new_full((batch, heads, queries), -torch.inf, dtype=work)
    values = v.to(work).unsqueeze(2)
    for rows in row_blocks(q, k):
        logits = logits_of(raw_scores(q, k, rows, work), rows).to(work)
        part = torch.logsumexp(logits, dim=-1)
        finite = part.masked_fill(part == -torch.inf, 0.0)
        weights = torch.exp(logits - finite.unsqueeze(-1))
        if keep_of is not None:
            weights = weights * keep_of(rows) / (1.0 - p)
        product = torch.matmul(grouped(weights, groups), values)
        out[:, :, rows] = product.flatten(1, 2)
        lse[:, :, rows] = part
    return out, lse


def backward_scored(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    logits_of: Logits,
    keep_of: Keep | None,
    p: float,
    leaves: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """This tile's part of (dq, dk, dv) and of the gradients of ``leaves`` that logits_of reads."""
    groups = k.shape[1]
    work = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q, dtype=work)
    dk, dv = torch.zeros_like(k, dtype=work), torch.zeros_like(v, dtype=work)
    keys, values = k.to(work).unsqueeze(2), v.to(work).unsqueeze(2)
    sums: list[Tensor | None] = [None] * len(leaves)
    for rows in row_blocks(q, k):
        with torch.enable_grad():
            scores = raw_scores(q, k, rows, work).requires_grad_()
            logits = logits_of(scores, rows).to(work)
        upstream, query = (grouped(x[:, :, rows].to(work), groups) for x in (grad, q))
        delta = (grad[:, :, rows].to(work) * out[:, :, rows].to(work)).sum(-1)
        weights = torch.exp(logits.detach() - lse[:, :, rows].to(work).unsqueeze(-1))
        inner = torch.matmul(upstream, values.transpose(-1, -2)).flatten(1, 2)
        dropped = weights
        if keep_of is not None:
            factor = keep_of(rows) / (1.0 - p)
            inner, dropped = inner * factor, weights * factor
        inner = (inner - delta.unsqueeze(-1)) * weights
        dscores, *found = torch.autograd.grad(
            logits, [scores, *leaves], inner, allow_unused=True
        )
        for i, part in enumerate(found):
            if part is not None:
                sums[i] = part if sums[i] is None else sums[i] + part
        dscores = grouped(dscores, groups)
        dq[:, :, rows] = torch.matmul(dscores, keys).flatten(1, 2)
        dk += torch.matmul(dscores.transpose(-1, -2), query).sum(2)
        dv += torch.matmul(grouped(dropped, groups).transpose(-1, -2), upstream).sum(2)
    return dq, dk, dv, sums
