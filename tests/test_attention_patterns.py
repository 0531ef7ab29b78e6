"""Every spelling of attention that Inductor knows is attention here: in chunks, exactly.

The walk takes the patterns from the installed torch, so a new one fails until it is looked at.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.fx_passes import fuse_attention

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

WIDTH, HEADS, SIZE, VOCAB = 32, 4, 8, 50
SOURCES = {
    name.removeprefix("_sfdp_"): inspect.getsource(function)
    for name, function in vars(fuse_attention).items()
    if name.startswith("_sfdp_pattern_")
}


# As functions of this file: Dynamo does not trace into Inductor's.
exec(compile("\n".join(SOURCES.values()), __file__, "exec"))
PATTERNS: dict[str, Callable[..., Any]] = {
    name: globals()[f"_sfdp_{name}"] for name in SOURCES
}
# Patterns that are not chunked, with a part of the reason given. There is none.
REFUSED: dict[str, str] = {}
# A pattern that casts to half holds no more than its digits.
HALF = {name for name, source in SOURCES.items() if "torch.float16" in source}


class Net(nn.Module):
    """One pattern between projections."""

    def __init__(self, name: str, dropout_p: float) -> None:
        super().__init__()
        self.pattern, self.dropout_p = PATTERNS[name], dropout_p
        source = SOURCES[name]
        self.names = tuple(inspect.signature(self.pattern).parameters)
        self.heads_last = "0, 2, 1, 3" in source
        self.flat = "torch.bmm(query" in source
        self.padding = "(attn_mask == 0)" in source
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def mask(self, length: int, kept: Tensor, dtype: torch.dtype) -> Tensor:
        if self.padding:
            return kept
        places = torch.arange(length)
        distance = places[:, None] - places[None, :]
        hidden = (distance < 0) | (distance > 9)
        return torch.zeros((), dtype=dtype).masked_fill(hidden, -1e9)[None, None]

    def forward(self, ids: Tensor, kept: Tensor) -> Tensor:
        x = self.embed(ids)
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3 * HEADS, SIZE).split(HEADS, 2)
        if not self.heads_last:
            q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        if self.flat:
            q, k, v = (t.reshape(rows * HEADS, length, SIZE) for t in (q, k, v))
        places = torch.arange(length)
        values = {
            "query": q,
            "key": k,
            "value": v,
            "inv_scale": 2.5,
            "inv_scale_factor": 2.5,
            "scale_factor": 0.4,
            "dropout_p": self.dropout_p,
            "attn_mask": self.mask(length, kept, x.dtype),
            "attention_mask": self.mask(length, kept, x.dtype),
            "causal_mask": (places[None, :] <= places[:, None])[None, None],
        }
        a, *others = self.listed(self.pattern(*[values[name] for name in self.names]))
        if not self.flat:
            a = a.transpose(1, 2)
        else:
            a = a.view(rows, HEADS, length, SIZE).transpose(1, 2)
        x = x + self.out(a.reshape(rows, length, WIDTH).to(x.dtype))
        loss = x.square().mean()
        for other in others:
            loss = loss + other.square().mean()
        return loss

    @staticmethod
    def listed(result: Any) -> tuple[Tensor, ...]:
        return result if isinstance(result, tuple) else (result,)


def inputs() -> dict[str, Tensor]:
    kept = torch.ones(2, 21, dtype=torch.long)
    kept[0, -4:] = 0
    return {"ids": torch.randint(0, VOCAB, (2, 21)), "kept": kept}


def test_the_walk_finds_the_patterns() -> None:
    assert len(PATTERNS) >= 28
    assert set(REFUSED) <= set(PATTERNS)


@pytest.mark.parametrize("name", PATTERNS)
def test_is_chunked_and_exact(name: str) -> None:
    torch.manual_seed(0)
    model = Net(name, 0.0).double()
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(
        model, chunk_len=8, codegen="eager", strict=name not in REFUSED
    )
    comparison = compare_training(model, reference, inputs(), loss_of=lambda x: x)
    exact = "float()" not in SOURCES[name]
    comparison.check(5e-3 if name in HALF else 1e-9 if exact else 1e-6)
    (analysis,) = backend_of(model).analyses
    if name in REFUSED:
        assert not analysis.attentions
        assert any(REFUSED[name] in r.reason for r in analysis.rejections)
    else:
        assert len(analysis.attentions) == 1 and not analysis.mixers


@pytest.mark.parametrize(
    "name",
    [n for n, f in PATTERNS.items() if "dropout_p" in inspect.signature(f).parameters],
)
def test_dropout_belongs_to_the_attention(name: str) -> None:
    torch.manual_seed(0)
    model = Net(name, 0.25).double()
    fpdt_compile.optimize(model, chunk_len=8, codegen="eager", strict=True)
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        loss = model(**inputs())
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    (analysis,) = backend_of(model).analyses
    assert [a.dropout_p for a in analysis.attentions] == [0.25]
