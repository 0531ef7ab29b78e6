"""torch's own layers in self-attention: exact, and in chunks unless the weights are an output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

WIDTH, HEADS, VOCAB = 32, 4, 50


def causal_mask(x: Tensor, kind: str) -> Tensor:
    length = x.shape[1]
    if kind == "bool":
        places = torch.arange(length)
        return places[None, :] > places[:, None]
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, mask: str, padding: str, **call: Any) -> None:
        super().__init__()
        self.mask, self.padding, self.call = mask, padding, call
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)
        )

    def forward(self, ids: Tensor, padded: Tensor) -> Tensor:
        x = self.embed(ids)
        options: dict[str, Any] = dict(self.call)
        if self.mask:
            options["attn_mask"] = causal_mask(x, self.mask)
        if self.padding == "bool":
            options["key_padding_mask"] = padded
        elif self.padding == "float":
            low = torch.zeros((), dtype=x.dtype).masked_fill(padded, -1e9)
            options["key_padding_mask"] = low
        a, weights = self.attention(x, x, x, **options)
        x = x + a
        loss = (x + self.feed_forward(x)).square().mean()
        if weights is not None:
            loss = loss + weights.square().mean()
        return loss


class Encoder(nn.Module):
    def __init__(self, mask: str, padding: bool, norm_first: bool, **call: Any) -> None:
        super().__init__()
        self.mask, self.padding, self.call = mask, padding, call
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 48, dropout=0.0, norm_first=norm_first, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, padded: Tensor) -> Tensor:
        x = self.embed(ids)
        options: dict[str, Any] = dict(self.call)
        if self.mask:
            options["mask"] = causal_mask(x, self.mask)
        if self.padding:
            options["src_key_padding_mask"] = padded
        return self.layers(x, **options).square().mean()


def trained(model: nn.Module, **options: Any) -> Any:
    model = model.double().train()
    reference = copy.deepcopy(model)
    padded = torch.zeros(2, 21, dtype=torch.bool)
    padded[0, -4:] = True
    inputs = {"ids": torch.randint(0, VOCAB, (2, 21)), "padded": padded}
    fpdt_compile.optimize(model, chunk_len=8, codegen="eager", **options)
    comparison = compare_training(model, reference, inputs, loss_of=lambda loss: loss)
    (analysis,) = backend_of(model).analyses
    return comparison, analysis


@pytest.mark.parametrize(
    ("mask", "padding"),
    [
        ("", ""),
        ("bool", ""),
        ("float", ""),
        ("", "bool"),
        ("", "float"),
        ("bool", "bool"),
        ("float", "float"),
    ],
)
def test_attention_without_weights(mask: str, padding: str) -> None:
    torch.manual_seed(0)
    model = SelfAttention(mask, padding, need_weights=False)
    comparison, analysis = trained(model, strict=True)
    comparison.check(1e-9)
    assert len(analysis.attentions) == 1 and not analysis.mixers


def test_attention_with_the_causal_flag() -> None:
    torch.manual_seed(0)
    model = SelfAttention("float", "", need_weights=False, is_causal=True)
    comparison, analysis = trained(model, strict=True)
    comparison.check(1e-9)
    (attention,) = analysis.attentions
    assert attention.is_causal or attention.mask is not None


def test_dropped_weights_are_no_output() -> None:
    """need_weights as by default, but nobody reads them."""

    class Unread(SelfAttention):
        def forward(self, ids: Tensor, padded: Tensor) -> Tensor:
            x = self.embed(ids)
            a, _ = self.attention(x, x, x, key_padding_mask=padded)
            return (x + self.feed_forward(x + a)).square().mean()

    torch.manual_seed(0)
    comparison, analysis = trained(Unread("", "bool"), strict=True)
    comparison.check(1e-9)
    assert len(analysis.attentions) == 1 and not analysis.mixers


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.filterwarnings("ignore:fpdt_compile")
def test_weights_that_are_read_run_whole(average: bool) -> None:
    torch.manual_seed(0)
    model = SelfAttention(
        "bool", "bool", need_weights=True, average_attn_weights=average
    )
    comparison, analysis = trained(model)
    comparison.check(1e-9)
    assert not analysis.attentions
    assert any("weights" in r.reason for r in analysis.rejections)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(
    ("mask", "padding", "call"),
    [
        ("", False, {}),
        ("", True, {}),
        ("float", False, {"is_causal": True}),
        ("bool", True, {}),
        ("bool", False, {"is_causal": False}),
    ],
)
def test_encoder(mask: str, padding: bool, call: Any, norm_first: bool) -> None:
    torch.manual_seed(0)
    comparison, analysis = trained(
        Encoder(mask, padding, norm_first, **call), strict=True
    )
    comparison.check(1e-9)
    assert len(analysis.attentions) == 2 and not analysis.mixers
