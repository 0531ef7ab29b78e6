"""Dropout: independent of the chunking, repeated by the recomputation, of the right
distribution."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import batch, decoder, plain_pair
from torch import nn

import fpdt_compile


class Dropping(nn.Module):
    def __init__(self, p: float, attention_p: float = 0.0) -> None:
        super().__init__()
        self.inner = plain_pair()[0]
        self.p, self.attention_p = p, attention_p

    def forward(self, ids, labels):
        m = self.inner
        x = F.dropout(m.embed(ids), self.p, self.training)
        for block in m.blocks:
            x = F.dropout(block(x), self.p, self.training)
        if self.attention_p:
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            a = F.scaled_dot_product_attention(
                q, q, q, dropout_p=self.attention_p, is_causal=True
            )
            x = x + a.transpose(1, 2).flatten(2)
        logits = m.vocab_head(m.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def inputs_of(length=37):
    inputs = batch(2, length)
    return {"ids": inputs["input_ids"], "labels": inputs["labels"]}


def step(model, seed=7):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**inputs_of())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def test_same_result_for_every_chunk_length():
    base = Dropping(0.3)
    results = []
    for chunk_len, save in ((64, "attention"), (8, "attention"), (5, "hidden")):
        model = fpdt_compile.optimize(
            copy.deepcopy(base),
            codegen="eager",
            chunk_len=chunk_len,
            head_len=4,
            save=save,
            strict=True,
        )
        results.append(step(model))
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-12, atol=0)
        for a, b in zip(grads, results[0][1]):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attention_p", [0.0, 0.4])
@pytest.mark.filterwarnings("ignore:fpdt_compile")
def test_gradient_is_that_of_the_forward_that_ran(attention_p):
    """Central differences with the seed held fixed: a mask drawn anew in backward would show."""
    model = Dropping(0.3, attention_p)
    fpdt_compile.optimize(model, codegen="eager", chunk_len=8, head_len=4)
    _, grads = step(model)
    eps = 1e-6
    for parameter, grad in zip(model.parameters(), grads):
        direction = torch.randn_like(parameter)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * eps)
            values.append(step(model)[0].item())
            with torch.no_grad():
                parameter.add_(direction, alpha=-sign * eps)
        numeric = (values[0] - values[1]) / (2 * eps)
        assert abs(numeric - (grad * direction).sum().item()) < 1e-6 * max(
            1, abs(numeric)
        )


def test_distribution_and_seeds():
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64, dtype=torch.float64))

        def forward(self, x):
            q = x.unflatten(-1, (1, 64)).transpose(1, 2)
            a = F.scaled_dot_product_attention(q, q, q, is_causal=True) * 0
            return F.dropout(x * self.scale, 0.25, True) + a.squeeze(1)

    model = fpdt_compile.optimize(Only(), codegen="eager", chunk_len=100)
    x = torch.ones(2, 1000, 64, dtype=torch.float64)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            outs.append(model(x))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    kept = outs[0] != 0
    assert torch.allclose(outs[0][kept], torch.tensor(1 / 0.75, dtype=torch.float64))
    for share in (
        kept.double().mean(),
        *kept.double().mean((0, 1)),
        *kept.double().mean((0, 2))[:50],
    ):
        assert abs(share.item() - 0.75) < 0.2
    assert abs(kept.double().mean().item() - 0.75) < 0.005
    both = (kept[:, 1:] & kept[:, :-1]).double().mean().item()
    assert abs(both - 0.75**2) < 0.01


def test_eval_has_no_dropout():
    model = decoder("opt", dropout=0.5)
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, codegen="eager", chunk_len=8)
    model.eval(), reference.eval()
    with torch.no_grad():
        ours, theirs = model(**batch(2, 21)).loss, reference(**batch(2, 21)).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    model.train()
    with torch.no_grad():
        assert abs(model(**batch(2, 21)).loss - theirs) > 1e-6
