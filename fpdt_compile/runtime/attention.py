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
from ..kernels.reference import keep_mask
from ..kernels.scored_tiles import Keep, Logits, backward_scored, forward_scored
from ..kernels.tiles import backward_tile, forward_tile
from .masks import MaskEvaluator
from .program import AttentionCall
from .scores import ScoreEvaluator, sum_into
from .stores import ValueStore

Range = tuple[int, int]
# A PARTIAL tile's mask is evaluated in blocks of query rows of at most this many elements.
MAX_BIAS = 1 << 23


class TileRunner:
    """Runs the tiles of one attention of one step.

    Scores that are only scaled and masked go through the flash kernel; a score graph, dropout or an
    exact fill through plain math (``scored_tiles``).
    """

    def __init__(
        self,
        call: AttentionCall,
        mask: MaskEvaluator | None,
        score: ScoreEvaluator | None = None,
        sinks: ScoreEvaluator | None = None,
        seed: Tensor | None = None,
        passes: MaskEvaluator | None = None,
        heads: Range | None = None,
        store: ValueStore | None = None,
    ) -> None:
        self.call = call
        self.store = ValueStore() if store is None else store
        self.mask = mask
        self.score = score
        self.sinks = sinks
        self.passes = passes
        self.heads = (0, call.num_heads) if heads is None else heads
        self.seed = seed if call.dropout_p > 0.0 else None
        self.parameter_grads: dict[str, Tensor] = {}
        self.sunk: set[int] = set()  # query chunks whose sinks have their gradient
        self.running: dict[int, tuple[Tensor, Tensor]] = {}

    def scale(self, q: Tensor) -> float:
        if self.call.scale is not None:
            return self.call.scale
        return 1.0 / math.sqrt(q.shape[-1])

    def row_blocks(self, kind: TileKind, q: Tensor, k: Tensor) -> list[slice]:
        """Rows per kernel call: all, but for masks that have to be evaluated."""
        rows = q.shape[2]
        if kind is TileKind.PARTIAL:
            rows = max(1, MAX_BIAS // (q.shape[0] * q.shape[1] * k.shape[2]))
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

    def is_plain(self, kind: TileKind, q_range: Range) -> bool:
        """Whether a tile needs no more than a scale and an additive or causal mask."""
        fills = kind is TileKind.PARTIAL and self.mask is not None
        exact_fill = fills and self.mask.mask.fill is not None
        return (
            self.score is None
            and self.seed is None
            and not exact_fill
            and not (fills and self.row_shift(q_range) is not None)
        )

    def row_shift(self, q_range: Range) -> Tensor | None:
        """See ``MaskEvaluator.row_shift``; a sink is a key that every row sees."""
        if self.mask is None or self.sinks is not None:
            return None
        return self.mask.row_shift(q_range)

    def logits(
        self, kind: TileKind, q_range: Range, k_range: Range, scale: float
    ) -> Logits:
        """The score arithmetic and mask on rows of one tile."""
        shift = self.row_shift(q_range) if kind is TileKind.PARTIAL else None

        def logits_of(scores: Tensor, rows: slice) -> Tensor:
            part = (q_range[0] + rows.start, q_range[0] + rows.stop)
            if self.score is None:
                logits = scores * scale
            else:
                logits = self.score(scores, part, k_range)
            if kind is TileKind.CAUSAL:
                shown = torch.ones(
                    scores.shape[-2:], dtype=torch.bool, device=scores.device
                ).tril(rows.start)
                return torch.where(shown, logits, -torch.inf)
            if kind is not TileKind.PARTIAL:
                return logits
            assert self.mask is not None
            value = self.mask.tile(part, k_range)
            if shift is not None and self.passes is not None:
                alive = self.passes.tile(part, k_range) | (shift[..., rows, :] == 0)
                logits = torch.where(alive, logits, logits.detach())
            fill = self.mask.mask.fill
            if not self.mask.mask.is_bool:
                logits = logits + value
            else:
                logits = torch.where(
                    value, logits, -torch.inf if fill is None else fill
                )
            return logits if shift is None else logits - shift[..., rows, :]

        return logits_of

    def keep(self, q_range: Range, k_range: Range, q: Tensor) -> Keep | None:
        """Which weights of rows of one tile dropout leaves."""
        if self.seed is None:
            return None
        seed, p = self.seed, self.call.dropout_p

        def keep_of(rows: slice) -> Tensor:
            start = q_range[0] + rows.start
            part = (start, q_range[0] + rows.stop)
            sizes = (q.shape[0], self.call.num_heads)
            return keep_mask(seed, sizes, self.heads, part, k_range, p)

        return keep_of

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
        if self.is_plain(kind, q_range):
            out, lse = self.plain_tile(kind, q_range, k_range, q, k, v)
        else:
            out, lse = forward_scored(
                q,
                k,
                v,
                self.logits(kind, q_range, k_range, self.scale(q)),
                self.keep(q_range, k_range, q),
                self.call.dropout_p,
            )
        if query not in self.running and self.sinks is not None:
            self.running[query] = self.sink_state(out, lse)
        have = self.running.get(query)
        if have is None:
            work = accumulator_dtype(out.dtype)
            self.running[query] = (out.to(work), lse.to(work))
        else:
            merge(*have, out, lse)

    def sink_state(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The running softmax before any key: it has seen the sink, whose value is 0."""
        work = accumulator_dtype(out.dtype)
        logits = self.sink_logits().detach().to(lse.dtype)
        start = logits.reshape(1, -1, 1).expand_as(lse)
        return torch.zeros_like(out, dtype=work), start.to(work, copy=True)

    def sink_logits(self) -> Tensor:
        assert self.sinks is not None
        return self.sinks(None, (0, 1), (0, 1))

    def sink_backward(self, query: int, grad: Tensor, out: Tensor, lse: Tensor) -> None:
        """Once a query chunk: dsink = -sum over rows of exp(sink - lse) * rowsum(dO * O)."""
        if self.sinks is None or not self.sinks.parameters or query in self.sunk:
            return
        self.sunk.add(query)
        work = accumulator_dtype(lse.dtype)
        delta = (grad.to(work) * out.to(work)).sum(-1)
        with torch.enable_grad():
            logits = self.sink_logits()
        weights = torch.exp(logits.detach().to(work).reshape(1, -1, 1) - lse.to(work))
        upstream = -(weights * delta).sum((0, 2)).to(logits.dtype)
        found = torch.autograd.grad(
            logits, list(self.sinks.parameters.values()), upstream, allow_unused=True
        )
        sum_into(self.parameter_grads, list(self.sinks.parameters), found)

    def plain_tile(
        self,
        kind: TileKind,
        q_range: Range,
        k_range: Range,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor]:
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
        return out, lses[0] if len(lses) == 1 else torch.cat(lses, 2)

    def finish(self, query: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of a query chunk. A row without any key has out = 0 and, so that the backward
        stays finite, lse = 0."""
        state = self.running.pop(query, None)
        if state is None:
            shape = (*q.shape[:3], self.call.value_size)
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
        self.sink_backward(query, grad, out, lse)
        if not self.is_plain(kind, q_range):
            parameters = {} if self.score is None else self.score.parameters
            dq, dk, dv, found = backward_scored(
                grad,
                q,
                k,
                v,
                out,
                lse,
                self.logits(kind, q_range, k_range, self.scale(q)),
                self.keep(q_range, k_range, q),
                self.call.dropout_p,
                list(parameters.values()),
            )
            sum_into(self.parameter_grads, list(parameters), found)
            self.add("q", query, dq, slice(0, q.shape[2]), q)
            self.add("k", key, dk, slice(0, k.shape[2]), k)
            self.add("v", key, dv, slice(0, v.shape[2]), v)
            return
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
        key = (sum_of(self.call.name, which), chunk)
        if key in self.store:
            self.store.update(key)[:, :, rows].add_(part)
        elif rows == slice(0, like.shape[2]):
            self.store.put(key, part.to(work))
        else:
            whole = torch.zeros(like.shape, dtype=work, device=like.device)
            whole[:, :, rows] = part
            self.store.put(key, whole)

    def has_grad(self, which: str, chunk: int) -> bool:
        """Whether any tile gave the chunk's q, k or v a gradient."""
        return (sum_of(self.call.name, which), chunk) in self.store

    def take_grad(self, which: str, chunk: int) -> Tensor | None:
        """The finished gradient of a chunk of q, k or v; None if no tile used it."""
        return self.store.pop((sum_of(self.call.name, which), chunk))


def sum_of(name: str, which: str) -> str:
    """The name, in the store, of the running gradient of an attention's q, k or v."""
    return f"{name}.d{which}"
