"""Transformers in plain torch for the zoo: torch's own layers, and what people write."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_inputs import VOCAB

WIDTH, HEADS = 32, 4
OPTIONS = {"dropout": 0.0, "batch_first": True}


class EncoderLayers(nn.Module):
    """``nn.TransformerEncoder``; ``causal`` gives it a mask of the square and a flag."""

    def __init__(self, *, norm_first: bool, causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 48, norm_first=norm_first, **OPTIONS
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        if not self.causal:
            return self.layers(x).square().mean()
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], dtype=x.dtype, device=x.device
        )
        return self.layers(x, mask=mask, is_causal=True).square().mean()


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` on itself, with and without the weights as an output."""

    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **OPTIONS)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)
        )
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        a, _ = self.attention(x, x, x, need_weights=self.need_weights)
        x = x + a
        return (x + self.feed_forward(x)).square().mean()


class DecoderLayers(nn.Module):
    """``nn.TransformerDecoderLayer``: causal over itself, and over a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, HEADS, 48, **OPTIONS) for _ in range(2)
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], dtype=x.dtype, device=x.device
        )
        for layer in self.layers:
            x = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
        return x.square().mean()


class GptBlock(nn.Module):
    """As in small teaching repositories: fused projection, and a lower triangle as a buffer."""

    def __init__(self, *, flash: bool) -> None:
        super().__init__()
        self.flash = flash
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        triangle = torch.ones(64, 64).tril()[None, None]
        self.register_buffer("triangle", triangle, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        if self.flash:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            hidden = self.triangle[:, :, :length, :length] == 0
            a = F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v
        a = a.transpose(1, 2).contiguous().view(batch, length, width)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """The model around it: learned positions, tied head, loss over shifted labels."""

    def __init__(self, *, flash: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(GptBlock(flash=flash) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
