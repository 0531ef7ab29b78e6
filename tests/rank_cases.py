"""What every rank of a test does: train a tiny model shared by ranks, and the same model alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from odd_models import SequenceFirst, SharedProjection
from tiny_models import PlainBlock, batch, pair
from torch import nn
from zoo_entries import ENTRIES

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_gradients, compare_training, train_once

OPTIONS = dict(codegen="eager", chunk_len=4, head_len=3, strict=True)


def compare(
    name: str,
    seq_parallel: int,
    *,
    length: int = 37,
    rows: int = 2,
    dtype: torch.dtype = torch.float64,
    inputs: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Two training steps at different lengths; the largest differences and what moved."""
    model, reference = pair(name, dtype, **changes)
    fpdt_compile.optimize(
        model, seq_parallel=seq_parallel, **{**OPTIONS, **(options or {})}
    )
    found = dict(loss=0.0, grad=0.0, worst="")
    for n in (length, max(2, length // 2)):
        given = batch(rows, n)
        for key, value in (inputs or {}).items():
            given[key] = value[..., :n].expand(rows, n)
        step = compare_training(model, reference, given)
        found["loss"] = max(found["loss"], step.loss_error)
        if step.grad_error >= found["grad"]:
            found.update(grad=step.grad_error, worst=step.worst)
    return {**found, **facts_of(model)}


def check(found: list[dict[str, Any]], tolerance: float) -> None:
    """On every rank as on one process, and on all ranks the same."""
    for x in found:
        assert x["loss"] <= tolerance and x["grad"] <= tolerance, x["worst"]
        assert x["exchanges"] > 0 and x["chunked"]
        assert x["gradient"] == found[0]["gradient"]


def compare_entry(name: str, seq_parallel: int, **options: Any) -> dict[str, Any]:
    """The same for an architecture of the zoo."""
    entry = ENTRIES[name]
    reference = entry.model()
    model = copy.deepcopy(reference)
    fpdt_compile.optimize(
        model, seq_parallel=seq_parallel, **{**OPTIONS, "strict": False, **options}
    )
    found = dict(loss=0.0, grad=0.0, worst="", tolerance=entry.tolerance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in entry.lengths:
            step = compare_training(
                model, reference, entry.call(length), loss_of=entry.loss_of
            )
            found["loss"] = max(found["loss"], step.loss_error)
            if step.grad_error >= found["grad"]:
                found.update(grad=step.grad_error, worst=step.worst)
    return {**found, **facts_of(model)}


def facts_of(model: nn.Module) -> dict[str, Any]:
    backend = backend_of(model)
    return {
        "exchanges": backend.ranks.counters.exchanges,
        "sent": dict(backend.ranks.counters.sent_bytes),
        "chunked": all(x.cut is not None for x in backend.analyses),
        "gradient": {
            n: p.grad.double().sum().item()
            for n, p in model.named_parameters()
            if p.grad is not None
        },
    }


def sharded(
    name: str, size: int, chunk_len: int = 4, length: int = 37
) -> dict[str, Any]:
    """Every rank passes its own tokens; ids and labels only, so positions come from the graph."""
    model, reference = pair(name)
    options = {**OPTIONS, "chunk_len": chunk_len, "inputs": "sharded"}
    fpdt_compile.optimize(model, seq_parallel=size, **options)
    whole = batch(2, length)
    mine = fpdt_compile.shard_tokens(whole, seq_parallel=size, chunk_len=chunk_len)
    expected = train_once(reference, whole, lambda x: x.loss)
    actual = train_once(model, mine, lambda x: x.loss)
    step = compare_gradients(model, reference, actual, expected)
    with torch.no_grad():
        logits = fpdt_compile.unshard_tokens(
            model(mine["input_ids"]).logits, chunk_len=chunk_len
        )
        want = reference(whole["input_ids"]).logits
    found = dict(loss=step.loss_error, grad=step.grad_error, worst=step.worst)
    found["logits"] = (logits - want).abs().max().item()
    return {**found, **facts_of(model)}


def layers(size: int, chunk_len: int = 4, length: int = 37) -> dict[str, Any]:
    """Decoder layers compiled one at a time, hidden states in and out."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    reference = nn.ModuleList(PlainBlock(32, 4, 2) for _ in range(2)).double()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (size,))
    options = dict(
        seq_parallel=mesh, inputs="sharded", chunk_len=chunk_len, codegen="eager"
    )
    for layer in model:
        layer.compile(backend="fpdt", dynamic=True, options=options)
    x = torch.randn(2, length, 32, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    shard = dict(seq_parallel=mesh, chunk_len=chunk_len)
    mine = fpdt_compile.shard_tokens(x, **shard).clone().requires_grad_()
    a, b = whole, mine
    for one, other in zip(reference, model):
        a, b = one(a), other(b)
    weight = torch.randn_like(a)
    (a * weight).sum().backward()
    (b * fpdt_compile.shard_tokens(weight, **shard)).sum().backward()
    out = fpdt_compile.unshard_tokens(b.detach(), chunk_len=chunk_len)
    grad = fpdt_compile.unshard_tokens(mine.grad, chunk_len=chunk_len)
    return {
        "out": (out - a).abs().max().item(),
        "input": (grad - whole.grad).abs().max().item(),
        "weights": max(
            (p.grad - q.grad).abs().max().item()
            for p, q in zip(model.parameters(), reference.parameters())
        ),
    }


def odd_spellings(size: int) -> list[float]:
    """q is k, values used elsewhere too, [S, B, d]."""
    worst = []
    for kind in (SharedProjection, SequenceFirst):
        torch.manual_seed(0)
        reference = kind().train()
        model = copy.deepcopy(reference)
        fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
        ids = batch(2, 21)["input_ids"]
        step = compare_training(
            model, reference, {"ids": ids, "labels": ids.roll(-1, 1)}, loss_of=same
        )
        worst += [step.loss_error, step.grad_error]
    return worst


def same(loss: Any) -> Any:
    return loss


def scaled_losses(size: int) -> list[float]:
    """A loss that is divided by the caller's count, and labels that are shifted already."""
    model, reference = pair("llama")
    fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
    given, worst = batch(2, 21), []
    for extra in (
        {"num_items_in_batch": torch.tensor(17)},
        {"shift_labels": given["labels"].roll(-1, 1)},
    ):
        for train in (True, False):
            model.train(train)
            reference.train(train)
            step = compare_training(model, reference, {**given, **extra})
            worst += [step.loss_error, step.grad_error]
    return worst
