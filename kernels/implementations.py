"""Which code computes an attention tile: the ones there are, and which of them takes what.

Each implementation has the same contract as ``fpdt::attend`` and ``fpdt::attend_backward`` (see
``ops``) and a ``refuses``: why it does not take a tile, or None. On a device the first that takes a
tile computes it:

    CPU     aten_cpu (aten's flash kernel), reference
    CUDA    aten_cuda (aten's flash kernel; FlashAttention 3 where the user activated it with
            ``torch.nn.attention.activate_flash_attention_impl``), triton, reference
    others  reference

An attention kernel of the user's choice is asked first, then this order. The Triton one runs on the
CPU too where TRITON_INTERPRET=1 is set, if asked for by name. Its module is imported when it is
first asked, so that nothing here needs Triton.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..errors import CantChunk, Rejection
from . import aten_flash, scored_tiles
from .online_softmax import merge_into
from .tile_options import TileOptions

Refuses = Callable[[Tensor, Tensor, Tensor, TileOptions], "str | None"]


@dataclass(frozen=True, slots=True)
class Implementation:
    """``forward`` gives (out, lse) merged with those given; ``backward`` adds into dq, dk, dv."""

    name: str
    refuses: Refuses
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., None]


def reference_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    options: TileOptions,
) -> tuple[Tensor, Tensor]:
    tile = scored_tiles.forward_scored(q, k, v, options.logits, None, 0.0)
    return merge_into(*tile, out, lse)


def reference_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: TileOptions,
) -> None:
    parts = scored_tiles.backward_scored(
        grad, q, k, v, out, lse, options.logits, None, 0.0, []
    )
    for total, part in zip((dq, dk, dv), parts, strict=False):
        total.add_(part)


def reference_refuses(
    q: Tensor, k: Tensor, v: Tensor, options: TileOptions
) -> str | None:
    kinds = {x.dtype for x in (q, k, v)}
    if len(kinds) > 1 or not q.is_floating_point():
        return f"takes one floating-point dtype, not {', '.join(map(str, kinds))}"
    return None


REFERENCE = Implementation(
    "reference", reference_refuses, reference_forward, reference_backward
)
ATEN_CPU = Implementation(
    "aten_cpu", aten_flash.refuses_cpu, aten_flash.forward_cpu, aten_flash.backward_cpu
)
ATEN_CUDA = Implementation(
    "aten_cuda",
    aten_flash.refuses_cuda,
    aten_flash.forward_cuda,
    aten_flash.backward_cuda,
)
NAMES = ("aten_cpu", "aten_cuda", "triton", "reference")


@functools.cache
def triton_implementation() -> Implementation | None:
    """The Triton kernels; None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    module = importlib.import_module("fpdt_compile.kernels.triton_attention")
    return Implementation("triton", module.refuses, module.forward, module.backward)


def candidates(device_type: str, asked: str = "") -> list[Implementation]:
    """In the order they are asked. Raises ValueError for a name that is none of ``NAMES``."""
    if asked and asked not in NAMES:
        raise ValueError(
            f"no attention kernel {asked!r}: use one of {', '.join(NAMES)}"
        )
    found: list[Implementation | None] = []
    if device_type == "cuda":
        found = [ATEN_CUDA, triton_implementation()]
    elif device_type == "cpu":
        found = [ATEN_CPU]
        if asked == "triton":
            found.append(triton_implementation())
    order = [x for x in (*found, REFERENCE) if x is not None]
    return sorted(order, key=lambda x: x.name != asked)


def choose(
    q: Tensor, k: Tensor, v: Tensor, options: TileOptions, asked: str = ""
) -> tuple[Implementation, list[str]]:
    """The first implementation that takes the tile, and why those before it do not.

    Raises CantChunk where none does, naming what is allowed.
    """
    reasons = []
    for one in candidates(q.device.type, asked):
        reason = one.refuses(q, k, v, options)
        if reason is None:
            return one, reasons
        reasons.append(f"{one.name}: {reason}")
    raise CantChunk(
        Rejection(
            op="fpdt::attend",
            source="unknown",
            reason="no attention kernel takes this tile: " + "; ".join(reasons),
            change="use a floating-point dtype",
        )
    )
