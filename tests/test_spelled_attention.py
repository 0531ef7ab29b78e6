"""Attention as people write it: einsum, baddbmm, scales before and after, fills of all kinds."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

WIDTH, HEADS, SIZE, VOCAB = 32, 4, 8, 50


def hidden(q: Tensor, k: Tensor) -> Tensor:
    """[q, k], from [..., S, D]."""
    places = torch.arange(q.shape[-2])
    return places[None, :] > places[:, None]


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 3
    scores = scores.masked_fill(hidden(q, k), -torch.inf)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def einsum_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 3
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).transpose(1, 2)


def einsum_swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhjd,bhid->bhij", k, q)
    return torch.einsum("bhjd,bhij->bhid", v, scores.softmax(-1))


def einsum_grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, _, length, size = q.shape
    q = q.view(rows, 2, 2, length, size)
    k, v = k[:, :2], v[:, :2]
    scores = torch.einsum("bghqd,bgkd->bghqk", q, k) / 3
    a = torch.einsum("bghqk,bgkd->bghqd", scores.softmax(-1), v)
    return a.reshape(rows, HEADS, length, size)


def baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, heads, length, size = q.shape
    q, k, v = (x.reshape(rows * heads, length, size) for x in (q, k, v))
    bias = torch.zeros(length, length, dtype=q.dtype).masked_fill(hidden(q, k), -1e30)
    bias = bias.expand(rows * heads, length, length)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=2.0, alpha=0.3)
    return torch.bmm(scores.softmax(-1), v).view(rows, heads, length, size)


def scales_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q * 0.5) @ (k * 0.7).transpose(-1, -2) * 2
    return torch.where(hidden(q, k), -torch.inf, scores).softmax(-1) @ v


def full_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 3
    low = torch.full_like(scores, -1e9)
    return torch.where(hidden(q, k), low, scores).softmax(-1) @ v


def finfo_min(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / 3
    low = torch.finfo(scores.dtype).min
    return F.softmax(scores.masked_fill(hidden(q, k), low), dim=-1) @ v


def added_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[-2]
    mask = torch.full((length, length), -torch.inf, dtype=q.dtype).triu(1)
    return (q @ k.mT / 3 + mask).softmax(-1) @ v


def softcap_then_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 4 * torch.tanh(q @ k.mT / 12)
    return scores.masked_fill(hidden(q, k), -torch.inf).softmax(-1) @ v


def shifted_by_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT / 3).masked_fill(hidden(q, k), -torch.inf)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


SPELLINGS = [
    einsum,
    einsum_tokens_first,
    einsum_swapped,
    einsum_grouped,
    baddbmm,
    scales_before,
    full_like,
    finfo_min,
    added_triangle,
    softcap_then_mask,
    shifted_by_maximum,
]


class Net(nn.Module):
    def __init__(self, attend: object) -> None:
        super().__init__()
        self.attend = attend
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        a = self.attend(q, k, v).transpose(1, 2).reshape(rows, length, WIDTH)
        return (x + self.out(a)).square().mean()


@pytest.mark.parametrize("attend", SPELLINGS, ids=lambda f: f.__name__)
def test_is_chunked_and_exact(attend: object) -> None:
    torch.manual_seed(0)
    model = Net(attend).double()
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, chunk_len=8, codegen="eager", strict=True)
    ids = torch.randint(0, VOCAB, (2, 21))
    comparison = compare_training(
        model, reference, {"ids": ids}, loss_of=lambda loss: loss
    )
    comparison.check(1e-9)
    (analysis,) = backend_of(model).analyses
    assert len(analysis.attentions) == 1 and not analysis.mixers


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).relu() @ v


def reweighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return (weights * weights) @ v


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (over_queries, "softmax does not run over the keys"),
        (linear_attention, "not read as attention"),
        (reweighted, "mul works on its weights"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_near_misses_run_whole_and_right(attend: object, reason: str) -> None:
    torch.manual_seed(0)
    model = Net(attend).double()
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, chunk_len=8, codegen="eager")
    ids = torch.randint(0, VOCAB, (2, 21))
    with pytest.warns(UserWarning, match=reason):
        comparison = compare_training(
            model, reference, {"ids": ids}, loss_of=lambda loss: loss
        )
    comparison.check(1e-9)
    (analysis,) = backend_of(model).analyses
    assert not analysis.attentions
