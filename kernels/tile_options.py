"""What an attention tile does besides softmax(scale * q k^T) v.

Shapes: q [B, H, q, D], k [B, G, k, D]. Pair (i, j) has the distance d = i + ``offset`` - j, the
query's position minus the key's. A pair is visible if

    causal:     d >= 0                       window w:  d < w
    q_docs, k_docs (int [B|1, q], [B|1, k]): equal ids
    key_bound (int [B|1]):                   j < key_bound

The logits of a visible pair, x the score q.k:

    program:    the program of ``tile_program`` (it does the scaling), else
    softcap c:  c * tanh(scale * x / c), else scale * x
    then        + alibi[h] * (-d) + bias

with alibi [H] and bias broadcastable to [B, H, q, k]. Everything in fp32 (float64 for float64).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .tile_program import evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOptions:
    """The options of ``fpdt::attend``; see the module's text for what each means."""

    scale: float
    causal: bool = False
    offset: int = 0
    window: int | None = None
    q_docs: Tensor | None = None
    k_docs: Tensor | None = None
    key_bound: Tensor | None = None
    softcap: float = 0.0
    alibi: Tensor | None = None
    bias: Tensor | None = None
    program: str = ""
    leaves: list[Tensor] = field(default_factory=list)

    def given(self) -> list[str]:
        """The names of the options that are in use, without ``scale``."""
        words = []
        if self.causal:
            words.append("causal")
        if self.causal or self.window is not None or self.alibi is not None:
            words += ["offset"] * bool(self.offset)
        named = {
            "window": self.window,
            "document ids": self.q_docs,
            "key bound": self.key_bound,
            "softcap": self.softcap or None,
            "ALiBi": self.alibi,
            "bias": self.bias,
            "program": self.program or None,
        }
        return words + [name for name, x in named.items() if x is not None]

    def logits(self, scores: Tensor, rows: slice) -> Tensor:
        """Unscaled ``scores`` [B, H, rows, k] as logits; -inf hides a pair."""
        device = scores.device
        if self.program:
            logits = evaluate(
                self.program, scores, self.leaves, rows=rows, offset=self.offset
            ).to(scores.dtype)
        elif self.softcap:
            logits = torch.tanh(scores * (self.scale / self.softcap)) * self.softcap
        else:
            logits = scores * self.scale
        index = torch.arange(rows.start, rows.stop, device=device)[:, None]
        column = torch.arange(scores.shape[3], device=device)
        distance = index + self.offset - column
        if self.alibi is not None:
            slopes = self.alibi.to(logits.dtype).view(1, -1, 1, 1)
            logits = logits - slopes * distance
        if self.bias is not None:
            bias = self.bias[..., rows, :] if self.bias.shape[-2] != 1 else self.bias
            logits = logits + bias.to(logits.dtype)
        hidden = self.hidden(distance, rows)
        return logits if hidden is None else logits.masked_fill(hidden, -torch.inf)

    def hidden(self, distance: Tensor, rows: slice) -> Tensor | None:
        """Pairs that no query sees, broadcastable to [B, H, rows, k]."""
        found = []
        if self.causal:
            found.append(distance < 0)
        if self.window is not None:
            found.append(distance >= self.window)
        if self.q_docs is not None and self.k_docs is not None:
            ids = self.q_docs[:, rows]
            found.append((ids[:, :, None] != self.k_docs[:, None, :])[:, None])
        if self.key_bound is not None:
            column = torch.arange(distance.shape[-1], device=distance.device)
            found.append((column >= self.key_bound[:, None])[:, None, None])
        total = None
        for part in found:
            total = part if total is None else total | part
        return total
