"""The attention operators ``fpdt::attend`` and ``fpdt::attend_backward``.

``attend(q, k, v, out, lse, *, scale, ...) -> (out, lse)`` merges one tile into a running online
softmax: q [B, H, q, D], k [B, G, k, D], v [B, G, k, Dv], G divides H; out [B, H, q, Dv] and lse
[B, H, q] (natural log) are in the accumulator type (fp32, float64 for float64), or None before the
first tile. A row that has seen no key has lse = -inf and out = 0.

``attend_backward(grad, q, k, v, out, lse, delta, dq, dk, dv, *, ...)`` adds this tile's part of the
gradients into dq, dk, dv (accumulator type), from the row's GLOBAL out and lse. delta [B, H, q] is
rowsum(grad * out), or None: computed. A row without any key anywhere may come with lse = -inf or 0.

The options are those of :class:`~fpdt_compile.kernels.tile_options.TileOptions`; ``kernel`` names
the implementation to ask first. Which one computes is decided by ``implementations.choose``.
Neither operator is differentiated by autograd: who calls them holds the global logsumexp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .implementations import choose
from .online_softmax import accumulator_dtype
from .tile_options import TileOptions

OPTIONS = (
    "float scale, bool causal=False, SymInt offset=0, SymInt? window=None, "
    "Tensor? q_docs=None, Tensor? k_docs=None, Tensor? key_bound=None, "
    "float softcap=0.0, Tensor? alibi=None, Tensor? bias=None, "
    'str program="", Tensor[]? leaves=None, str kernel=""'
)
torch.library.define(
    "fpdt::attend",
    f"(Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? lse, *, {OPTIONS})"
    " -> (Tensor, Tensor)",
)
torch.library.define(
    "fpdt::attend_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor? delta, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, *, {OPTIONS}) -> ()",
)


def options_of(leaves: list[Tensor] | None, given: dict[str, Any]) -> TileOptions:
    return TileOptions(leaves=list(leaves or ()), **given)


@torch.library.impl("fpdt::attend", "CompositeExplicitAutograd")
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    *,
    kernel: str = "",
    leaves: list[Tensor] | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    options = options_of(leaves, given)
    check(q, k, v)
    one, _ = choose(q, k, v, options, kernel)
    return one.forward(q, k, v, out, lse, options)


@torch.library.impl("fpdt::attend_backward", "CompositeExplicitAutograd")
def attend_backward(
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
    *,
    kernel: str = "",
    leaves: list[Tensor] | None = None,
    **given: Any,
) -> None:
    options = options_of(leaves, given)
    check(q, k, v)
    one, _ = choose(q, k, v, options, kernel)
    one.backward(grad, q, k, v, out, lse, delta, dq, dk, dv, options)


@torch.library.register_fake("fpdt::attend")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    check(q, k, v)
    work = accumulator_dtype(q.dtype)
    shape = (*q.shape[:3], v.shape[-1])
    return q.new_empty(shape, dtype=work), q.new_empty(shape[:3], dtype=work)


@torch.library.register_fake("fpdt::attend_backward")
def _(*args: Any, **options: Any) -> None:
    check(*args[1:4])


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError for shapes that are no attention."""
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(
            f"fpdt::attend takes q [B, H, q, D], k [B, G, k, D], v [B, G, k, Dv], "
            f"not {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    same = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not same or k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"fpdt::attend: q {tuple(q.shape)}, k {tuple(k.shape)} and v "
            f"{tuple(v.shape)} do not fit: one batch size, D of q and k equal, "
            f"keys as many as values, and G a divisor of H"
        )


ATTEND = torch.ops.fpdt.attend.default
ATTEND_BACKWARD = torch.ops.fpdt.attend_backward.default
