"""Loss and every gradient of Hugging Face decoders, optimized against untouched."""

from __future__ import annotations

import pytest
import torch
from tiny_models import DECODERS, batch, decoder, pair

import fpdt_compile
from fpdt_compile.testing import compare_training

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)


def analyses(model):
    return fpdt_compile.api.backend_of(model).analyses


@pytest.mark.parametrize("name", DECODERS)  # more of them: the zoo
def test_decoder_float64(name):
    model, reference = pair(name)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    for length in (21, 33):
        compare_training(model, reference, batch(2, length)).check(2e-6)
    (found,) = analyses(model)
    assert (
        len(found.attentions) == 2 and not found.mixers and found.cut.head is not None
    )
    assert fpdt_compile.compile_stats(model).captures == 1


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_decoder_float32(name):
    model, reference = pair(name, torch.float32)
    fpdt_compile.optimize(model, **EAGER)
    compare_training(model, reference, batch(2, 37)).check(2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(tied):
    model, reference = pair("llama", tie_word_embeddings=tied)
    fpdt_compile.optimize(model, **EAGER)
    compare_training(model, reference, batch(2, 19)).check(2e-6)


@pytest.mark.parametrize("frozen", ["embed", "self_attn", "layers.0", "lm_head"])
def test_frozen_parameters(frozen):
    model, reference = pair("llama")
    for m in (model, reference):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(frozen not in name)
    fpdt_compile.optimize(model, **EAGER)
    compare_training(model, reference, batch(2, 19)).check(2e-6)


@pytest.mark.parametrize(
    "name, side",
    [
        ("llama", "left"),
        ("llama", "right"),
        ("llama", "both"),
        ("mistral_window", "both"),
    ],
)
def test_padding(name, side):
    model, reference = pair(name)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    inputs = batch(3, 27)
    mask = torch.ones(3, 27, dtype=torch.long)
    if side in ("left", "both"):
        mask[1, :11] = 0
    if side in ("right", "both"):
        mask[2, 9:] = 0
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    inputs["attention_mask"] = mask
    compare_training(model, reference, inputs).check(2e-6)


def test_packed_documents():
    model, reference = pair("llama")
    fpdt_compile.optimize(model, strict=True, **EAGER)
    inputs = batch(1, 30)
    positions = torch.cat([torch.arange(n) for n in (3, 5, 13, 9)])[None]
    inputs["position_ids"] = positions
    compare_training(model, reference, inputs).check(2e-6)


def test_packed_documents_do_not_see_each_other():
    model = decoder("llama")
    fpdt_compile.optimize(model, **EAGER)
    inputs = batch(1, 30)
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    with torch.no_grad():
        call = dict(input_ids=inputs["input_ids"], position_ids=positions)
        before = model(**call).logits
        changed = inputs["input_ids"].clone()
        changed[0, 4] = 5
        after = model(input_ids=changed, position_ids=positions).logits
    assert (before[:, 12:] == after[:, 12:]).all()
    assert (before[:, 4:12] != after[:, 4:12]).any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model, reference = pair("llama")
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    fpdt_compile.optimize(model, strict=True, **EAGER)
    compare_training(model, reference, batch(2, 21)).check(2e-6)
    assert len(analyses(model)[0].attentions) == 2


def test_autocast_bfloat16():
    model, reference = pair("llama", torch.float32)
    fpdt_compile.optimize(model, **EAGER)
    inputs = batch(2, 37)

    def autocast_step(m):
        m.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = m(**inputs).loss
        loss.backward()
        return loss

    expected, actual = autocast_step(reference), autocast_step(model)
    from fpdt_compile.testing import compare_gradients

    compare_gradients(model, reference, actual.detach(), expected.detach()).check(5e-2)
    # The attention ran in bfloat16, and without autocast it is another graph.
    assert analyses(model)[0].attentions[0].node.meta["val"].dtype is torch.bfloat16
    compare_training(model, reference, inputs).check(2e-5)


def test_use_cache_left_on():
    """The default of every config; the cache is an output that training does not need."""
    model, reference = pair("llama", use_cache=True)
    fpdt_compile.optimize(model, strict=True, **EAGER)
    compare_training(model, reference, batch(2, 21)).check(2e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_inductor(name):
    model, reference = pair(name, torch.float32)
    fpdt_compile.optimize(model, strict=True, chunk_len=16, head_len=8)
    for length in (50, 33, 7, 17):
        compare_training(model, reference, batch(2, length)).check(5e-5)
    assert fpdt_compile.compile_stats(model).captures == 1
