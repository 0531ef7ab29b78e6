"""Losses and outputs: exact, and in chunks where what they sum is a sum over tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, PlainTransformer, batch, pair, watching
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from transformers.utils import output_capturing

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.recorded_outputs import recorder_restored
from fpdt_compile.testing import compare_training

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)
EXACT, CASTS = 1e-9, 2e-6
WEIGHTS = torch.linspace(0.5, 1.5, VOCAB, dtype=torch.float64)


def classify(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    scores, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(scores, targets, **options)


def entropy(**options: object) -> Callable[..., Tensor]:
    return lambda logits, labels: classify(logits, labels, **options)


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return classify(logits, labels, reduction="none")


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Per token, [B, S - 1]."""
    chosen = labels[:, 1:].clamp(min=0).unsqueeze(2)
    return logits[:, :-1].log_softmax(-1).gather(2, chosen).squeeze(2)


def preference(logits: Tensor, labels: Tensor) -> Tensor:
    """Direct preference: a comparison of the log probabilities of two sequences."""
    kept = labels[:, 1:] != -100
    scores = (log_probabilities(logits, labels) * kept).sum(-1)
    return -F.logsigmoid(0.1 * (scores[0] - scores[1]))


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return classify(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def masked_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels[:, 1:] != -100
    z = (logits[:, :-1].logsumexp(-1).square() * kept).sum() / kept.sum()
    return classify(logits, labels) + 1e-2 * z


def per_sequence(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over sequences of each sequence's mean."""
    rows = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (rows.sum(1) / (labels != -100).sum(1)).mean()


def weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    rows = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (rows * weights).sum() / weights.sum()


def shares(logits: Tensor, labels: Tensor) -> Tensor:
    """Class probabilities as targets."""
    targets = 0.9 * F.one_hot(labels.clamp(min=0), VOCAB).to(logits.dtype) + 0.1 / VOCAB
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def distill(logits: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def squares(logits: Tensor, target: Tensor) -> Tensor:
    """One mean square per token, summed over tokens that count."""
    return (logits - target).square().mean(-1).sum()


def negative(logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits[:, :-1].log_softmax(-1).flatten(0, 1)
    return F.nll_loss(scores, labels[:, 1:].flatten())


def two_shifts(logits: Tensor, labels: Tensor) -> Tensor:
    """Two tokens ahead, beside one ahead."""
    far = F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())
    return classify(logits, labels) + 0.3 * far


def differences(logits: Tensor, labels: Tensor) -> Tensor:
    """Reads neighbours: no sum over tokens of what one token gives."""
    return classify(logits, labels) + (logits[:, 1:] - logits[:, :-1]).square().mean()


def from_last(logits: Tensor, labels: Tensor) -> Tensor:
    """Means over a part whose rows are divided by how many there are."""
    rows = each(logits, labels) / (labels.shape[1] - 1)
    return rows.sum()


CHUNKED = {
    "mean": entropy(),
    "sum": entropy(reduction="sum"),
    "none, mean": lambda logits, labels: each(logits, labels).mean(),
    "none, focal": lambda logits, labels: (
        (1 - (-each(logits, labels)).exp()).square() * each(logits, labels)
    ).mean(),
    "smoothing": entropy(label_smoothing=0.1),
    "smoothing, sum": entropy(label_smoothing=0.1, reduction="sum"),
    "weights": entropy(weight=WEIGHTS),
    "weights, sum": entropy(weight=WEIGHTS, reduction="sum"),
    "weights, smoothing": entropy(weight=WEIGHTS, label_smoothing=0.1),
    "weights, none": lambda logits, labels: classify(
        logits, labels, weight=WEIGHTS, reduction="none"
    ).sum(),
    "ignore_index": lambda logits, labels: classify(
        logits, labels.where(labels != -100, 7), ignore_index=7
    ),
    "nll": negative,
    "z": z_loss,
    "z, masked": masked_z_loss,
    "preference": preference,
    "per sequence": per_sequence,
    "weighted": weighted,
    "shares": shares,
    "distill": distill,
    "squares": squares,
    "mse": lambda logits, target: F.mse_loss(logits, target),
    "unshifted": lambda logits, labels: F.cross_entropy(
        logits.flatten(0, 1), labels.flatten()
    ),
}
WHOLE = {"differences": differences, "two shifts": two_shifts, "from last": from_last}


class WithLoss(PlainTransformer):
    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, ids: Tensor, **given: Tensor) -> Tensor:
        return self.loss_fn(super().forward(ids), **given)


def inputs_for(loss_fn: Callable[..., Tensor], length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCAB, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, 4:13] = -100  # one chunk has no target in the first sequence
    labels[1, -3:] = -100
    shape = (2, length, VOCAB)
    dense = torch.randn(shape, generator=generator, dtype=torch.float64)
    known = dict(
        labels=labels, weights=dense[..., 0].abs(), teacher=dense, target=dense
    )
    names = list(inspect.signature(loss_fn).parameters)[1:]
    return {"ids": ids, **{name: known[name] for name in names}}


def run(loss_fn: Callable[..., Tensor], **options: object) -> nn.Module:
    torch.manual_seed(0)
    reference = WithLoss(loss_fn).double().train()
    model = fpdt_compile.optimize(copy.deepcopy(reference), **{**EAGER, **options})
    for length in (27, 18):
        inputs = inputs_for(loss_fn, length)
        compare_training(model, reference, inputs, loss_of=lambda x: x).check(EXACT)
    return model


@pytest.mark.parametrize("name", CHUNKED)
def test_losses_in_chunks(name: str) -> None:
    (analysis,) = backend_of(run(CHUNKED[name], strict=True)).analyses
    assert analysis.cut.head.vocab_size == VOCAB and analysis.cut.totals
    assert not analysis.cut.token_outputs  # logits do not leave the chunks


@pytest.mark.filterwarnings("ignore:fpdt_compile")
@pytest.mark.parametrize("name", WHOLE)
def test_other_losses_are_exact(name: str) -> None:
    """The blocks are cut whatever the loss is."""
    (analysis,) = backend_of(run(WHOLE[name])).analyses
    assert len(analysis.cut.blocks) == 2


@pytest.mark.parametrize("length", [3, 5, 9])
def test_short_shifted_sums(length: int) -> None:
    """The shift leaves one row, or a last chunk of one token."""
    torch.manual_seed(0)
    reference = WithLoss(preference).double().train()
    model = fpdt_compile.optimize(copy.deepcopy(reference), **EAGER)
    ids = torch.randint(3, VOCAB, (2, length))
    inputs = {"ids": ids, "labels": ids}
    compare_training(model, reference, inputs, loss_of=lambda x: x).check(EXACT)


class HeadAfterSlice(WithLoss):
    """Computes logits for the tokens that have a target only, as many trainers do."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.vocab_head(self.norm(x)[:, :-1])
        chosen = labels[:, 1:].clamp(min=0).unsqueeze(2)
        return self.loss_fn(logits.log_softmax(-1).gather(2, chosen).squeeze(2), labels)


def divided(scores: Tensor, labels: Tensor) -> Tensor:
    """The first token's label is -1: its row would divide by zero."""
    return (scores / (labels[:, 1:] + 1)).sum()


def summed(scores: Tensor, labels: Tensor) -> Tensor:
    return -scores.sum(-1).mean()


def overflowing(logits: Tensor, labels: Tensor) -> Tensor:
    return divided(log_probabilities(logits, labels), labels)


@pytest.mark.filterwarnings("ignore:fpdt_compile")
@pytest.mark.parametrize(
    "kind,loss_fn,chunked",
    [
        (WithLoss, overflowing, True),
        (HeadAfterSlice, summed, True),
        (HeadAfterSlice, divided, False),
    ],
)
def test_dropped_rows_give_no_gradient(
    kind: type[WithLoss], loss_fn: Callable[..., Tensor], chunked: bool
) -> None:
    """Whatever a dropped row computes; with the head's weight inside, not at any risk."""
    torch.manual_seed(0)
    reference = kind(loss_fn).double().train()
    model = fpdt_compile.optimize(copy.deepcopy(reference), **EAGER)
    ids = batch(2, 27)["input_ids"]
    labels = ids.clone()
    labels[:, 0] = -1
    compare_training(
        model, reference, {"ids": ids, "labels": labels}, loss_of=lambda x: x
    ).check(EXACT)
    (analysis,) = backend_of(model).analyses
    assert bool(analysis.cut.totals) is chunked


class Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("name", ["preference", "z, masked", "weights", "none, focal"])
def test_logits_exist_for_one_piece(name: str) -> None:
    torch.manual_seed(0)
    model = WithLoss(CHUNKED[name]).double().train()
    fpdt_compile.optimize(model, codegen="eager", chunk_len=32, head_len=16)
    inputs = inputs_for(CHUNKED[name], 256)
    model(**inputs).backward()
    with watching(Largest()) as seen:
        model(**inputs).backward()
    assert seen.elements <= max(
        2 * 16 * VOCAB, 2 * 256 * 32
    )  # a piece's logits; hidden states


def test_two_losses_with_different_scales() -> None:
    """Each total's gradient is its own: the output's logits are there too."""

    class Two(WithLoss):
        def forward(self, ids: Tensor, labels: Tensor):
            logits = PlainTransformer.forward(self, ids)
            return classify(logits, labels), logits.logsumexp(-1).square().mean()

    torch.manual_seed(0)
    reference = Two(classify).double().train()
    model = fpdt_compile.optimize(copy.deepcopy(reference), strict=True, **EAGER)
    inputs = inputs_for(z_loss, 27)
    for a, b in ((2.0, 0.3), (0.0, 1.0), (1.0, 0.0)):
        compare_training(
            model,
            reference,
            inputs,
            loss_of=lambda out, a=a, b=b: a * out[0] + b * out[1],
        ).check(EXACT)
    for which in (0, 1):
        compare_training(
            model, reference, inputs, loss_of=lambda out, which=which: out[which]
        ).check(EXACT)


def test_hidden_states_and_loss() -> None:
    """Hidden states leave whole; the head still runs in one pass, and unused ones get nothing."""
    model, reference = pair("llama")
    fpdt_compile.optimize(model, strict=True, **EAGER)
    inputs = {**batch(2, 27), "output_hidden_states": True}

    def pulled(out: object) -> Tensor:
        return 0.5 * out.loss + out.hidden_states[1].square().mean()

    compare_training(model, reference, inputs, loss_of=pulled).check(CASTS)
    compare_training(model, reference, inputs).check(CASTS)
    only = compare_training(
        model,
        reference,
        inputs,
        loss_of=lambda out: out.hidden_states[1].square().mean(),
    )
    only.check(CASTS)


def test_an_error_does_not_switch_recording_off() -> None:
    """transformers records into a global while Dynamo traces; an error must not leave it so."""
    recorder = output_capturing._active_collector
    with pytest.raises(RuntimeError, match="in the middle"), recorder_restored():
        recorder.compiling, recorder.global_var = True, {}
        raise RuntimeError("in the middle")
    assert not recorder.compiling and recorder.global_var is None
    model, _ = pair("llama")
    assert len(model(**batch(1, 9), output_hidden_states=True).hidden_states) == 3


def test_logits_returned_beside_the_loss() -> None:
    model, reference = pair("llama")
    fpdt_compile.optimize(model, outputs="all", strict=True, **EAGER)

    def both(out: object) -> Tensor:
        return out.loss + out.logits.square().mean()

    compare_training(model, reference, batch(2, 27), loss_of=both).check(CASTS)


SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
)


def test_classification_from_the_last_token_that_is_no_padding() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", num_key_value_heads=2, num_labels=3, use_cache=False, **SIZES
    )
    reference = AutoModelForSequenceClassification.from_config(config).double().train()
    model = fpdt_compile.optimize(copy.deepcopy(reference), **EAGER)
    ids = batch(2, 27)["input_ids"]
    ids[0, 19:] = 0
    inputs = dict(
        input_ids=ids, attention_mask=(ids != 0).long(), labels=torch.tensor([2, 0])
    )
    compare_training(model, reference, inputs).check(CASTS)
    (analysis,) = backend_of(model).analyses
    assert len(analysis.cut.blocks) == 2 and not analysis.rejections


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_masked_language_model(name: str) -> None:
    torch.manual_seed(0)
    dropouts = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = AutoConfig.for_model(name, max_position_embeddings=64, **dropouts, **SIZES)
    reference = AutoModelForMaskedLM.from_config(config).double().train()
    model = fpdt_compile.optimize(copy.deepcopy(reference), strict=True, **EAGER)
    inputs = batch(2, 27)
    labels = inputs["labels"].clone()
    labels[torch.rand(labels.shape) > 0.15] = -100
    labels[:, 5] = 11
    compare_training(model, reference, {**inputs, "labels": labels}).check(CASTS)
    (analysis,) = backend_of(model).analyses
    assert analysis.cut.head.vocab_size == VOCAB
