"""Whole tensors from the tokens that ranks hold, and randomness that all ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import sympy
import torch
from torch import Tensor

from ..errors import RankMismatch
from ..graph import TokenAxis
from .chunks import cut, empty_whole, join_axis, parts, paste

if TYPE_CHECKING:
    from .step import Step


def join_own(step: Step, name: str, pieces: dict[int, Tensor]) -> Tensor:
    """This rank's tokens of a value laid one after the other, from its chunks."""
    axis = step.program.axes[name]
    layout, rank = step.layouts[axis.symbol], step.ranks.rank
    if not pieces:
        return step.empty(name, 0)
    piece = next(iter(pieces.values()))
    own = empty_whole(piece, axis, step.symbols, layout.num_tokens(rank))
    for chunk, (start, _) in enumerate(layout.local(rank)):
        if chunk in pieces:
            paste(own, pieces[chunk], axis, step.symbols, start)
    return own


def gather_tokens(step: Step, label: str, own: Tensor, axis: TokenAxis) -> Tensor:
    """The whole tensor, from every rank's ``own`` tokens of it (see :func:`join_own`)."""
    if not step.parallel:
        return own
    layout, ranks = step.layouts[axis.symbol], step.ranks
    outer, inner = parts(axis, step.symbols)
    shape = list(own.shape)
    shape[axis.dim] = outer * inner
    per_token = torch.Size(shape).numel()
    counts = [layout.num_tokens(r) for r in range(ranks.size)]
    dtype = own.dtype
    flat = own.contiguous().reshape(-1)
    if dtype is torch.bool:
        flat = flat.view(torch.uint8)
    found = ranks.gather(label, flat, [n * per_token for n in counts])
    whole = empty_whole(own, axis, step.symbols, layout.length)
    for r, values in enumerate(found):
        if counts[r] == 0:
            continue
        shape[axis.dim] = outer * counts[r] * inner
        theirs = values.view(dtype).view(shape)
        for (start, _), (a, b) in zip(layout.own(r), layout.local(r), strict=True):
            if b > a:
                piece = cut(theirs, axis, step.symbols, a, b)
                paste(whole, join_axis(piece, axis), axis, step.symbols, start)
    return whole


def gather_inputs(step: Step) -> frozenset[str]:
    """With sharded inputs: replace inputs that vectors and masks are made of by whole ones; the
    names of those that stay each rank's own. Sizes become the whole sequence's.

    Raises RankMismatch for a wrong number of tokens."""
    program, local = step.program, set()
    for symbol, layout in step.layouts.items():
        check_length(
            step, symbol, [layout.num_tokens(r) for r in range(step.ranks.size)]
        )
    for name in program.input_names:
        axis, value = program.axes.get(name), step.inputs[name]
        if axis is None or not isinstance(value, Tensor):
            continue
        if name in program.vector_inputs:
            step.inputs[name] = gather_tokens(step, f"gathering {name}", value, axis)
        else:
            local.add(name)
    for name, size in program.size_inputs.items():
        step.inputs[name] = int(size.subs(step.symbols))
    return frozenset(local)


def check_length(step: Step, symbol: sympy.Symbol, allowed: Sequence[int]) -> None:
    """Every rank passes the tokens that the layout gives it."""
    given = step.outside_symbols[symbol]
    rank = step.ranks.rank
    numbers = torch.tensor([given], dtype=torch.int64, device=step.ranks.device)
    found = step.ranks.gather("comparing lengths", numbers, [1] * step.ranks.size)
    lengths = [int(x) for x in found]
    if lengths != list(allowed):
        raise RankMismatch(
            f"ranks passed {lengths} tokens of a sequence of {sum(lengths)}, but with this "
            f"chunk_len they hold {list(allowed)} (this is rank {rank}); cut the "
            "batch with fpdt_compile.shard_tokens and the same chunk_len"
        )


@contextlib.contextmanager
def same_randomness(step: Step, draws: bool = True) -> Iterator[None]:
    """Random numbers drawn inside are those of rank 0's generator, on every rank."""
    if not (draws and step.parallel):
        yield
        return
    device = step.device
    backend = step.ranks.device
    state = torch.get_rng_state().to(backend)
    torch.set_rng_state(step.ranks.first("sharing the random state", state).cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(backend)
        state = step.ranks.first("sharing the random state", state).cpu()
        torch.cuda.set_rng_state(state, device)
    yield
