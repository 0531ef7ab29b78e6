"""Chunk bounds, and cutting chunks out of whole tensors along a token axis."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch import Tensor

from ..graph import TokenAxis

Bounds = tuple[tuple[int, int], ...]
Symbols = Mapping[sympy.Symbol, int]


def chunk_bounds(length: int, chunk_len: int) -> Bounds:
    """Cut ``length`` tokens into chunks of at most ``chunk_len``.

    A tail of one token takes a second one from its neighbour (compiled bodies are made for at least
    two rows), unless ``chunk_len`` is 1.
    """
    starts = list(range(0, length, chunk_len))
    ends = [*starts[1:], length]
    if len(starts) > 1 and ends[-1] - starts[-1] == 1 and chunk_len > 2:
        starts[-1] -= 1
        ends[-2] -= 1
    return tuple(zip(starts, ends))


def parts(axis: TokenAxis, symbols: Symbols) -> tuple[int, int]:
    """(outer, inner) of an axis as numbers."""
    return int(axis.outer.subs(symbols)), int(axis.inner.subs(symbols))


def split_axis(whole: Tensor, axis: TokenAxis, symbols: Symbols) -> tuple[Tensor, int]:
    """A view with the tokens alone in one dimension, and that dimension."""
    if axis.plain:
        return whole, axis.dim
    outer, inner = parts(axis, symbols)
    length = whole.shape[axis.dim] // (outer * inner)
    return whole.unflatten(axis.dim, (outer, length, inner)), axis.dim + 1


def join_axis(split: Tensor, axis: TokenAxis) -> Tensor:
    """Undo :func:`split_axis`."""
    return split if axis.plain else split.flatten(axis.dim, axis.dim + 2)


def cut(
    whole: Tensor, axis: TokenAxis, symbols: Symbols, start: int, end: int
) -> Tensor:
    """Tokens ``start:end`` of ``whole``, in split form (see split_axis); a view."""
    split, dim = split_axis(whole, axis, symbols)
    return split.narrow(dim, start, end - start)


def empty_whole(
    piece: Tensor, axis: TokenAxis, symbols: Symbols, length: int
) -> Tensor:
    """An uninitialized whole tensor for pieces like ``piece`` (in joined form)."""
    shape = list(piece.shape)
    outer, inner = parts(axis, symbols)
    shape[axis.dim] = outer * length * inner
    return piece.new_empty(shape)


def paste(
    whole: Tensor, piece: Tensor, axis: TokenAxis, symbols: Symbols, start: int
) -> None:
    """Write a piece (in joined form) into tokens ``start:`` of ``whole``."""
    source, dim = split_axis(piece, axis, symbols)
    target, _ = split_axis(whole, axis, symbols)
    target.narrow(dim, start, source.shape[dim]).copy_(source)


def arrange(value: Tensor, dim_order: tuple[int, ...] | None) -> Tensor:
    """``value`` with its memory in ``dim_order`` (outermost first), copied only if it is not."""
    if dim_order is None:
        return value
    ordered = value.permute(dim_order)
    if ordered.is_contiguous():
        return value
    back = [dim_order.index(d) for d in range(len(dim_order))]
    return ordered.contiguous().permute(back)


def same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def scalar_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type partial totals are summed in."""
    return torch.float64 if dtype.is_floating_point else dtype
