"""Models with two sequences, and with token counts that no input has as its size."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

WIDTH, HEADS = 16, 2
OPTIONS = dict(codegen="eager", chunk_len=8, head_len=4)


def loss_itself(output: Tensor) -> Tensor:
    return output


class Attend(nn.Module):
    """Pre-norm attention of ``x`` to ``y``, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.kv = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, **options: object) -> Tensor:
        q = self.q(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, **options)
        return x + self.out(a.transpose(1, 2).flatten(2))


class EncoderDecoder(nn.Module):
    """``form``: what is returned, and how the two sequences meet."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.encoder = nn.ModuleList(Attend() for _ in range(2))
        self.decoder = nn.ModuleList(Attend() for _ in range(2))
        self.cross = nn.ModuleList(Attend() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor, y: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        mask = seen[:, None, None, :]
        for layer in self.encoder:
            y = layer(y, y, attn_mask=mask)
        for own, cross in zip(self.decoder, self.cross, strict=True):
            x = own(x, x, is_causal=True)
            if self.form == "both":  # each sequence attends to the other as it was
                x, y = cross(x, y, attn_mask=mask), cross(y, x)
            else:
                x = cross(x, y, attn_mask=mask)
        logits = self.head(x).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-1)
        if self.form in ("both", "encoder loss"):
            loss = loss + y.square().mean()
        return loss


def pair(module: nn.Module, **options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    reference = module.double().train()
    model = copy.deepcopy(reference)
    return fpdt_compile.optimize(model, **{**OPTIONS, **options}), reference


class CausalAcross(nn.Module):
    """Query t of one sequence sees keys 0 to t of the other, by the operator's own flag."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.head = Attend(), nn.Linear(WIDTH, 11)

    def forward(self, x: Tensor, y: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        x = self.cross(x, y, is_causal=True)
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-1)


def test_causal_between_two_sequences():
    """A last chunk of one token is joined to the one before, so the two sequences' chunks end at
    different tokens; 24 and 16 are cut alike."""
    model, reference = pair(CausalAcross(), strict=True)
    for queries, keys in ((17, 24), (24, 17), (24, 16), (9, 30), (30, 9), (16, 16)):
        inputs = two_sequences(queries, keys)
        compare_training(model, reference, inputs, loss_of=loss_itself).check(1e-9)
    (found,) = backend_of(model).analyses
    assert len(found.attentions) == 1 and not found.mixers
    assert fpdt_compile.compile_stats(model).captures == 1


def two_sequences(queries: int, keys: int, batch: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    seen = torch.ones(batch, keys, dtype=torch.bool)
    seen[-1, keys // 2 :] = False
    labels = torch.randint(0, 11, (batch, queries))
    labels[0, :2] = -1
    return {
        "x": torch.randn(batch, queries, WIDTH, dtype=torch.float64),
        "y": torch.randn(batch, keys, WIDTH, dtype=torch.float64),
        "seen": seen,
        "labels": labels,
    }


@pytest.mark.parametrize("form", ["plain", "encoder loss", "both"])
@pytest.mark.parametrize("save", ["attention", "hidden"])
def test_encoder_decoder(form, save):
    model, reference = pair(EncoderDecoder(form), save=save)
    for queries, keys in ((21, 34), (5, 50), (40, 9)):
        step = compare_training(
            model, reference, two_sequences(queries, keys), loss_of=loss_itself
        )
        step.check(1e-11)
    (analysis,) = backend_of(model).analyses
    assert not analysis.rejections
    assert len(analysis.attentions) == (8 if form == "both" else 6)


def test_input_gradients_and_retained_graph():
    model, reference = pair(EncoderDecoder("encoder loss"))
    found = []
    for module in (model, reference):
        inputs = two_sequences(21, 34)
        leaves = [inputs[name].requires_grad_() for name in ("x", "y")]
        loss = module(**inputs)
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        found.append([*first, *torch.autograd.grad(loss * 3, leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_evaluation():
    model, reference = pair(EncoderDecoder("both"))
    inputs = two_sequences(21, 34)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs), reference(**inputs))


def test_frozen_encoder_gets_no_gradient():
    module = EncoderDecoder("plain")
    module.encoder.requires_grad_(False)
    model, reference = pair(module)
    step = compare_training(
        model, reference, two_sequences(21, 34), loss_of=loss_itself
    )
    step.check(1e-11)


class Tower(nn.Module):
    """Patches of an image by a convolution; the count of tokens is a number."""

    def __init__(self, form: str, patches: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.form = form
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        count = patches * patches + (form == "class token")
        self.places = nn.Parameter(torch.zeros(1, count, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, HEADS, 24, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        if self.form == "class token":
            x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x = x + self.places
        for layer in self.layers:
            x = layer(x)
        if self.form == "class token":
            x = torch.cat([x[:, 0], x[:, 1:].mean(1)], 0)
            return F.cross_entropy(self.head(x), labels.repeat(2))
        return F.cross_entropy(self.head(x.mean(1)), labels)


def image(size: int = 24) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "image": torch.randn(2, 3, size, size, dtype=torch.float64),
        "labels": torch.tensor([1, 3]),
    }


@pytest.mark.parametrize("form", ["class token", "mean"])
def test_tower_of_a_fixed_number_of_tokens(form):
    model, reference = pair(Tower(form))
    compare_training(model, reference, image(), loss_of=loss_itself).check(1e-11)
    (analysis,) = backend_of(model).analyses
    assert len(analysis.attentions) == 2 and not analysis.rejections


def test_a_token_count_that_is_also_the_width_is_exact_all_the_same():
    """16 tokens of width 16: whatever is taken for tokens, the numbers are right."""
    model, reference = pair(Tower("mean", patches=4))
    compare_training(model, reference, image(16), loss_of=loss_itself).check(1e-11)


class Waves(nn.Module):
    """Tokens by a convolution over a signal of any length: their count is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, WIDTH, 5, stride=3)
        self.layer = Attend()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, signal: Tensor, labels: Tensor) -> Tensor:
        x = self.conv(signal[:, None]).transpose(1, 2)
        x = self.layer(x, x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def test_tower_of_a_computed_number_of_tokens():
    model, reference = pair(Waves(), token_dims={"signal": 1})
    for length in (95, 200):
        torch.manual_seed(1)
        inputs = {
            "signal": torch.randn(2, length, dtype=torch.float64),
            "labels": torch.tensor([1, 3]),
        }
        compare_training(model, reference, inputs, loss_of=loss_itself).check(1e-11)
    (analysis,) = backend_of(model).analyses
    assert len(analysis.attentions) == 1 and not analysis.rejections


class Writes(nn.Module):
    """Writes into views of hidden states, and reads views made before the write."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(11, WIDTH)
        self.layer = Attend()
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        shifted = torch.zeros_like(ids)
        shifted[:, 1:] = ids[:, :-1].clone()
        shifted[:, 0] = 3
        x = self.embed(shifted)
        x = self.layer(x, x, is_causal=True)
        if self.form == "slice":
            x[..., :4] = x[..., 4:8] * 2
        elif self.form == "select":
            x[..., 0] = 0
        elif self.form == "old view":
            old = x[..., 2:]
            x.mul_(2)
            return (self.head(x).square().mean() + old.square().mean()) * 0.5
        elif self.form == "transposed":
            x.transpose(1, 2)[:, 3] += 1
        elif self.form == "reshape":
            x.reshape(*x.shape[:2], HEADS, -1)[..., 0, :].sigmoid_()
        elif self.form == "copy":
            x.transpose(1, 2).contiguous().mul_(2)  # a copy: x stays as it is
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    "form", ["slice", "select", "old view", "transposed", "reshape", "copy"]
)
def test_writes_into_views(form):
    model, reference = pair(Writes(form))
    torch.manual_seed(2)
    for length in (21, 34):
        inputs = {"ids": torch.randint(0, 11, (2, length))}
        compare_training(model, reference, inputs, loss_of=loss_itself).check(1e-11)
    (analysis,) = backend_of(model).analyses
    assert len(analysis.attentions) == 1 and not analysis.rejections


def test_write_into_an_input_runs_whole_and_is_seen_by_the_caller():
    class Model(Writes):
        def forward(self, ids: Tensor) -> Tensor:
            ids[:, 0] = 1
            return super().forward(ids)

    model, reference = pair(Model("select"))
    torch.manual_seed(2)
    ids = torch.randint(2, 11, (2, 21))
    with pytest.warns(UserWarning, match="writes into an input"):
        ours = model(first := ids.clone())
    theirs = reference(second := ids.clone())
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(first, second) and int(first[0, 0]) == 1
