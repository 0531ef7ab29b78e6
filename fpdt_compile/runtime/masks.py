"""Tiles of an attention mask, and which tiles need no mask or no work at all.

In: a :class:`MaskGraph` and the whole values of its leaves. Out: the mask's exact values on a
(query range, key range) tile, and a :class:`TileTable` over chunk bounds.

Contract: no tensor of all (query, key) pairs is made. EMPTY and FULL are proved, by interval
arithmetic (``mask_intervals``) or by looking at every pair of the tile; what is not proved is
PARTIAL, which is always right. In an additive mask whose masked value is finite, a row with
no visible key attends to the mean of all values, so a tile of hugely negative biases is
EMPTY only if each of its rows has a key elsewhere that is not.

Table, in four steps: bounds of the mask on all tiles at once; tiles left PARTIAL again in
pieces that end where a leaf jumps (document starts); PARTIAL tiles of equal ranges looked at
in pieces of at most 256 x 256, those that no bound decides pair by pair, for CAUSAL; rows of
finite EMPTY tiles.

Limits: ranges are non-empty; leaves are small enough to lie on the CPU too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from ..graph import MaskGraph, TileKind, TileTable
from .intervals import Interval, Range, leaf_bounds, to_numpy
from .mask_intervals import Grid, interval_of
from .tile_graphs import number_of, run_tile, slice_leaf, spread

DENSE_ROWS = 256  # pairs are looked at in tiles of at most this many rows
DENSE_KEYS = 2048  # and this many keys, where only rows are counted
SEEN = (
    -1e3
)  # a row with a bias above this needs no shift: its logsumexp keeps its digits
MAX_ENTRIES = 2**20  # bounds computed at once
MAX_PIECES = 256  # a chunk with more jumps than this is not cut at them

# Codes of tiles while a table is made.
PARTIAL, EMPTY, FULL, CAUSAL, EMPTY_IF_ROWS = range(5)
KINDS = {
    PARTIAL: TileKind.PARTIAL,
    EMPTY: TileKind.EMPTY,
    FULL: TileKind.FULL,
    CAUSAL: TileKind.CAUSAL,
}


class MaskEvaluator:
    """One mask with its leaves' values.

    ``leaf_values[leaf.name]`` is the whole tensor; ``symbols`` gives the lengths that enter
    the mask's arithmetic. Raises ValueError for a missing leaf or symbol or a wrong size.
    """

    def __init__(
        self,
        mask: MaskGraph,
        leaf_values: Mapping[str, Tensor],
        num_queries: int,
        num_keys: int,
        symbols: Mapping[sympy.Symbol, int],
    ) -> None:
        self.mask = mask
        self.leaves = mask.leaves
        self.num_queries = num_queries
        self.num_keys = num_keys
        self.shifts: dict[Range, Tensor | None] = {}
        self.values: list[Tensor] = []
        for leaf in mask.leaves:
            if leaf.name not in leaf_values:
                raise ValueError(f"leaf_values has no {leaf.name!r}: give every leaf")
            value = leaf_values[leaf.name].detach()
            for axis, size in ((leaf.q_axis, num_queries), (leaf.k_axis, num_keys)):
                if axis is not None and value.shape[axis.dim] != size:
                    raise ValueError(
                        f"leaf {leaf.name!r} has shape {tuple(value.shape)}; "
                        f"dimension {axis.dim} must be {size}"
                    )
            self.values.append(value)
        self.nodes = list(mask.module.graph.nodes)
        self.numbers = {
            node.name: number_of(getattr(mask.module, node.target), symbols)
            for node in self.nodes
            if node.op == "get_attr"
        }
        self.dtype: torch.dtype = self.nodes[-1].args[0].meta["val"].dtype
        if not mask.is_bool:
            half = self.dtype in (torch.float16, torch.bfloat16)
            least = torch.finfo(self.dtype if half else torch.float32).min
            self.huge = least / 2  # biases up to here hide a key
            self.seen = least / 4  # biases above show one, even next to those

    @torch.no_grad()
    def tile(self, q_range: Range, k_range: Range) -> Tensor:
        """The mask on a tile: bool or additive, ``[..., q, k]``, broadcastable to [B,H,q,k].

        Dimensions may be expanded (stride 0): copy before writing.
        """
        self.check_ranges([q_range], [k_range])
        parts = [
            slice_leaf(leaf, value, q_range, k_range)
            for leaf, value in zip(self.mask.leaves, self.values, strict=True)
        ]
        value = run_tile(self.nodes, iter(parts), self.numbers, q_range, k_range)
        return spread(value, q_range[1] - q_range[0], k_range[1] - k_range[0])

    @torch.no_grad()
    def bias(self, q_range: Range, k_range: Range, dtype: torch.dtype) -> Tensor:
        """The tile in additive form: False becomes -inf; finite biases stay finite in a narrower
        ``dtype``."""
        value = self.tile(q_range, k_range)
        if self.mask.is_bool:
            zero = torch.zeros((), dtype=dtype, device=value.device)
            return torch.where(value, zero, zero - torch.inf)
        bias = value.to(dtype)
        limits = torch.finfo(dtype)
        if limits.max < torch.finfo(value.dtype).max:
            clamped = bias.clamp(limits.min, limits.max)
            bias = torch.where(value.isinf(), bias, clamped)
        return bias

    @torch.no_grad()
    def table(self, q_bounds: Sequence[Range], k_bounds: Sequence[Range]) -> TileTable:
        """The kind of every (query chunk, key chunk) tile."""
        self.check_ranges(q_bounds, k_bounds)
        codes = self.codes(q_bounds, k_bounds)
        self.refine(codes, q_bounds, k_bounds)
        columns = {bounds: j for j, bounds in enumerate(k_bounds)}
        for i, bounds in enumerate(q_bounds):
            j = columns.get(tuple(bounds))
            if j is not None and codes[i, j] == PARTIAL:
                codes[i, j] = self.examine(*bounds)
        for i, bounds in enumerate(q_bounds):
            waiting = codes[i] == EMPTY_IF_ROWS
            if waiting.any():
                seen = self.rows_see_a_key(bounds, codes[i], k_bounds)
                codes[i][waiting] = EMPTY if seen else PARTIAL
        return TileTable(
            kinds=tuple(tuple(KINDS[code] for code in row) for row in codes.tolist())
        )

    def check_ranges(self, q: Sequence[Range], k: Sequence[Range]) -> None:
        for name, ranges, size in (
            ("query", q, self.num_queries),
            ("key", k, self.num_keys),
        ):
            for start, stop in ranges:
                if not 0 <= start < stop <= size:
                    raise ValueError(
                        f"{name} range {(start, stop)} must be within (0, {size})"
                    )

    def codes(self, q_bounds: Sequence[Range], k_bounds: Sequence[Range]) -> np.ndarray:
        """What the bounds prove of each tile: [num_q, num_k] codes."""
        value = self.bounds(q_bounds, k_bounds)
        lo, hi = (
            spread(x, len(q_bounds), len(k_bounds)).reshape(
                -1, len(q_bounds), len(k_bounds)
            )
            for x in (value.lo, value.hi)
        )
        codes = torch.full(lo.shape[1:], PARTIAL, dtype=torch.int64)
        if self.mask.is_bool:
            codes[~hi.any(0)] = EMPTY if self.mask.fill is None else EMPTY_IF_ROWS
            codes[lo.all(0)] = FULL
        elif not value.may_nan:
            codes[(hi <= self.huge).all(0)] = EMPTY_IF_ROWS
            codes[(hi == -torch.inf).all(0)] = EMPTY
            codes[((lo == 0) & (hi == 0)).all(0)] = FULL
        return codes.numpy()

    def bounds(self, q_bounds: Sequence[Range], k_bounds: Sequence[Range]) -> Interval:
        """Interval arithmetic over the graph; the mask's bounds on every tile."""
        merge = self.num_batches() * len(q_bounds) * len(k_bounds) > MAX_ENTRIES
        grid = Grid.of(q_bounds, k_bounds)
        env: dict[Any, Any] = {}
        values = iter(zip(self.mask.leaves, self.values, strict=True))
        for node in self.nodes:
            if node.op == "placeholder":
                leaf, value = next(values)
                env[node] = leaf_bounds(leaf, value, q_bounds, k_bounds, merge)
            elif node.op == "get_attr":
                env[node] = self.numbers[node.name]
            elif node.op == "output":
                return env[node.args[0]]
            else:
                args = torch.fx.map_arg(node.args, env.__getitem__)
                kwargs = torch.fx.map_arg(node.kwargs, env.__getitem__)
                env[node] = interval_of(node, grid, args, kwargs)
        raise AssertionError("a mask graph has an output")

    def num_batches(self) -> int:
        """Elements of a tensor that has all the leaves' dims but the token axes."""
        sizes: dict[int, int] = {}
        for leaf, value in zip(self.mask.leaves, self.values, strict=True):
            token_dims = {x.dim for x in (leaf.q_axis, leaf.k_axis) if x is not None}
            for dim, size in enumerate(value.shape):
                if dim not in token_dims:
                    place = value.dim() - dim
                    sizes[place] = max(sizes.get(place, 1), size)
        return math.prod(sizes.values())

    def refine(
        self, codes: np.ndarray, q_bounds: Sequence[Range], k_bounds: Sequence[Range]
    ) -> None:
        """Decide PARTIAL tiles by pieces on which every leaf is linear; changes codes."""
        if not (codes == PARTIAL).any():
            return
        if any(leaf.q_axis and leaf.k_axis for leaf in self.mask.leaves):
            return
        q_pieces = cut_at(q_bounds, self.jumps(along_queries=True))
        k_pieces = cut_at(k_bounds, self.jumps(along_queries=False))
        for i, rows in enumerate(q_pieces):
            todo = [
                int(j)
                for j in np.flatnonzero(codes[i] == PARTIAL)
                if len(rows) > 1 or len(k_pieces[j]) > 1
            ]
            while todo:
                group, columns = [], []
                while todo and len(rows) * len(columns) < MAX_ENTRIES:
                    group.append(todo.pop())
                    columns += k_pieces[group[-1]]
                pieces = self.codes(rows, columns)
                start = 0
                for j in group:
                    stop = start + len(k_pieces[j])
                    codes[i, j] = merge_codes(pieces[:, start:stop])
                    start = stop

    def jumps(self, *, along_queries: bool) -> np.ndarray:
        """Where some leaf along the queries (keys) stops being linear."""
        size = self.num_queries if along_queries else self.num_keys
        found = np.zeros(size + 1, dtype=bool)
        for leaf, value in zip(self.mask.leaves, self.values, strict=True):
            axis = leaf.q_axis if along_queries else leaf.k_axis
            if axis is None:
                continue
            x = to_numpy(value.movedim(axis.dim, -1).reshape(-1, size))
            with np.errstate(invalid="ignore"):
                steps = x[:, 1:] - x[:, :-1]
            change = (steps[:, 1:] != steps[:, :-1]).any(0)
            # A jump changes the step twice: before it and after it. Cut once.
            change[1:] &= ~change[:-1].copy()
            found[2:size] |= change
        return np.flatnonzero(found)

    def examine(self, start: int, stop: int) -> int:
        """The code of the tile of equal ranges [start, stop), pair by pair where needed."""
        pieces = cut_every(start, stop, DENSE_ROWS)
        codes = self.codes(pieces, pieces)
        empty = (codes == EMPTY) | (codes == EMPTY_IF_ROWS)
        full = codes == FULL
        finite = bool((codes == EMPTY_IF_ROWS).any())
        may_be = {
            FULL: not empty.any(),
            EMPTY: not full.any(),
            CAUSAL: not np.tril(empty).any() and not np.triu(full, 1).any(),
        }
        unproved = np.argwhere(codes == PARTIAL)
        # A piece on the diagonal that is all visible is a causal one only if 1 x 1.
        for i in np.flatnonzero(np.diagonal(full)):
            may_be[CAUSAL] &= pieces[i][1] - pieces[i][0] == 1
        distance = np.abs(unproved[:, 0] - unproved[:, 1])
        for i, j in unproved[np.argsort(distance, kind="stable")]:
            if not any(may_be.values()):
                return PARTIAL
            value = self.tile(pieces[i], pieces[j])
            visible, hidden = self.visible_hidden(value)
            if self.mask.fill is not None:
                finite |= bool(hidden.any())
            elif not self.mask.is_bool:
                finite |= bool((hidden & (value != -torch.inf)).any())
            all_visible, all_hidden = bool(visible.all()), bool(hidden.all())
            may_be[FULL] &= all_visible
            may_be[EMPTY] &= all_hidden
            if i == j:
                want = torch.ones(
                    value.shape[-2:], dtype=torch.bool, device=value.device
                ).tril()
                causal = torch.where(want, visible, hidden).all()
                may_be[CAUSAL] &= bool(causal)
            else:
                may_be[CAUSAL] &= all_visible if i > j else all_hidden
        if may_be[EMPTY]:
            return EMPTY_IF_ROWS if finite else EMPTY
        return next((code for code in (FULL, CAUSAL) if may_be[code]), PARTIAL)

    @torch.no_grad()
    def row_shift(self, q_range: Range) -> Tensor | None:
        """What every key of a row is hidden by, ``[..., q, 1]``, for rows without a visible key.

        A softmax does not see a constant of a row, but a large one swallows the logarithm of the
        number of keys in a tile's logsumexp. 0 for rows that see a key (or none at all, by -inf);
        None where that is all rows.
        """
        if self.mask.is_bool and self.mask.fill is None:
            return None
        q_range = tuple(q_range)
        if q_range not in self.shifts:
            parts = [self.shift_of(rows) for rows in cut_every(*q_range, DENSE_ROWS)]
            found = any(bool(part.any()) for part in parts)
            self.shifts[q_range] = join_rows(parts).unsqueeze(-1) if found else None
        return self.shifts[q_range]

    def shift_of(self, rows: Range) -> Tensor:
        """:meth:`row_shift` of a few rows, ``[..., q]``; nearby keys are looked at first."""
        keys = cut_every(0, self.num_keys, DENSE_KEYS)
        largest: Tensor | None = None
        for columns in sorted(keys, key=lambda x: abs(x[0] - rows[0])):
            value = self.tile(rows, columns)
            if self.mask.is_bool:
                hidden = torch.tensor(float(self.mask.fill), dtype=torch.float64)
                value = torch.where(value, 0.0, hidden.to(value.device))
            most = value.amax(-1)
            largest = most if largest is None else torch.maximum(largest, most)
            if bool((largest > SEEN).all()):
                break
        shifted = (largest <= SEEN) & (largest > -torch.inf)
        return torch.where(shifted, largest, torch.zeros_like(largest))

    def visible_hidden(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs that count unchanged, and pairs that do not count."""
        if self.mask.is_bool:
            return value, ~value
        return value == 0, value <= self.huge

    def rows_see_a_key(
        self, bounds: Range, codes: np.ndarray, k_bounds: Sequence[Range]
    ) -> bool:
        """Whether every row of a query chunk has a bias that is not hugely negative."""
        if ((codes == FULL) | (codes == CAUSAL)).any():
            return True
        partial = [k_bounds[j] for j in np.flatnonzero(codes == PARTIAL)]
        keys = [piece for x in partial for piece in cut_every(*x, DENSE_KEYS)]
        for rows in cut_every(*bounds, DENSE_ROWS):
            seen: Tensor | None = None
            for columns in sorted(keys, key=lambda x: abs(x[0] - rows[0])):
                value = self.tile(rows, columns)
                found = (value if self.mask.is_bool else value > self.seen).any(-1)
                seen = found if seen is None else seen | found
                if bool(seen.all()):
                    break
            if seen is None or not bool(seen.all()):
                return False
        return True


def join_rows(parts: list[Tensor]) -> Tensor:
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], -1)


def cut_every(start: int, stop: int, size: int) -> list[Range]:
    return [(x, min(x + size, stop)) for x in range(start, stop, size)]


def cut_at(bounds: Sequence[Range], jumps: np.ndarray) -> list[list[Range]]:
    """Each range cut at the jumps inside it, or left whole where they are too many."""
    pieces = []
    for start, stop in bounds:
        inside = jumps[(jumps > start) & (jumps < stop)].tolist()
        if len(inside) >= MAX_PIECES:
            inside = []
        edges = [start, *inside, stop]
        pieces.append(list(zip(edges[:-1], edges[1:], strict=True)))
    return pieces


def merge_codes(codes: np.ndarray) -> int:
    """The code of a tile from those of its pieces."""
    if (codes == FULL).all():
        return FULL
    if (codes == EMPTY).all():
        return EMPTY
    if ((codes == EMPTY) | (codes == EMPTY_IF_ROWS)).all():
        return EMPTY_IF_ROWS
    return PARTIAL
