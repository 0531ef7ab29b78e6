"""A loss outside of the model, in the same program: values, gradients, arguments, mistakes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, PlainTransformer, batch, pair, watching
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_gradients

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def policy_loss(logits, labels, advantages, clip=0.2):
    """A clipped policy gradient, token by token."""
    scores = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    ratio = (scores - scores.detach()).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    kept = (labels != -100).to(scores.dtype)
    gain = torch.minimum(ratio * advantages, clipped * advantages) * kept
    return -gain.sum() / kept.sum()


def plain_model() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = PlainTransformer().double().train()
    return model, copy.deepcopy(model)


def check(model, reference, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    model.zero_grad()
    reference.zero_grad()
    ours.backward()
    theirs.backward()
    compare_gradients(model, reference, ours.detach(), theirs.detach()).check(tolerance)


def labels_of(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[0, 4:9] = -100
    return labels


class LargestFloat(TorchDispatchMode):
    """The most elements any floating tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.largest = max(self.largest, result.numel())
        return result


def test_a_trainers_loss_as_in_the_readme():
    """The documented use: a Hugging Face model, labels that only the loss sees."""
    model, reference = pair("llama")
    keys = list(model.state_dict())
    loss = fpdt_compile.chunked_loss(model, shifted, strict=True, **EAGER)
    for length in (27, 18):
        ids = batch(2, length)["input_ids"]
        labels = labels_of(ids)
        ours = loss(input_ids=ids, labels=labels)
        theirs = shifted(reference(input_ids=ids).logits, labels)
        check(model, reference, ours, theirs, 2e-6)
    assert list(model.state_dict()) == keys
    assert {id(p) for p in loss.parameters()} == {id(p) for p in model.parameters()}
    (analysis,) = backend_of(loss).analyses
    assert analysis.cut.head.vocab_size == VOCAB and not analysis.cut.token_outputs


def test_logits_never_exist_whole():
    model, _ = pair("llama", torch.float32)
    length = 256
    ids = batch(1, length)["input_ids"]
    loss = fpdt_compile.chunked_loss(
        model, shifted, codegen="eager", chunk_len=32, head_len=16
    )
    loss(input_ids=ids, labels=ids).backward()  # compiles: fake tensors have every size
    with watching(LargestFloat()) as seen:
        loss(input_ids=ids, labels=ids).backward()
    weights = max(p.numel() for p in model.parameters())
    assert seen.largest < length * VOCAB and seen.largest <= max(weights, 64 * VOCAB)


def test_arguments_go_to_who_names_them():
    model, reference = pair("llama")
    loss = fpdt_compile.chunked_loss(model, policy_loss, strict=True, **EAGER)
    ids = batch(2, 27)["input_ids"]
    labels = labels_of(ids)
    mask = torch.ones(2, 27, dtype=torch.long)
    mask[0, 20:] = 0
    advantages = torch.randn(2, 27, dtype=torch.float64)
    for clip in (0.2, 0.1):
        arguments = dict(labels=labels, advantages=advantages, clip=clip)
        ours = loss(input_ids=ids, attention_mask=mask, **arguments)
        logits = reference(input_ids=ids, attention_mask=mask).logits
        check(model, reference, ours, policy_loss(logits, **arguments), 2e-6)


def test_whole_output_and_model_loss():
    """A first parameter of another name gets all of it; ``only_loss=()`` gives the model labels."""

    def regularized(output, factor):
        return output.loss + factor * output.logits.logsumexp(-1).square().mean()

    model, reference = pair("llama")
    loss = fpdt_compile.chunked_loss(
        model, regularized, only_loss=(), strict=True, **EAGER
    )
    inputs = batch(2, 27)
    ours = loss(**inputs, factor=0.01)
    check(model, reference, ours, regularized(reference(**inputs), 0.01), 2e-6)


def test_extras_beside_the_loss():
    def with_count(logits, labels):
        return shifted(logits, labels), {"targets": (labels != -100).sum()}

    model, reference = plain_model()
    loss = fpdt_compile.chunked_loss(model, with_count, strict=True, **EAGER)
    ids = batch(2, 27)["input_ids"]
    ours, extras = loss(ids=ids, labels=labels_of(ids))
    assert extras["targets"].item() == 2 * 27 - 5
    check(model, reference, ours, shifted(reference(ids), labels_of(ids)), 1e-9)


class TemperatureLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return shifted(logits / self.temperature, labels)


def test_a_loss_with_parameters():
    model, reference = plain_model()
    criterion = TemperatureLoss()
    other = copy.deepcopy(criterion)
    loss = fpdt_compile.chunked_loss(model, criterion, strict=True, **EAGER)
    ids = batch(2, 27)["input_ids"]
    check(model, reference, loss(ids=ids, labels=ids), other(reference(ids), ids), 1e-9)
    torch.testing.assert_close(criterion.temperature.grad, other.temperature.grad)


def test_evaluation_and_train_mode():
    model, reference = plain_model()
    loss = fpdt_compile.chunked_loss(model.eval(), shifted, **EAGER)
    assert not loss.training
    ids = batch(2, 27)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(
            loss(ids=ids, labels=ids), shifted(reference(ids), ids)
        )
    loss.train()
    assert model.training


MISTAKES = [
    (dict(model=3), "model=int"),
    (dict(loss_fn=3), "loss_fn=3"),
    (dict(loss_fn=lambda: 0), "first parameter"),
    (dict(loss_fn=lambda *, logits: 0), "first parameter"),
    (dict(only_loss="labels"), "only_loss='labels'"),
    (dict(only_loss=("label",)), "'label' is not a parameter"),
    (dict(token_dims={"lables": 1}), "'lables' is not a parameter"),
    (dict(chunk_len=0), "chunk_len=0"),
    (dict(chunks=3), "unknown option chunks=3"),
]


@pytest.mark.parametrize("given,message", MISTAKES)
def test_mistakes(given, message):
    arguments = {"model": PlainTransformer(), "loss_fn": shifted, **given}
    with pytest.raises(ValueError, match=message):
        fpdt_compile.chunked_loss(
            arguments.pop("model"), arguments.pop("loss_fn"), **arguments
        )


def test_a_model_that_is_optimized_already():
    model = fpdt_compile.optimize(PlainTransformer(), **EAGER)
    with pytest.raises(ValueError, match="optimized already"):
        fpdt_compile.chunked_loss(model, shifted)


def test_mistakes_at_a_call():
    loss = fpdt_compile.chunked_loss(PlainTransformer(), shifted, **EAGER)
    ids = batch(2, 27)["input_ids"]
    with pytest.raises(
        ValueError, match="label=.*neither the model nor loss_fn takes it"
    ):
        loss(ids=ids, label=ids)
    with pytest.raises(ValueError, match="labels: missing"):
        loss(ids=ids)
