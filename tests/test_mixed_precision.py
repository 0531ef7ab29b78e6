"""Autocast, GradScaler and models in half precision, as people and Accelerate set them up.

Gradients are held against those in float32: the optimized model may be no further from them than
the unmodified one is, under the same autocast.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny_models import VOCAB, batch, pair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

import fpdt_compile
from fpdt_compile.api import backend_of

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)
BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = 1.5  # of the unmodified model's own distance from float32


def autocast(dtype: torch.dtype, enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


class RMSNorm(nn.Module):
    """In float32, whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotated(x: Tensor) -> Tensor:
    """In float32, so that queries and keys are wider than values."""
    turns = torch.arange(x.shape[2])[:, None] * torch.linspace(1, 0.1, x.shape[3])
    return x * turns.cos() + x.flip(-1) * turns.sin()


def spelled(q: Tensor, k: Tensor, v: Tensor, fill: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, fill), -1, dtype=torch.float32) @ v


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = RMSNorm(32), RMSNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if "rotary" in self.kind:
            q, k = rotated(q), rotated(k)
        if "spelled" in self.kind:
            return spelled(q, k, v, torch.finfo(torch.float16).min)
        if "wide scores" in self.kind:
            with autocast(BF16, False):
                q, k = q.float(), k.float()
                scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
                later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
                weights = scores.masked_fill(later, -1e9).softmax(-1)
            return weights @ v
        if "island" in self.kind:
            with autocast(BF16, False):
                return F.scaled_dot_product_attention(
                    q.float(), k.float(), v.float(), is_causal=True
                )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        hidden = F.silu(self.up(self.norm2(x)))
        if "island" in self.kind:
            with autocast(BF16, False):
                return x + F.linear(hidden.float(), self.down.weight, self.down.bias)
        return x + self.down(hidden)


class Model(nn.Module):
    """``kind`` names what is in it; ``inside`` is the type of an autocast in its forward."""

    def __init__(self, kind: str, inside: torch.dtype | None = None) -> None:
        super().__init__()
        self.kind, self.inside = kind, inside
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.norm, self.head = RMSNorm(32), nn.Linear(32, VOCAB)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.inside is not None:
            with autocast(self.inside):
                loss, logits = self.compute(input_ids, labels)
            return {"loss": loss.float(), "logits": logits.float()}
        loss, logits = self.compute(input_ids, labels)
        return {"loss": loss, "logits": logits}

    def compute(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            if "checkpoint" in self.kind:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        logits = self.head(self.norm(x))
        if "wide logits" in self.kind:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def gradients(model: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad()
    (model(**batch(2, 45))["loss"] * scale).backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == parameter.dtype
    return {n: p.grad.double() / scale for n, p in model.named_parameters()}


def distance(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Relative, of all gradients as one vector."""
    off = sum((found[n] - true[n]).square().sum() for n in true)
    return math.sqrt(off / sum(x.square().sum() for x in true.values()))


def check_rounding(
    model: nn.Module, reference: nn.Module, true: nn.Module, scale: float = 1.0
) -> None:
    exact = gradients(true)
    theirs = distance(gradients(reference, scale), exact)
    assert 1e-4 < theirs < 0.1  # it did round, and not to noise
    assert distance(gradients(model, scale), exact) < ROUNDING * theirs


def models(kind: str, inside: torch.dtype | None, **options: object):
    """(to be optimized, untouched, untouched and in float32)."""
    torch.manual_seed(0)
    reference = Model(kind, inside)
    true = copy.deepcopy(reference)
    true.inside = None
    model = copy.deepcopy(reference)
    fpdt_compile.optimize(model, strict=True, **{**EAGER, **options})
    return model, reference, true


KINDS = [
    "plain",
    "rotary",
    "rotary, spelled",
    "rotary, wide scores",
    "island, wide logits",
    "checkpoint, island",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, chunk_len", [(BF16, 8), (FP16, 8), (BF16, 64)])
def test_autocast_inside_the_forward_and_float32_outputs(kind, dtype, chunk_len):
    model, reference, true = models(kind, dtype, chunk_len=chunk_len)
    check_rounding(model, reference, true, scale=256.0 if dtype is FP16 else 1.0)
    (found,) = backend_of(model).analyses
    assert len(found.attentions) == 2 and found.cut.head is not None
    # Queries and keys wait in the type that attention reads, not in a wider one.
    wanted = torch.float32 if kind in WIDE else dtype
    values = [x.meta["val"] for a in found.attentions for x in (a.q, a.k, a.v)]
    assert {x.dtype for x in values} == {wanted}


WIDE = ("rotary, wide scores", "island, wide logits", "checkpoint, island")


@pytest.mark.parametrize("kind", ["rotary", "island, wide logits"])
def test_autocast_of_the_caller(kind):
    model, reference, true = models(kind, None)
    exact = gradients(true)
    with autocast(BF16):
        theirs, ours = (distance(gradients(m), exact) for m in (reference, model))
    assert ours < ROUNDING * theirs
    # Another state is another graph, with the casts of that state.
    assert distance(gradients(model), exact) < 1e-5


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_model_is_made_half_after_it_was_optimized(dtype):
    model, reference, true = models("plain", None)
    for m in (model, reference):
        m.to(dtype)
    check_rounding(model, reference, true, scale=256.0 if dtype is FP16 else 1.0)


def test_compiled_bodies():
    model, reference, true = models("rotary", BF16, codegen="inductor")
    check_rounding(model, reference, true)


def scaled_training(
    model: nn.Module, scale: float, num_steps: int
) -> tuple[Tensor, float]:
    """The head's weights and the scale after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(num_steps):
        optimizer.zero_grad()
        scaler.scale(model(**batch(2, 45))["loss"]).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model.head.weight.detach().clone(), scaler.get_scale()


def test_grad_scaler():
    model, reference, _ = models("plain", FP16)
    before = model.head.weight.detach().clone()
    # An overflow skips the step and lowers the scale.
    after, scale = scaled_training(model, 2.0**40, 1)
    assert torch.equal(after, before) and scale == 2.0**39
    ours, theirs = (scaled_training(m, 2.0**10, 4) for m in (model, reference))
    assert ours[1] == theirs[1] == 2.0**10
    assert not torch.equal(ours[0], before)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-3)


@pytest.fixture
def accelerator():
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("first", ["optimize", "prepare"])
def test_accelerate(accelerator, first):
    model, reference = pair("llama", torch.float32)
    true = copy.deepcopy(reference)
    if first == "optimize":
        model = accelerator.prepare(fpdt_compile.optimize(model, strict=True, **EAGER))
    else:
        model = fpdt_compile.optimize(accelerator.prepare(model), strict=True, **EAGER)
    reference = accelerator.prepare(reference)
    check_rounding(model, reference, true)
    output = model(**batch(2, 45))
    assert output.logits.dtype is torch.float32
    accelerator.backward(output.loss)
    assert fpdt_compile.compile_stats(model).captures == 1
    assert len(backend_of(model).analyses[0].attentions) == 2


def test_trainer_in_bfloat16(tmp_path: Path):
    """Losses of three steps as without us."""
    rows = [{k: v[0] for k, v in batch(1, 40, seed=i).items()} for i in range(6)]

    def train(model: nn.Module) -> list[float]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            num_train_epochs=1,
            bf16=True,
            use_cpu=True,
            optim="sgd",
            learning_rate=0.1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        return [x["loss"] for x in trainer.state.log_history if "loss" in x]

    model, reference = pair("llama", torch.float32)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    ours, theirs = train(model), train(reference)
    assert len(ours) == 3 and ours == pytest.approx(theirs, rel=2e-3)
    assert len(backend_of(model).analyses[0].attentions) == 2
    AcceleratorState._reset_state(True)
