"""Aten's flash attention kernels on a tile: CPU and CUDA.

Shapes: q [B, H, q, D], k [B, G, k, D], v [B, G, k, D], G divides H; out [B, H, q, D] and lse
[B, H, q] (natural log) in the accumulator type. Contract: that of ``fpdt::attend`` (see ``ops``).
They take a scale, the causal flag on equal ranges and, on the CPU, a bias.

Both kernels give the GLOBAL gradient's part of a tile when handed the global out and lse. The CPU
one returns out = 0 and lse = 0 for a row whose bias hides every key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .online_softmax import merge_into
from .tile_options import TileOptions

aten = torch.ops.aten
CPU_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CUDA_DTYPES = (torch.bfloat16, torch.float16)
MAX_CUDA_HEAD = 256


def refuses_more_than(options: TileOptions, taken: tuple[str, ...]) -> str | None:
    extra = [word for word in options.given() if word not in taken]
    if extra:
        return f"takes no {' or '.join(extra)}"
    return None


def refuses_cpu(q: Tensor, k: Tensor, v: Tensor, options: TileOptions) -> str | None:
    if q.device.type != "cpu" or q.dtype not in CPU_DTYPES:
        return f"takes {', '.join(map(str, CPU_DTYPES))} on the CPU, not {q.dtype}"
    if q.shape[-1] != v.shape[-1]:
        return f"takes one head size, not {q.shape[-1]} and {v.shape[-1]}"
    if min(q.numel(), k.numel()) == 0:
        return "takes no empty tensors"
    return refuses_more_than(options, ("causal", "bias"))


def forward_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    options: TileOptions,
) -> tuple[Tensor, Tensor]:
    bias = options.bias
    tile_out, tile_lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, options.causal, attn_mask=bias, scale=options.scale
    )
    if bias is not None:
        dead = tile_lse == 0
        if bool(dead.any()):  # a row may also have this logsumexp of its own
            dead = dead & (bias == -torch.inf).all(-1)
            tile_lse = tile_lse.masked_fill(dead, -torch.inf)
    return merge_into(tile_out, tile_lse, out, lse)


def backward_cpu(
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
    parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        0.0,
        options.causal,
        attn_mask=options.bias,
        scale=options.scale,
    )
    for total, part in zip((dq, dk, dv), parts, strict=True):
        total.add_(part)


def refuses_cuda(q: Tensor, k: Tensor, v: Tensor, options: TileOptions) -> str | None:
    if q.device.type != "cuda" or q.dtype not in CUDA_DTYPES:
        return f"takes {', '.join(map(str, CUDA_DTYPES))} on CUDA, not {q.dtype}"
    size = q.shape[-1]
    if size != v.shape[-1] or size % 8 or size > MAX_CUDA_HEAD:
        return (
            f"takes one head size, a multiple of 8 up to {MAX_CUDA_HEAD}, "
            f"not {size} and {v.shape[-1]}"
        )
    if min(q.numel(), k.numel()) == 0:
        return "takes no empty tensors"
    if options.causal and q.shape[2] != k.shape[2]:
        return "takes the causal flag on equal ranges only"
    return refuses_more_than(options, ("causal",))


def forward_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    options: TileOptions,
) -> tuple[Tensor, Tensor]:
    tile_out, tile_lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, options.causal, False, scale=options.scale
    )
    return merge_into(tile_out, tile_lse, out, lse)


def backward_cuda(
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
    # Without dropout the random state is not read, but the operator wants its two tensors.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    parts = aten._scaled_dot_product_flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        options.causal,
        state,
        state,
        scale=options.scale,
    )
    for total, part in zip((dq, dk, dv), parts, strict=True):
        total.add_(part)
