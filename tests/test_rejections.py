"""What cannot be proved runs whole and right, and says so; near-misses must not match."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from odd_models import SequenceFirst, SharedProjection
from tiny_models import VOCAB, batch, plain_pair
from torch import nn

import fpdt_compile
from fpdt_compile.testing import compare_training

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)
HERE = "test_rejections.py"


class Wrapped(nn.Module):
    """The plain transformer with something done to the hidden states between its blocks."""

    def __init__(self, between) -> None:
        super().__init__()
        self.inner = plain_pair()[0]
        self.between = between

    def forward(self, ids, labels):
        m = self.inner
        x = m.blocks[0](m.embed(ids))
        x = self.between(x)
        x = m.blocks[1](x)
        logits = m.vocab_head(m.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def inputs_of(length=21):
    inputs = batch(2, length)
    return {"ids": inputs["input_ids"], "labels": inputs["labels"]}


def run_both(model, length=21):
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, **EAGER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = compare_training(
            model, reference, inputs_of(length), loss_of=lambda output: output
        )
    result.check(1e-9)
    found = fpdt_compile.api.backend_of(model).analyses[0]
    ours = [str(w.message) for w in caught if "fpdt_compile" in str(w.message)]
    return found, ours


MIXERS = {
    "cumsum": lambda x: x + x.cumsum(1) * 0.1,
    "roll": lambda x: x + x.roll(1, 1),
    "mean over tokens": lambda x: x - x.mean(1, keepdim=True),
    "softmax over tokens": lambda x: x + x.softmax(1),
    "max over tokens": lambda x: x / x.abs().amax(1, keepdim=True),
    "flip": lambda x: x + x.flip(1),
    "shift by concatenation": lambda x: x + torch.cat([x[:, :1], x[:, :-1]], 1),
    "norm over tokens and features": lambda x: x / x.norm(dim=(1, 2), keepdim=True),
    "length as a number": lambda x: x * x.shape[1] / 100,
    "conv over tokens": lambda x: (
        x + F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)
    ),
    "matmul over tokens": lambda x: x + x @ (x.transpose(1, 2) @ x) * 1e-3,
    "sort over tokens": lambda x: x + x.sort(1).values,
    "view across tokens": lambda x: x + x.transpose(1, 2).reshape(x.shape),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_runs_whole(name):
    found, warned = run_both(Wrapped(MIXERS[name]))
    assert len(warned) == 1 and HERE in warned[0]
    assert found.rejections and all(HERE in r.source for r in found.rejections)


def test_attention_around_a_mixer_is_chunked():
    found, _ = run_both(Wrapped(MIXERS["cumsum"]), length=37)
    assert len(found.attentions) == 2 and len(found.mixers) == 1
    assert found.mixers[0].rejection.op == "aten.cumsum.default"


TOKENWISE = {
    "norm": lambda x: F.layer_norm(x, (32,)),
    "softmax over features": lambda x: x.softmax(-1),
    "sum over features": lambda x: x + x.sum(-1, keepdim=True),
    "flatten and back": lambda x: F.gelu(x.reshape(-1, 32)).reshape(x.shape),
    "heads and back": lambda x: (
        x.view(2, -1, 4, 8).transpose(1, 2).tanh().transpose(1, 2).flatten(2)
    ),
    "cat features": lambda x: torch.cat([x[..., 16:], x[..., :16]], -1),
    "stack": lambda x: torch.stack([x, -x], 2).sum(2) + x,
    "in place": lambda x: (x * 2).add_(1).mul_(0.5),
    "topk features": lambda x: x + x.topk(3, -1).values.sum(-1, keepdim=True),
    "gather": lambda x: x.gather(-1, x.argsort(-1)) + x,
    "cumsum over features": lambda x: x + x.cumsum(-1) * 0.1,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "attention inside a token": lambda x: (
        x
        + F.scaled_dot_product_attention(*([x.reshape(-1, 1, 4, 8)] * 3)).reshape(
            x.shape
        )
    ),
    "detach": lambda x: x + x.detach() * 0.5,
    "matmul": lambda x: x @ torch.ones(32, 32, dtype=x.dtype) * 0.1,
    "einsum": lambda x: (
        torch.einsum("bsd,de->bse", x, torch.eye(32, dtype=x.dtype)) + x
    ),
    "no_grad branch": lambda x: x * no_grad_scale(x),
    "chunk": lambda x: torch.cat([p.sigmoid() for p in x.chunk(2, -1)], -1),
    "constant rows": lambda x: x[..., torch.tensor([1, 0, *range(2, 32)])],
}


def no_grad_scale(x):
    with torch.no_grad():
        return x.abs().mean(-1, keepdim=True)


@pytest.mark.parametrize("name", TOKENWISE)
def test_tokenwise_work_is_chunked(name):
    found, warned = run_both(Wrapped(TOKENWISE[name]))
    assert not warned and not found.mixers and len(found.attentions) == 2


def test_view_that_cannot_be_written_to_runs_whole():
    def write(x):
        y = x * 2
        y.unfold(2, 2, 2).add_(1.0)
        return y

    found, warned = run_both(Wrapped(write))
    assert len(warned) == 1 and HERE in warned[0] and "add_" in warned[0]


def test_token_that_is_written_to_leaves_the_rest_in_chunks():
    def write(x):
        y = x * 2
        y[:, 0] = 1.0
        return y

    found, warned = run_both(Wrapped(write))
    assert len(warned) == 1 and HERE in warned[0]


def test_strict_raises_the_rejection():
    model = fpdt_compile.optimize(Wrapped(MIXERS["cumsum"]), strict=True, **EAGER)
    with pytest.raises(fpdt_compile.CantChunk, match=HERE) as error:
        model(**inputs_of())
    assert error.value.rejection.op == "aten.cumsum.default"


def test_verify_catches_a_wrong_rule(monkeypatch):
    """A rule that claims a cumsum over tokens to be tokenwise does not survive verify=True."""
    from fpdt_compile.passes.token_rules import RULES, pointwise_rule

    from fpdt_compile.errors import InvariantError

    monkeypatch.setitem(RULES, "cumsum", pointwise_rule)
    model = fpdt_compile.optimize(Wrapped(MIXERS["cumsum"]), verify=True, **EAGER)
    with pytest.raises(InvariantError, match="verify.*two chunks"):
        model(**inputs_of())


def test_model_without_attention():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 16, dtype=torch.float64)
            self.out = nn.Linear(16, VOCAB, dtype=torch.float64)

        def forward(self, ids, labels):
            return F.cross_entropy(
                self.out(self.embed(ids)).flatten(0, 1), labels.flatten()
            )

    found, warned = run_both(Bag())
    assert len(warned) == 1 and "no attention" in warned[0]


def test_specialized_token_dimension_names_the_place():
    def specialized(x):
        if x.shape[1] == 21:
            return x * 2
        return x

    found, warned = run_both(Wrapped(specialized))
    assert len(warned) == 1 and HERE in warned[0] and "21" in warned[0]


def test_parallel_attention_and_two_consumers():
    found, warned = run_both(SharedProjection())
    assert not warned and len(found.attentions) == 2


def test_sequence_first_layout():
    found, warned = run_both(SequenceFirst())
    assert not warned and len(found.attentions) == 1


def test_bidirectional_encoder():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 32, dtype=torch.float64)
            self.qkv = nn.Linear(32, 96, dtype=torch.float64)
            self.head = nn.Linear(32, VOCAB, dtype=torch.float64)

        def forward(self, ids, labels):
            x = self.embed(ids)
            for _ in range(2):
                q, k, v = self.qkv(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
                x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(
                    2
                )
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    found, warned = run_both(Encoder(), length=29)
    assert not warned and len(found.attentions) == 2


def test_value_head_size_differs():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 32, dtype=torch.float64)
            self.qk = nn.Linear(32, 64, dtype=torch.float64)
            self.v = nn.Linear(32, 48, dtype=torch.float64)
            self.out = nn.Linear(48, VOCAB, dtype=torch.float64)

        def forward(self, ids, labels):
            x = self.embed(ids)
            q, k = self.qk(x).unflatten(-1, (8, 8)).transpose(1, 2).chunk(2, 1)
            v = self.v(x).unflatten(-1, (4, 12)).transpose(1, 2)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
            return F.cross_entropy(
                self.out(a.transpose(1, 2).flatten(2)).flatten(0, 1), labels.flatten()
            )

    found, warned = run_both(Wide())
    assert not warned and len(found.attentions) == 1
