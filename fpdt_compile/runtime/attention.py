"""Running attention of the query chunks of one block, tile by tile.

In: chunks of q, k, v (and, backward, of the output, logsumexp and output gradient) and the mask.
Out: per query chunk the output and logsumexp; per chunk dq, dk, dv. Sums over tiles are in fp32
(float64 for float64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..graph import TileKind
from ..kernels.online_softmax import accumulator_dtype, merge
from ..kernels.tiles import backward_tile, forward_tile
from .masks import MaskEvaluator
from .program import AttentionCall

Range = tuple[int, int]
# A PARTIAL tile's mask is evaluated in blocks of query rows of at most this many elements.
MAX_BIAS = 1 << 23


class TileRunner:
    """Runs the tiles of one attention of one step."""

    def __init__(self, call: AttentionCall, mask: MaskEvaluator | None) -> None:
        self.call = call
        self.mask = mask
        self.running: dict[int, tuple[Tensor, Tensor]] = {}
        self.grads: dict[tuple[str, int], Tensor] = {}
        self.cast: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def scale(self, q: Tensor) -> float:
        if self.call.scale is not None:
            return self.call.scale
        return 1.0 / math.sqrt(q.shape[-1])

    def row_blocks(self, kind: TileKind, q: Tensor, k: Tensor) -> list[slice]:
        """Rows per kernel call: all, but for masks that have to be evaluated."""
        rows = q.shape[2]
        if kind is TileKind.PARTIAL:
            rows = max(1, MAX_BIAS // (q.shape[0] * k.shape[2]))
        return [slice(a, min(a + rows, q.shape[2])) for a in range(0, q.shape[2], rows)]

    def bias(
        self, kind: TileKind, rows: slice, q_range: Range, k_range: Range, q: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if kind is not TileKind.PARTIAL:
            return None, None
        assert self.mask is not None
        part = (q_range[0] + rows.start, q_range[0] + rows.stop)
        bias, dead = self.mask.bias(part, k_range, q.dtype)
        if dead is not None:
            dead = dead.expand(q.shape[0], q.shape[1], rows.stop - rows.start)
        return bias, dead

    def attend(
        self,
        query: int,
        kind: TileKind,
        q_range: Range,
        k_range: Range,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Merge one tile into the running softmax of chunk ``query``."""
        q, k, v = (x.to(self.call.dtype) for x in (q, k, v))
        outs, lses = [], []
        for rows in self.row_blocks(kind, q, k):
            bias, dead = self.bias(kind, rows, q_range, k_range, q)
            out, lse = forward_tile(
                q[:, :, rows],
                k,
                v,
                scale=self.scale(q),
                causal=kind is TileKind.CAUSAL,
                bias=bias,
                dead_rows=dead,
            )
            outs.append(out)
            lses.append(lse)
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
        lse = lses[0] if len(lses) == 1 else torch.cat(lses, 2)
        have = self.running.get(query)
        if have is None:
            work = accumulator_dtype(out.dtype)
            self.running[query] = (out.to(work), lse.to(work))
        else:
            merge(*have, out, lse)

    def finish(self, query: int, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of a query chunk. A row without any key has out = 0 and, so that the backward
        stays finite, lse = 0."""
        state = self.running.pop(query, None)
        if state is None:
            shape = (*q.shape[:3], v.shape[-1])
            work = accumulator_dtype(self.call.dtype)
            return q.new_zeros(shape, dtype=self.call.dtype), q.new_zeros(
                shape[:3], dtype=work
            )
        out, lse = state
        dead = lse == -torch.inf
        return out.to(self.call.dtype), lse.masked_fill_(dead, 0.0)

    def attend_backward(
        self,
        query: int,
        key: int,
        kind: TileKind,
        q_range: Range,
        k_range: Range,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """Add one tile to dq of ``query`` and dk, dv of ``key``. Tensors: dO, q, k, v, out, lse."""
        grad, q, k, v, out, lse = tensors
        dtype = self.call.dtype
        grad, q, k, v, out = (x.to(dtype) for x in (grad, q, k, v, out))
        for rows in self.row_blocks(kind, q, k):
            bias, _ = self.bias(kind, rows, q_range, k_range, q)
            dq, dk, dv = backward_tile(
                grad[:, :, rows],
                q[:, :, rows],
                k,
                v,
                out[:, :, rows],
                lse[:, :, rows],
                scale=self.scale(q),
                causal=kind is TileKind.CAUSAL,
                bias=bias,
            )
            self.add("q", query, dq, rows, q)
            self.add("k", key, dk, slice(0, k.shape[2]), k)
            self.add("v", key, dv, slice(0, v.shape[2]), v)

    def add(
        self, which: str, chunk: int, part: Tensor, rows: slice, like: Tensor
    ) -> None:
        work = accumulator_dtype(like.dtype)
        have = self.grads.get((which, chunk))
        if have is not None:
            have[:, :, rows].add_(part)
        elif rows == slice(0, like.shape[2]):
            self.grads[which, chunk] = part.to(work)
        else:
            whole = torch.zeros(like.shape, dtype=work, device=like.device)
            whole[:, :, rows] = part
            self.grads[which, chunk] = whole

    def has_grad(self, chunk: int) -> bool:
        """Whether any tile gave the chunk's q, k or v a gradient."""
        return any((which, chunk) in self.grads for which in "qkv")

    def take_grad(self, which: str, chunk: int, like: Tensor) -> Tensor:
        """The finished gradient of a chunk of q, k or v, in its own type; zeros if no tile
        used it."""
        grad = self.grads.pop((which, chunk), None)
        return torch.zeros_like(like) if grad is None else grad.to(like.dtype)
