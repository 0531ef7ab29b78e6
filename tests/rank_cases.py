"""What every rank of a test does: train a tiny model shared by ranks, and the same model alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from tiny_models import batch, pair
from torch import nn
from zoo_entries import ENTRIES

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

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
