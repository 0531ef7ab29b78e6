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


def merge_into(
    tile_out: Tensor, tile_lse: Tensor, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A tile merged with the running (out, lse), in the accumulator type; None: no state yet.

    The tile's own memory becomes the result's where the types allow; the state is left alone.
    """
    work = accumulator_dtype(tile_out.dtype)
    tile_out, tile_lse = tile_out.to(work), tile_lse.to(work)
    if out is None or lse is None:
        return tile_out, tile_lse
    new = torch.logaddexp(lse, tile_lse)
    # Where both are -inf the difference is NaN and both outputs are 0: any finite weight will do.
    shift = new.masked_fill(new == -torch.inf, 0.0)
    tile_out.mul_(torch.exp(tile_lse - shift).unsqueeze(-1))
    tile_out.addcmul_(out, torch.exp(lse - shift).unsqueeze(-1))
    return tile_out, new
