"""Frozen weights: nothing of their gradient is computed or kept, counted in a training step."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from tiny_models import VOCAB, batch, pair, watching
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpdt_compile
from fpdt_compile.runtime.gradients import ParameterGradients
from fpdt_compile.testing import compare_training

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)
CASTS = 2e-6
RANK = 3


class Lora(nn.Module):
    """A linear with a trained product of rank 3 added."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        dtype = base.weight.dtype
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype)
        self.b = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def with_adapters(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.mlp.down_proj = Lora(layer.mlp.down_proj)
    return model


class Products(TorchDispatchMode):
    """Shapes of the results of matrix products, and of what is written in place by one."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in (
            "aten::mm",
            "aten::addmm",
            "aten::addmm_",
            "aten::bmm",
        ):
            self.shapes[tuple(result.shape)] += 1
        return result


def weight_gradients(model: nn.Module, weights: list[Tensor], **inputs: Tensor) -> int:
    """Products in a step (the head's backward runs in the forward) with a weight's shape."""
    model(**inputs).loss.backward()  # compiles
    model.zero_grad()
    with watching(Products()) as seen:
        model(**inputs).loss.backward()
    shapes = {tuple(w.shape) for w in weights} | {tuple(w.shape)[::-1] for w in weights}
    return sum(count for shape, count in seen.shapes.items() if shape in shapes)


def matrices(model: nn.Module, *, frozen: bool) -> list[Tensor]:
    return [
        p for p in model.parameters() if p.dim() == 2 and p.requires_grad is not frozen
    ]


@pytest.mark.parametrize("save", ["attention", "hidden"])
def test_no_gradient_of_a_frozen_weight_is_computed(save: str) -> None:
    """Batch 1 and pieces of 8 and 4 rows: no activation has a weight's shape."""
    inputs = batch(1, 29)
    model, reference = pair("llama")
    trained = fpdt_compile.optimize(copy.deepcopy(model), save=save, **EAGER)
    assert weight_gradients(trained, matrices(trained, frozen=False), **inputs) > 0

    torch.manual_seed(1)
    model = with_adapters(model)
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, save=save, strict=True, **EAGER)
    assert weight_gradients(model, matrices(model, frozen=True), **inputs) == 0
    assert weight_gradients(model, matrices(model, frozen=False), **inputs) > 0
    compare_training(model, reference, inputs).check(CASTS)


def test_no_accumulator_for_a_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept between chunks is as large as the gradients that come out, no larger."""
    torch.manual_seed(1)
    model = with_adapters(pair("llama")[0])
    fpdt_compile.optimize(model, **EAGER)
    model(**batch(2, 27)).loss.backward()
    held: dict[str, int] = {}
    add = ParameterGradients.add

    def counted(self, name, parameter, slot, results):
        add(self, name, parameter, slot, results)
        held.update({key: total.numel() for key, total in self.sums.items()})

    monkeypatch.setattr(ParameterGradients, "add", counted)
    model(**batch(2, 27)).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(held) == len(trained)
    assert sum(held.values()) == sum(p.numel() for p in trained)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_everything_below_the_first_adapter_runs_forward_only() -> None:
    """Adapters in the last layer: the first one has no backward at all."""
    torch.manual_seed(1)
    model, _ = pair("llama")
    model.requires_grad_(False)
    model.model.layers[1].mlp.down_proj = Lora(model.model.layers[1].mlp.down_proj)
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    inputs = batch(2, 27)
    compare_training(model, reference, inputs).check(CASTS)
    calls: Counter[str] = Counter()

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    loss = model(**inputs).loss
    with Calls():
        loss.backward()
    assert not any("flash_attention" in name for name in calls), calls


def test_trained_embeddings_only() -> None:
    """The opposite: every block passes gradients on and none has a weight of its own."""
    model, reference = pair("llama", tie_word_embeddings=False)
    for which in (model, reference):
        which.requires_grad_(False)
        which.get_input_embeddings().requires_grad_(True)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    compare_training(model, reference, batch(2, 27)).check(CASTS)
    assert model.get_input_embeddings().weight.grad.shape == (VOCAB, 32)


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_peft(kind: str) -> None:
    """Adapters of the peft library, over the library's own wrapper."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "down_proj"]
    if kind == "ia3":
        config = peft.IA3Config(
            target_modules=targets,
            feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        )
    else:
        config = peft.LoraConfig(
            r=RANK,
            target_modules=targets,
            lora_dropout=0.0,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
    model, _ = pair("llama")
    model = peft.get_peft_model(model, config).double().train()
    reference = copy.deepcopy(model)
    keys = list(model.state_dict())
    fpdt_compile.optimize(model, strict=True, **EAGER)
    for length in (27, 18):
        compare_training(model, reference, batch(2, length)).check(CASTS)
    assert list(model.state_dict()) == keys
    inputs = batch(1, 29)
    assert weight_gradients(model, matrices(model, frozen=True), **inputs) == 0
