"""Models that spell or lay out attention in ways of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tiny_models import VOCAB
from torch import Tensor, nn


class SharedProjection(nn.Module):
    """q, k and v used elsewhere too, q is k, keywords, and two attentions of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32, dtype=torch.float64)
        self.proj = nn.Linear(32, 32, dtype=torch.float64)
        self.head = nn.Linear(32, VOCAB, dtype=torch.float64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q = self.proj(x).view(*ids.shape, 4, 8).transpose(1, 2)
        a = F.scaled_dot_product_attention(query=q, key=q, value=q, is_causal=True)
        b = F.scaled_dot_product_attention(
            q, q.tanh(), value=a.detach() + q, is_causal=True
        )
        x = x + (a + b * q).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class SequenceFirst(nn.Module):
    """Hidden states are [S, B, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32, dtype=torch.float64)
        self.qkv = nn.Linear(32, 96, dtype=torch.float64)
        self.head = nn.Linear(32, VOCAB, dtype=torch.float64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids.t())
        q, k, v = self.qkv(x).unflatten(-1, (12, 8)).permute(1, 2, 0, 3).chunk(3, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.permute(2, 0, 1, 3).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.t().flatten())
