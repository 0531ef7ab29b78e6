"""Masks people bring along, through a whole training step: values, gradients, dead rows, copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

WIDTH, HEADS, SIZE, VOCAB, LONGEST = 32, 4, 8, 50, 48


class Net(nn.Module):
    """Layers of SDPA (or softmax written out) under the mask that ``kind`` names."""

    def __init__(self, kind: str, *, spelled: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.kind, self.spelled = kind, spelled
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        places = torch.arange(LONGEST)
        seen = (places[:, None] - places[None, :]).abs() * 7 % 11 < 6
        seen |= torch.eye(LONGEST, dtype=torch.bool)
        self.register_buffer("square", seen)
        self.register_buffer("square_bias", torch.where(seen, 0.0, -1e9).double())

    def mask(self, length: int, given: Tensor) -> Tensor:
        places = torch.arange(length)
        q, k = places[:, None], places[None, :]
        match self.kind:
            case "prefix":  # given [B]: how many tokens of a row see each other
                return ((k <= q) | (k < given[:, None, None]))[:, None]
            case "chunked":  # llama4
                return (k <= q) & (q // 6 == k // 6)
            case (
                "padded_left"
            ):  # given [B, S]: the first rows of the padding see nothing
                return (k <= q) & given[:, None, None, :]
            case "low_left":  # the same, added: rows without a key see all keys alike
                low = torch.finfo(torch.float64).min
                hidden = ~((k <= q) & given[:, None, None, :])
                return torch.zeros((), dtype=torch.float64).masked_fill(hidden, low)
            case "nothing_every_third":
                return (k <= q) & (q % 3 != 1)
            case "buffer":
                return self.square[:length, :length]
            case "bias_buffer":
                return self.square_bias[:length, :length]
            case "input":
                return given
        raise ValueError(self.kind)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if not self.spelled:
            if self.kind == "low_left" and not torch.compiler.is_compiling():
                # torch's CPU kernel loses the number of keys of such a row in its backward.
                with sdpa_kernel(SDPBackend.MATH):
                    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q @ k.mT / 3
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
        return scores.softmax(-1) @ v

    def forward(self, ids: Tensor, given: Tensor) -> Tensor:
        x = self.embed(ids)
        rows, length, _ = x.shape
        mask = self.mask(length, given)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            heads = qkv(x).view(rows, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            a = self.attend(*heads, mask)
            x = x + out(a.transpose(1, 2).reshape(rows, length, WIDTH))
        return x.square().mean()


def given_for(kind: str, length: int) -> Tensor:
    if kind == "prefix":
        return torch.tensor([5, 11])
    if kind in ("padded_left", "low_left"):
        kept = torch.ones(2, length, dtype=torch.bool)
        kept[0, :9] = False
        return kept
    if kind == "input":
        return torch.rand(length, length) < 0.6
    return torch.zeros(2, length, dtype=torch.long)


def trained(model: Net, length: int = 21, **options: Any) -> Any:
    model = model.double()
    reference = copy.deepcopy(model)
    ids = torch.randint(0, VOCAB, (2, length))
    given = given_for(model.kind, length)
    fpdt_compile.optimize(
        model, chunk_len=8, codegen="eager", strict=True, outputs="all", **options
    )
    comparison = compare_training(
        model, reference, {"ids": ids, "given": given}, loss_of=lambda loss: loss
    )
    (analysis,) = backend_of(model).analyses
    return comparison, analysis


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "prefix",
        "chunked",
        "padded_left",
        "low_left",
        "nothing_every_third",
        "buffer",
        "bias_buffer",
        "input",
    ],
)
def test_exact_and_in_chunks(kind: str, spelled: bool) -> None:
    """Rows without a key: 0 under SDPA's bool mask, the mean of all values under a finite fill."""
    torch.manual_seed(0)
    comparison, analysis = trained(Net(kind, spelled=spelled))
    comparison.check(1e-9)
    assert len(analysis.attentions) == 1 and not analysis.mixers


@pytest.mark.parametrize("kind", ["buffer", "bias_buffer", "input"])
def test_a_square_is_read_in_place_and_shared_by_layers(kind: str) -> None:
    torch.manual_seed(0)
    comparison, analysis = trained(Net(kind, layers=3))
    comparison.check(1e-9)
    masks = {id(attention.mask) for attention in analysis.attentions}
    assert len(analysis.attentions) == 3 and len(masks) == 1
    wide = [
        n
        for n, axes in analysis.tokens.axes.items()
        if len(axes) > 1 and n.op == "call_function"
    ]
    # Views of the buffer at most: nothing computes a square.
    assert all("slice" in str(n.target) for n in wide)
