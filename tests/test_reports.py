"""What a sceptical user found: each was wrong, or ran whole where it should not."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from test_rejections import Wrapped, run_both
from tiny_models import VOCAB, PlainBlock, batch, pair, plain_pair
from torch import Tensor, nn

import fpdt_compile
from fpdt_compile.testing import compare_gradients, compare_training

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)


@pytest.mark.parametrize(
    "expression",
    [
        lambda x: x * (x.shape[1] / 100.0),
        lambda x: x * math.sqrt(x.shape[1]),
        lambda x: x * x.shape[1] ** 0.5,
        lambda x: x.clamp(max=x.shape[1] / 50.0),
        lambda x: x + torch.full_like(x, float(x.shape[1])) * 0.01,
        lambda x: x + x.new_full((x.shape[0], x.shape[1], 1), x.shape[1]) * 0.01,
        lambda x: x / (x.shape[1] + 1),
    ],
)
@pytest.mark.parametrize("length", [21, 34])
def test_length_as_a_number_means_the_whole_length(expression, length):
    run_both(Wrapped(expression), length)


def quiet(call):
    """Run ``call``; fail on a warning that something runs whole."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fpdt_compile")
        return call()


def test_a_new_batch_size_stays_in_chunks():
    model, reference = pair("llama")
    fpdt_compile.optimize(model, strict=True, **EAGER)
    for size, length in ((2, 33), (3, 34), (5, 21)):
        quiet(
            lambda s=size, n=length: compare_training(model, reference, batch(s, n))
        ).check(2e-6)
    assert all(a.cut for a in fpdt_compile.api.backend_of(model).analyses)


class Ending(nn.Module):
    """The plain transformer with a loss of one's own."""

    def __init__(self, loss):
        super().__init__()
        self.inner = plain_pair()[0]
        self.loss = loss

    def forward(self, ids, labels):
        x = self.inner.embed(ids)
        for block in self.inner.blocks:
            x = block(x)
        return self.loss(self.inner.vocab_head(self.inner.norm(x)), labels, x)


def log_probabilities(logits, labels, x):
    chosen = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    return -(chosen * (labels > 5)).sum() / (labels > 5).sum()


CHUNKED = {
    "gathered log-probabilities": log_probabilities,
    "mse": lambda logits, labels, x: F.mse_loss(x, torch.zeros_like(x)),
    "huber, sum": lambda logits, labels, x: F.huber_loss(
        x, x.detach() * 0, reduction="sum"
    ),
    "two losses": lambda logits, labels, x: (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        + 1e-3 * logits.logsumexp(-1).square().mean()
    ),
    "per token, weighted": lambda logits, labels, x: (
        (
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            * (labels.flatten() % 3)
        ).sum()
        / (labels % 3).sum()
    ),
    "label smoothing": lambda logits, labels, x: F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("name", CHUNKED)
def test_losses_in_chunks(name):
    model = Ending(CHUNKED[name])
    found, warned = run_both(model, 29)
    assert not warned and found.cut is not None and len(found.attentions) == 2


TAILS = {
    "shifted log-probabilities": lambda logits, labels, x: log_probabilities(
        logits[:, :-1], labels[:, 1:], x
    ),
    "last token": lambda logits, labels, x: logits[:, -1].square().mean(),
    "product of totals": lambda logits, labels, x: (
        x.std(1).mean() * logits.sum().square() * 1e-6
    ),
    "sorted": lambda logits, labels, x: x.sort(1).values[:, 3].sum(),
    "class weights": lambda logits, labels, x: F.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        weight=torch.linspace(0.1, 1, VOCAB, dtype=logits.dtype),
    ),
}


@pytest.mark.parametrize("name", TAILS)
def test_an_end_we_do_not_know_leaves_the_blocks_in_chunks(name):
    found, warned = run_both(Ending(TAILS[name]), 29)
    assert found.cut is not None and len(found.attentions) == 2
    assert len(found.cut.blocks) >= 2


def test_sliding_cache_left_on():
    model, reference = pair("gemma3_text", use_cache=True)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    quiet(lambda: compare_training(model, reference, batch(2, 29))).check(2e-6)
    assert fpdt_compile.api.backend_of(model).analyses[0].cut is not None


def test_backend_with_everything_dynamic():
    model, reference = plain_pair()
    compiled = torch.compile(model, backend="fpdt", dynamic=True, options=EAGER)
    for size, length in ((2, 33), (3, 21)):
        inputs = batch(size, length)
        call = (inputs["input_ids"], inputs["labels"])
        for m in (model, reference):
            m.zero_grad(set_to_none=True)
        ours, theirs = quiet(lambda c=call: compiled(*c)), reference(*call)
        ours.backward()
        theirs.backward()
        compare_gradients(model, reference, ours.detach(), theirs.detach()).check(1e-9)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_square_mask_of_two_dimensions(dtype):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain_pair()[0]

        def forward(self, ids, labels, mask):
            x = self.inner.embed(ids)
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            a = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            x = x + a.transpose(1, 2).flatten(2)
            return F.cross_entropy(
                self.inner.vocab_head(x).flatten(0, 1), labels.flatten()
            )

    model = Masked()
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    for length in (21, 33):
        mask = torch.rand(length, length) < 0.6
        if dtype is not torch.bool:
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
        inputs = batch(2, length)
        call = {"ids": inputs["input_ids"], "labels": inputs["labels"], "mask": mask}
        compare_training(model, reference, call, loss_of=lambda x: x).check(1e-9)
    assert fpdt_compile.compile_stats(model).captures == 1


def test_complex_rotary():
    def rotate(x):
        angles = torch.outer(torch.arange(x.shape[1]), torch.linspace(1, 0.1, 16))
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
        pairs = torch.view_as_complex(x.unflatten(-1, (16, 2)))
        return torch.view_as_real(pairs * turns).flatten(2)

    found, warned = run_both(Wrapped(rotate))
    assert not warned and len(found.attentions) == 2


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.detach(),
        lambda x: torch.cat([x[..., :16].detach(), x[..., 16:]], -1),
    ],
    ids=["whole", "half"],
)
def test_a_detach_between_blocks(cut):
    """What lies before a detach gets no gradient, as in the plain model: None, not zeros."""
    found, warned = run_both(Wrapped(cut), 29)
    assert not warned and len(found.attentions) == 2


class Breaking(nn.Module):
    """Stops in the middle to look at a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(PlainBlock(32, 4, 2) for _ in range(3))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        if x.abs().max() > 1e6:
            x = x / 2
        for block in self.blocks[1:]:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_a_model_that_breaks_trains_right_and_explain_says_where():
    torch.manual_seed(0)
    reference = Breaking().double()
    model = fpdt_compile.optimize(
        copy.deepcopy(reference), codegen="eager", chunk_len=8
    )
    ids = torch.randint(0, VOCAB, (2, 21))
    found = fpdt_compile.explain(model, ids)
    assert [g["attentions_chunked"] for g in found.graphs] == [1, 2]
    first, last = found.graphs
    assert "test_reports.py" in first["ends_at"] and "branches on" in first["reason"]
    assert last["ends_at"] == "" and "breaks into 2 graphs" in str(found)
    compare_training(model, reference, {"ids": ids}, loss_of=lambda x: x).check(1e-11)
