"""Random score arithmetic through the whole pipeline, against the same arithmetic on all pairs.

Every example is a chain of steps on the scores: numbers, softcaps, biases from positions,
documents, learned slopes and tables, fills and selections by random conditions.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from test_masks_random import booleans, environment, evaluate
from torch import Tensor, nn

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

WIDTH, HEADS, SIZE, VOCAB, LENGTH = 16, 2, 8, 30, 19

STEPS = st.one_of(
    st.tuples(st.just("scale"), st.sampled_from([0.3, 2.0, -0.5])),
    st.tuples(st.just("softcap"), st.sampled_from([1.5, 6.0])),
    st.tuples(st.sampled_from(["slopes", "table", "buckets", "gate", "distance"])),
    st.tuples(st.just("documents"), st.sampled_from([0.7, -1.0])),
    st.tuples(st.just("halve"), booleans(1)),
)
FILLS = st.tuples(
    st.sampled_from(["fill", "where", "add"]),
    st.sampled_from([-torch.inf, -1e9, torch.finfo(torch.float64).min]),
    booleans(2),
)


class Net(nn.Module):
    def __init__(self, steps: Any, *, spelled: bool = True) -> None:
        super().__init__()
        self.steps = steps
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.slopes = nn.Parameter(torch.rand(HEADS, 1, 1))
        self.table = nn.Parameter(torch.randn(HEADS, 64))
        self.buckets = nn.Embedding(8, HEADS)
        self.gate = nn.Parameter(torch.rand(()))

    def step(self, scores: Tensor, step: Any, env: dict[str, Tensor]) -> Tensor:
        name, *rest = step
        distance = env["q"] - env["k"]
        match name:
            case "scale":
                return scores * rest[0]
            case "softcap":
                return rest[0] * torch.tanh(scores / rest[0])
            case "slopes":
                return scores - self.slopes * distance.abs()
            case "table":
                return scores + self.table[:, distance[0, 0].abs()]
            case "buckets":
                number = distance[0, 0].abs().clamp(max=7)
                return scores + self.buckets(number).permute(2, 0, 1)
            case "gate":
                return scores * self.gate
            case "distance":
                return scores - 0.1 * distance.clamp(min=-3, max=5)
            case "documents":
                return scores + rest[0] * (env["dq"] == env["dk"])
            case "halve":
                return torch.where(evaluate(rest[0], env), scores, scores * 0.5)
            case "fill" | "where" | "add":
                low, condition = rest
                shown = evaluate(condition, env)
                if low == -torch.inf:  # softmax of nothing is nan in the model too
                    shown = shown | (env["q"] == env["k"])
                if name == "fill":
                    return scores.masked_fill(~shown, low)
                if name == "where":
                    return torch.where(shown, scores, low)
                zero = torch.zeros((), dtype=scores.dtype)
                return scores + zero.masked_fill(~shown, low)
        raise ValueError(name)

    def forward(self, ids: Tensor, docs: Tensor, keep: Tensor) -> Tensor:
        x = self.embed(ids)
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        env = environment(torch.arange(length), docs, keep)
        scores = q @ k.mT / 3
        for step in self.steps:
            scores = self.step(scores, step, env)
        a = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, WIDTH)
        return (x + self.out(a)).square().mean()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    steps=st.lists(STEPS, min_size=0, max_size=3),
    fill=st.one_of(st.none(), FILLS),
    seed=st.integers(0, 100),
)
def test_same_loss_and_gradients(steps: Any, fill: Any, seed: int) -> None:
    torch.manual_seed(seed)
    torch.compiler.reset()
    model = Net([*steps, *([fill] if fill else [])]).double()
    reference = copy.deepcopy(model)
    inputs = {
        "ids": torch.randint(0, VOCAB, (2, LENGTH)),
        "docs": torch.randint(0, 4, (2, LENGTH)).sort(1).values,
        "keep": torch.rand(2, LENGTH) < 0.8,
    }
    fpdt_compile.optimize(model, chunk_len=7, codegen="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comparison = compare_training(
            model, reference, inputs, loss_of=lambda loss: loss
        )
    comparison.check(1e-9)
    (analysis,) = backend_of(model).analyses
    assert len(analysis.attentions) == 1, list(map(str, analysis.rejections))
    assert not analysis.mixers
