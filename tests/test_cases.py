"""Public reports of what goes wrong in other tools (see each test), shown right here
on one process."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, batch, pair, plain_pair
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpdt_compile
from fpdt_compile.runtime import attention
from fpdt_compile.runtime.autograd import StepRunner
from fpdt_compile.testing import compare_gradients, compare_training

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor any operator makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x._base is None:
                self.largest = max(
                    self.largest, x.untyped_storage().nbytes() // x.itemsize
                )
        return out


def watch_steps(monkeypatch, mode):
    """Enter ``mode`` inside each step: Dynamo does not run compiled code under a mode of
    outside."""
    original = StepRunner.__call__
    steps = []

    def call(self, *inputs):
        steps.append(1)
        with mode:
            return original(self, *inputs)

    monkeypatch.setattr(StepRunner, "__call__", call)
    return steps


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_no_tensor_of_s_by_s(name, monkeypatch):
    """transformers#48925, unsloth-zoo#582: compiled models materialize the mask."""
    model, _ = pair(name, torch.float32)
    fpdt_compile.optimize(model, codegen="eager", chunk_len=32, head_len=32)
    model(**batch(1, 64)).loss.backward()
    length, seen = 512, LargestTensor()
    steps = watch_steps(monkeypatch, seen)
    loss = model(**batch(1, length)).loss
    with seen:
        loss.backward()
    assert steps and seen.largest < length * length // 8


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_a_users_own_mask_is_exact(batched, additive):
    """NeMo Automodel#2622: a mask that is not understood is never replaced by causal."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 32, dtype=torch.float64)
            self.qkv = nn.Linear(32, 96, dtype=torch.float64)
            self.head = nn.Linear(32, VOCAB, dtype=torch.float64)

        def forward(self, ids, labels, mask):
            x = self.embed(ids)
            q, k, v = self.qkv(x).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return F.cross_entropy(
                self.head(x + a.transpose(1, 2).flatten(2)).flatten(0, 1),
                labels.flatten(),
            )

    torch.manual_seed(0)
    model = Masked()
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    inputs = batch(2, 21)
    mask = torch.rand(2 if batched else 1, 1, 21, 21) < 0.3
    if additive:
        mask = torch.randn(mask.shape, dtype=torch.float64).masked_fill(
            mask, -torch.inf
        )
    call = {"ids": inputs["input_ids"], "labels": inputs["labels"], "mask": mask}
    compare_training(model, reference, call, loss_of=lambda x: x).check(1e-9)


def test_batch_equal_to_sequence_length():
    """AutoSP insert_attention_all_to_all: sizes that happen to be equal are not the same."""
    model, reference = pair("llama")
    fpdt_compile.optimize(model, strict=True, **EAGER)
    for shape in ((8, 8), (4, 4), (32, 32), (8, 20)):
        compare_training(model, reference, batch(*shape)).check(2e-6)


@pytest.mark.filterwarnings("ignore:fpdt_compile")
def test_batch_equal_to_sequence_length_all_dynamic():
    model, reference = plain_pair()
    compiled = torch.compile(model, backend="fpdt", dynamic=True, options=EAGER)
    # 8 is also the chunk length: a batch of that size must not become the same symbol.
    for size, length in ((8, 8), (8, 20), (20, 20), (3, 9), (4, 30), (5, 8)):
        inputs = batch(size, length)
        call = (inputs["input_ids"], inputs["labels"])
        for m in (model, reference):
            m.zero_grad(set_to_none=True)
        ours, theirs = compiled(*call), reference(*call)
        ours.backward()
        theirs.backward()
        compare_gradients(model, reference, ours.detach(), theirs.detach()).check(1e-9)


def test_low_rank_adapters_on_a_frozen_base():
    """torchtune#2709: frozen branches, LoRA, parameters without a gradient."""

    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.a = nn.Linear(base.in_features, 3, bias=False, dtype=torch.float64)
            self.b = nn.Linear(3, base.out_features, bias=False, dtype=torch.float64)

        def forward(self, x):
            return self.base(x) + 2.0 * self.b(self.a(x))

    model, _ = pair("llama")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.mlp.down_proj = Lora(layer.mlp.down_proj)
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    compare_training(model, reference, batch(2, 21)).check(2e-6)
    assert sum(p.grad is not None for p in model.parameters()) == 8


@pytest.mark.parametrize("save,times", [("attention", 1), ("hidden", 2)])
def test_attention_forward_runs_once(save, times, monkeypatch):
    """pytorch#161889, axolotl#3786: with save="attention" attention is not recomputed."""
    calls = []
    original = attention.ATTEND
    monkeypatch.setattr(
        attention, "ATTEND", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    model, _ = plain_pair(layers=2)
    fpdt_compile.optimize(model, save=save, **EAGER)
    inputs = batch(1, 32)
    model(inputs["input_ids"], inputs["labels"]).backward()
    tiles = 4 * 5 // 2  # causal: 4 chunks
    assert len(calls) == times * 2 * tiles


def test_new_packing_does_not_recompile():
    """transformers#37908."""
    model, reference = pair("llama")
    fpdt_compile.optimize(model, **EAGER)
    for parts in ((5, 16), (30,), (1, 2, 3, 4), (17, 9, 9)):
        inputs = batch(1, sum(parts))
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in parts])[None]
        compare_training(model, reference, inputs).check(2e-6)
    stats = fpdt_compile.compile_stats(model)
    assert stats.captures == 1


def test_head_pieces_do_not_live_together(monkeypatch):
    """titan#3646, pytorch#136702: logits exist for one piece at a time."""
    model, _ = plain_pair(dtype=torch.float32, vocab=4096, width=16, heads=2, groups=1)
    fpdt_compile.optimize(model, codegen="eager", chunk_len=64, head_len=16)
    inputs = batch(1, 256)
    call = (inputs["input_ids"], inputs["labels"])
    model(*call).backward()
    live, peak = {}, [0]

    class Live(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if (
                    isinstance(x, torch.Tensor)
                    and x._base is None
                    and x.numel() >= 16 * 4096
                ):
                    key = x.untyped_storage().data_ptr()
                    live[id(x)] = (key, x.numel())
                    weakref.finalize(x, live.pop, id(x), None)
            now = sum(dict(live.values()).values())
            peak[0] = max(peak[0], now)
            return out

    steps = watch_steps(monkeypatch, Live())
    model(*call)
    assert steps
    # The weight's gradient (4096 x 16) and a few arrays of one piece's logits; whole logits
    # would be 16 pieces.
    assert peak[0] <= 6 * 16 * 4096


def test_grad_scaler_and_clipping():
    """Megatron-LM#673: gradients come out with the right scale through the usual helpers."""
    model, reference = plain_pair()
    fpdt_compile.optimize(model, **EAGER)
    inputs = batch(2, 21)
    norms = []
    for m in (model, reference):
        m.zero_grad(set_to_none=True)
        (m(inputs["input_ids"], inputs["labels"]) * 1024.0).backward()
        for p in m.parameters():
            p.grad.div_(1024.0)
        norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    torch.testing.assert_close(*norms, rtol=1e-9, atol=0)
    compare_gradients(model, reference, norms[0], norms[1]).check(1e-9)
