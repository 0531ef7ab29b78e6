"""Merge attention over tiles: online softmax with a running output and logsumexp.

Shapes: out [B, H, q, D], lse [B, H, q] (natural log, fp32 or float64). A row that has seen no key
has lse = -inf and out = 0; merging keeps that exact, without NaN. Everything is accumulated in
fp32 (float64 for float64 inputs), so the error does not grow with the number of tiles. Source:
Milakov and Gimelshein, arXiv 1805.02867; the merge is the one of arXiv 2408.16978, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half types, else the type itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def merge(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Add a tile to the running (out, lse), in place; out and lse are in the accumulator type."""
    new = torch.logaddexp(lse, tile_lse)
    # Where both are -inf the difference is NaN and both outputs are 0: any finite weight will do.
    shift = new.masked_fill(new == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - shift).unsqueeze(-1))
    out.addcmul_(tile_out.to(out.dtype), torch.exp(tile_lse - shift).unsqueeze(-1))
    lse.copy_(new)
