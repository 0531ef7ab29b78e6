"""Running attention of the query chunks of one block, tile by tile.

In: chunks of q, k, v (and, backward, of the output, logsumexp and output gradient) and the mask.
Out: per query chunk the output and logsumexp; per chunk dq, dk, dv. Sums over tiles are in fp32
(float64 for float64).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..graph import TileKind
from ..kernels.online_softmax import accumulator_dtype, merge_into
from ..kernels.ops import ATTEND, ATTEND_BACKWARD
from ..kernels.reference import keep_mask
from ..kernels.scored_tiles import Keep, Logits, backward_scored, forward_scored
from .masks import MaskEvaluator
from .program import AttentionCall
from .scores import ScoreEvaluator, sum_into
from .stores import ValueStore
from .tile_programs import InlinedTile, NotInlined, inline

Range = tuple[int, int]
# A PARTIAL tile's mask is evaluated in blocks of query rows of at most this many elements.
MAX_BIAS = 1 << 23


class TileRunner:
    """Runs the tiles of one attention of one step.

    Tiles go through ``fpdt::attend``, with what they do to the scores as a bias or, where a Triton
    kernel runs, as a program inlined in it. What neither takes (dropout, parameters that get a
    gradient from the scores, rows that a finite mask hides all keys from, and without Triton any
    score graph) goes through plain math (``scored_tiles``).
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
        kernel: str = "",
    ) -> None:
        self.call = call
        self.kernel = kernel
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
        self.programs: dict[bool, InlinedTile | None] = {}  # by whether there is a mask

    def scale(self, q: Tensor) -> float:
        if self.call.scale is not None:
            return self.call.scale
        return 1.0 / math.sqrt(q.shape[-1])

    def row_blocks(self, kind: TileKind, q: Tensor, k: Tensor) -> list[slice]:
        """Rows per kernel call: all, but for masks that have to be evaluated."""
        rows = q.shape[2]
        if kind is TileKind.PARTIAL and self.inlined(kind, q) is None:
            rows = max(1, MAX_BIAS // (q.shape[0] * q.shape[1] * k.shape[2]))
        return [slice(a, min(a + rows, q.shape[2])) for a in range(0, q.shape[2], rows)]

    def inlined(self, kind: TileKind, q: Tensor) -> InlinedTile | None:
        """The program of tiles of this kind, where a kernel takes programs and this one."""
        if q.device.type != "cuda" and self.kernel != "triton":
            return None
        masked = kind is TileKind.PARTIAL
        if self.score is None and not masked:
            return None
        if masked not in self.programs:
            mask = self.mask if masked else None
            work = torch.promote_types(q.dtype, torch.float32)
            try:
                self.programs[masked] = inline(self.score, mask, self.scale(q), work)
            except (NotInlined, NotImplementedError):
                self.programs[masked] = None  # computed in plain math
        return self.programs[masked]

    def options(
        self, kind: TileKind, rows: slice, q_range: Range, k_range: Range, q: Tensor
    ) -> dict[str, Any]:
        """The options of ``fpdt::attend`` for some rows of a tile."""
        part = (q_range[0] + rows.start, q_range[0] + rows.stop)
        options: dict[str, Any] = {"scale": self.scale(q), "kernel": self.kernel}
        options["causal"] = kind is TileKind.CAUSAL
        program = self.inlined(kind, q)
        if program is not None:
            options |= program.arguments(part, k_range, q.device)
        elif kind is TileKind.PARTIAL:
            assert self.mask is not None
            options["bias"] = self.mask.bias(part, k_range, q.dtype)
        return options

    def is_plain(self, kind: TileKind, q_range: Range, q: Tensor) -> bool:
        """Whether ``fpdt::attend`` takes a tile; if not, plain math does."""
        masked = kind is TileKind.PARTIAL and self.mask is not None
        if self.seed is not None or (masked and self.row_shift(q_range) is not None):
            return False
        if self.score is not None and self.score.parameters:
            return False
        changed = self.score is not None or (masked and self.mask.mask.fill is not None)
        return not changed or self.inlined(kind, q) is not None

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
        state = self.running.pop(query, None)
        if state is None and self.sinks is not None:
            state = self.sink_state(q)
        if self.is_plain(kind, q_range, q):
            self.running[query] = self.plain_tile(
                kind, q_range, k_range, q, k, v, state
            )
            return
        tile = forward_scored(
            q,
            k,
            v,
            self.logits(kind, q_range, k_range, self.scale(q)),
            self.keep(q_range, k_range, q),
            self.call.dropout_p,
        )
        self.running[query] = merge_into(*tile, *(state or (None, None)))

    def sink_state(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The running softmax before any key: it has seen the sink, whose value is 0."""
        work = accumulator_dtype(q.dtype)
        logits = self.sink_logits().detach().to(work)
        start = logits.reshape(1, -1, 1).expand(q.shape[:3])
        out = q.new_zeros((*q.shape[:3], self.call.value_size), dtype=work)
        return out, start.contiguous()

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
        state: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """The running (out, lse) with one tile merged, in blocks of rows where it has a mask."""
        parts = []
        for rows in self.row_blocks(kind, q, k):
            options = self.options(kind, rows, q_range, k_range, q)
            have = (None, None) if state is None else [x[:, :, rows] for x in state]
            parts.append(ATTEND(q[:, :, rows], k, v, *have, **options))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([x for x, _ in parts], 2), torch.cat([x for _, x in parts], 2)

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
        if not self.is_plain(kind, q_range, q):
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
            for total, part in zip(
                self.sums(query, key, q, k, v), (dq, dk, dv), strict=True
            ):
                total.add_(part)
            return
        dq, dk, dv = self.sums(query, key, q, k, v)
        for rows in self.row_blocks(kind, q, k):
            ATTEND_BACKWARD(
                grad[:, :, rows],
                q[:, :, rows],
                k,
                v,
                out[:, :, rows],
                lse[:, :, rows],
                None,
                dq[:, :, rows],
                dk,
                dv,
                **self.options(kind, rows, q_range, k_range, q),
            )

    def sums(self, query: int, key: int, *like: Tensor) -> list[Tensor]:
        """The running gradients of a chunk of q, of k and of v, which a tile is added to."""
        found = []
        for which, chunk, value in zip("qkv", (query, key, key), like, strict=True):
            name = (sum_of(self.call.name, which), chunk)
            if name not in self.store:
                work = accumulator_dtype(value.dtype)
                self.store.put(name, torch.zeros_like(value, dtype=work))
            found.append(self.store.update(name))
        return found

    def has_grad(self, which: str, chunk: int) -> bool:
        """Whether any tile gave the chunk's q, k or v a gradient."""
        return (sum_of(self.call.name, which), chunk) in self.store

    def take_grad(self, which: str, chunk: int) -> Tensor | None:
        """The finished gradient of a chunk of q, k or v; None if no tile used it."""
        return self.store.pop((sum_of(self.call.name, which), chunk))


def sum_of(name: str, which: str) -> str:
    """The name, in the store, of the running gradient of an attention's q, k or v."""
    return f"{name}.d{which}"
