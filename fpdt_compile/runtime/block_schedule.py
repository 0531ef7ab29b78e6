"""A block's whole schedule: what computes, what is exchanged, and the copies between tiers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..graph import TileTable
from .block_shape import BlockShape
from .copies import Placement, place_copies
from .instructions import Instruction
from .parallel_schedule import backward_parallel, forward_parallel
from .schedule import backward_schedule, forward_schedule


@lru_cache(maxsize=8)  # few, because a long sequence's list is long
def block_schedule(
    shape: BlockShape,
    counts: tuple[int, ...],
    tables: tuple[TileTable, ...],
    placement: Placement,
    overlap: bool | None,
    **choices: Any,
) -> tuple[Instruction, ...]:
    """The instructions of a block's forward (``train``) or backward (``keep``, ``order``), with
    exchanges where ``overlap`` is not None."""
    if overlap is not None:
        choices["overlap"] = overlap
    make = {
        (False, False): backward_schedule,
        (False, True): backward_parallel,
        (True, False): forward_schedule,
        (True, True): forward_parallel,
    }["train" in choices, overlap is not None]
    return place_copies(
        make(shape, counts, tables, **choices),
        shape,
        counts,
        placement,
        parallel=overlap is not None,
        saved=choices["save"] != "hidden",
    )
