"""Attention over tiles against dense math: merging, grouped heads, masks, extreme scores."""

from __future__ import annotations

import pytest
import torch
from fpdt_compile.kernels import scored_tiles
from fpdt_compile.kernels.online_softmax import accumulator_dtype, merge_into
from fpdt_compile.kernels.ops import ATTEND, ATTEND_BACKWARD
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """Plain attention in float64; rows without a key give 0."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def tiled(q, k, v, scale, hidden, key_bounds, kernel=""):
    """Forward and backward of all queries over key tiles; returns out and a gradient function."""
    work = accumulator_dtype(q.dtype)

    def options(a, b):
        bias = torch.zeros(hidden[:, a:b].shape, dtype=q.dtype)
        bias = bias.masked_fill(hidden[:, a:b], -torch.inf)[None, None]
        return {"scale": scale, "bias": bias, "kernel": kernel}

    out = lse = None
    for a, b in key_bounds:
        out, lse = ATTEND(q, k[:, :, a:b], v[:, :, a:b], out, lse, **options(a, b))
    assert (lse[:, :, hidden.all(-1)] == -torch.inf).all()
    final = lse.masked_fill(lse == -torch.inf, 0.0)

    def backward(grad):
        dq, dk, dv = (torch.zeros_like(x, dtype=work) for x in (q, k, v))
        for a, b in key_bounds:
            ATTEND_BACKWARD(
                grad,
                q,
                k[:, :, a:b],
                v[:, :, a:b],
                out.to(q.dtype),
                final,
                None,
                dq,
                dk[:, :, a:b],
                dv[:, :, a:b],
                **options(a, b),
            )
        return dq, dk, dv

    return out.to(q.dtype), backward


@settings(max_examples=40)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 2),
    ratio=st.integers(1, 3),
    queries=st.integers(1, 20),
    keys=st.integers(1, 24),
    size=st.sampled_from([4, 8]),
    value_size=st.sampled_from([4, 8]),
    cuts=st.lists(st.integers(1, 23), max_size=4),
    seed=st.integers(0, 99),
    share=st.sampled_from([0.0, 0.4, 0.95]),
)
def test_tiles_equal_dense(
    batch, groups, ratio, queries, keys, size, value_size, cuts, seed, share
):
    torch.manual_seed(seed)
    heads = groups * ratio
    q = torch.randn(
        batch, heads, queries, size, dtype=torch.float64, requires_grad=True
    )
    k = torch.randn(batch, groups, keys, size, dtype=torch.float64, requires_grad=True)
    v = torch.randn(
        batch, groups, keys, value_size, dtype=torch.float64, requires_grad=True
    )
    hidden = torch.rand(queries, keys) < share
    edges = sorted({0, keys, *(c for c in cuts if c < keys)})
    expected = dense(q, k, v, 0.3, hidden)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [q, k, v], grad)
    with torch.no_grad():
        out, backward = tiled(q, k, v, 0.3, hidden, list(zip(edges, edges[1:])))
        got = backward(grad)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b.nan_to_num(0.0), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_in_row_blocks(causal, monkeypatch):
    monkeypatch.setattr(scored_tiles, "MAX_SCORES", 64)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 17, 8, dtype=torch.float64) for n in (4, 2, 2))
    grad = torch.randn_like(q)
    found = []
    for kernel in ("reference", "aten_cpu"):
        options = {"scale": 0.5, "causal": causal, "kernel": kernel}
        out, lse = ATTEND(q, k, v, None, None, **options)
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        ATTEND_BACKWARD(grad, q, k, v, out, lse, None, *sums, **options)
        found.append((out, lse, *sums))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scale", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_flat_in_the_number_of_tiles(scale, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 16).to(dtype) for _ in range(3))
    hidden = torch.zeros(128, 128, dtype=torch.bool)
    expected = dense(q.double(), k.double(), v.double(), scale / 4, hidden)
    errors = []
    for n in (1, 2, 8, 64):
        edges = list(range(0, 129, 128 // n))
        out, _ = tiled(q, k, v, scale / 4, hidden, list(zip(edges, edges[1:])))
        assert torch.isfinite(out).all()
        errors.append((out.double() - expected).abs().max().item())
    assert max(errors) < 2 * errors[0] + (1e-2 if dtype is torch.bfloat16 else 2e-3)


def test_merging_rows_without_keys():
    nothing = torch.full((1, 1, 2), -torch.inf)
    out, lse = merge_into(torch.zeros(1, 1, 2, 3), nothing.clone(), None, None)
    out, lse = merge_into(torch.zeros(1, 1, 2, 3), nothing, out, lse)
    assert (out == 0).all() and (lse == -torch.inf).all()
    first_only = torch.tensor([[[0.5, -torch.inf]]])
    out, lse = merge_into(torch.ones(1, 1, 2, 3), first_only, out, lse)
    assert (out[0, 0, 0] == 1).all() and (out[0, 0, 1] == 0).all()
    assert lse[0, 0].tolist() == [0.5, -torch.inf]
