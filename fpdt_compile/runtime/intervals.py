"""Intervals: two tensors that bound every element of a third, chunk by chunk.

In: a tensor and ranges along its token axes. Out: an :class:`Interval` whose bounds have the
tensor's shape, with one entry per range where it has a token axis.

Contract: every element lies in ``[lo, hi]`` (False < True), or is NaN and ``may_nan`` is set.
Bounds of a leaf are its exact extremes.

Limits: real dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..graph import MaskLeaf

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Interval:
    lo: Tensor
    hi: Tensor
    may_nan: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.lo.dtype

    def map(self, fn: Callable[[Tensor], Tensor]) -> Interval:
        """A non-decreasing function, or a view."""
        return Interval(fn(self.lo), fn(self.hi), self.may_nan)

    @staticmethod
    def of(value: Any, dtype: torch.dtype | None = None) -> Interval:
        """The interval of one number (or of an Interval: itself, cast)."""
        if isinstance(value, Interval):
            return value if dtype is None else cast(value, dtype)
        point = torch.tensor(value, dtype=dtype)
        return Interval(point, point, bool(torch.isnan(point)))


def extremes(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype is torch.bool:
        return False, True
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def widen(value: Interval, where: Tensor) -> Interval:
    """Unknown bounds at ``where``."""
    if not bool(where.any()):
        return value
    lo, hi = extremes(value.dtype)
    return Interval(
        torch.where(where, torch.tensor(lo, dtype=value.dtype), value.lo),
        torch.where(where, torch.tensor(hi, dtype=value.dtype), value.hi),
        value.may_nan or value.dtype.is_floating_point,
    )


def no_nan_bounds(value: Interval) -> Interval:
    if not value.dtype.is_floating_point:
        return value
    return widen(value, value.lo.isnan() | value.hi.isnan())


def hull(bounds: Sequence[Tensor], may_nan: bool) -> Interval:
    lo = hi = bounds[0]
    for bound in bounds[1:]:
        lo, hi = torch.minimum(lo, bound), torch.maximum(hi, bound)
    return Interval(lo, hi, may_nan)


def cast(x: Interval, dtype: torch.dtype) -> Interval:
    """Casts are monotone except to bool, and where the value does not fit."""
    if dtype == x.dtype:
        return x
    if dtype is torch.bool:
        lo, hi = (x.lo > 0) | (x.hi < 0), (x.lo != 0) | (x.hi != 0)
        return Interval(lo, hi | x.may_nan)
    if x.dtype is torch.bool or dtype.is_floating_point:
        return x.map(lambda bound: bound.to(dtype))
    lo, hi = x.lo.double(), x.hi.double()
    info = torch.iinfo(dtype)
    fits = (lo >= max(info.min, -(2.0**62))) & (hi <= min(info.max, 2.0**62))
    if x.may_nan:
        fits = fits & False
    safe = Interval(
        torch.where(fits, x.lo, torch.zeros((), dtype=x.dtype)).to(dtype),
        torch.where(fits, x.hi, torch.zeros((), dtype=x.dtype)).to(dtype),
    )
    return widen(safe, ~fits)


def leaf_bounds(
    leaf: MaskLeaf,
    value: Tensor,
    q_bounds: Sequence[Range],
    k_bounds: Sequence[Range],
    merge: bool,
) -> Interval:
    """Extremes of a leaf per chunk; over its other dims too with ``merge``."""
    lo = hi = value
    axes = [(leaf.q_axis, q_bounds), (leaf.k_axis, k_bounds)]
    dims = [(axis.dim, bounds) for axis, bounds in axes if axis is not None]
    if len(dims) == 2:
        lo, hi = block_extremes(value, *dims[0])
        dims = dims[1:]
    for dim, bounds in dims:
        lo, hi = chunk_extremes(lo, hi, dim, bounds)
    lo, hi = lo.cpu(), hi.cpu()
    token_dims = {axis.dim for axis, _ in axes if axis is not None}
    others = [d for d in range(value.dim()) if d not in token_dims]
    if merge and others:
        lo, hi = lo.amin(others, keepdim=True), hi.amax(others, keepdim=True)
    return no_nan_bounds(Interval(lo, hi))


def block_extremes(
    value: Tensor, dim: int, bounds: Sequence[Range]
) -> tuple[Tensor, Tensor]:
    """Extremes along one axis of a large tensor, where it is."""
    parts = [value.narrow(dim, start, stop - start) for start, stop in bounds]
    lo = torch.cat([part.amin(dim, keepdim=True) for part in parts], dim)
    hi = torch.cat([part.amax(dim, keepdim=True) for part in parts], dim)
    return lo, hi


def chunk_extremes(
    lo: Tensor, hi: Tensor, dim: int, bounds: Sequence[Range]
) -> tuple[Tensor, Tensor]:
    """Smallest and largest value in each range along ``dim``, for all ranges at once."""
    start, stop = min(x[0] for x in bounds), max(x[1] for x in bounds)
    edges = np.array(bounds).reshape(-1) - start
    results = []
    for x, reduce in ((lo, np.minimum), (hi, np.maximum)):
        part = to_numpy(x.narrow(dim, start, stop - start).movedim(dim, -1))
        # reduceat takes [edge, next edge); every second one is a gap between ranges.
        # One more element makes the end a valid edge.
        part = np.concatenate([part, part[..., -1:]], axis=-1)
        found = torch.from_numpy(reduce.reduceat(part, edges, axis=-1)[..., ::2].copy())
        results.append(found.to(x.dtype).movedim(-1, dim))
    return results[0], results[1]


def to_numpy(value: Tensor) -> np.ndarray:
    """Exact values in a dtype that numpy has (bool as int8, half as float32)."""
    value = value.cpu()
    if value.dtype is torch.bool:
        value = value.to(torch.int8)
    elif value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    return value.numpy()
