"""What every rank does in tests of failures, of other wrappers, and of a whole training."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_cases import OPTIONS
from tiny_models import PlainBlock, batch, pair, plain_pair
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.timeline import (
    exchange_counters,
    recorded_timeline,
    write_timeline,
)


def largest(pairs: Any) -> float:
    return max((a - b).abs().max().item() for a, b in pairs)


def data_parallel(size: int) -> dict[str, float]:
    """Two replicas of ``size`` ranks with a batch each, gradients averaged by DDP, clipped."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "sp"))
    model, reference = plain_pair()
    fpdt_compile.optimize(model, seq_parallel=mesh["sp"], **OPTIONS)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    batches = [batch(2, 23, seed=i) for i in range(world // size)]
    mine = batches[mesh["dp"].get_local_rank()]
    losses = [reference(x["input_ids"], x["labels"]) for x in batches]
    sum(losses).div(len(losses)).backward()
    wrapped(mine["input_ids"], mine["labels"]).backward()
    grads = [
        (p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters())
    ]
    found = {"grad": largest(grads)}
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
    return {
        **found,
        "norm": abs(norms[0].item() - norms[1].item()),
        "clipped": largest(grads),
    }


def data_parallel_as_frameworks_do(**options: Any) -> dict[str, Any]:
    """DDP that looks for unused parameters or fixes its graph wraps every output; three steps."""
    model, reference = pair("llama", torch.float64)
    for m in (model, reference):
        m.unused = nn.Linear(2, 2).double()
        m.unused.requires_grad_("find_unused_parameters" in options)
    fpdt_compile.optimize(model, **OPTIONS)
    wrapped = DistributedDataParallel(model, **options)
    found: dict[str, Any] = {"grad": 0.0}
    for step in range(3):
        batches = [batch(2, 23, seed=2 * step + i) for i in range(2)]
        model.zero_grad()
        reference.zero_grad()
        output = wrapped(**batches[dist.get_rank()])
        output.loss.backward()
        sum(reference(**x).loss for x in batches).div(2).backward()
        trained = [n for n, p in reference.named_parameters() if p.grad is not None]
        ours = dict(model.named_parameters())
        grads = [(ours[n].grad, reference.get_parameter(n).grad) for n in trained]
        found["grad"] = max(found["grad"], largest(grads))
    found.update(
        logits=(tuple(output.logits.shape), output.logits.requires_grad),
        captures=fpdt_compile.compile_stats(model).captures,
        unused=any(
            p.grad is not None and bool(p.grad.any()) for p in model.unused.parameters()
        ),
    )
    return found


def int_groups(first: int, second: int) -> dict[str, Any]:
    """Two optimized models in one process with groups of their own."""
    found = {}
    for size in (first, second):
        model, reference = pair("llama", num_hidden_layers=1)
        fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
        for m in (model, reference):
            m(**batch(1, 19)).loss.backward()
        found[size] = largest(
            (p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters())
        )
        found[f"group {size}"] = backend_of(model).ranks.size
    return found


def fsdp(size: int, folder: str) -> dict[str, float]:
    """Layers compiled one by one, each sharded by FSDP2 over the same ranks; saved and loaded."""
    torch.manual_seed(0)
    reference = nn.Sequential(*(PlainBlock(32, 4, 2) for _ in range(2))).double()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (size,))
    shard = dict(seq_parallel=mesh, chunk_len=4)
    for layer in model:
        fpdt_compile.optimize(
            layer,
            **shard,
            inputs="sharded",
            codegen="eager",
            reduce_gradients=False,
            strict=True,
        )
        fully_shard(layer, mesh=mesh)
        layer.set_gradient_divide_factor(1.0)  # a sum: each rank has its tokens' part
    fully_shard(model, mesh=mesh)
    x = torch.randn(2, 37, 32, dtype=torch.float64)
    weight = torch.randn_like(x)
    (reference(x) * weight).sum().backward()
    mine, part = (fpdt_compile.shard_tokens(t, **shard) for t in (x, weight))
    (model(mine) * part).sum().backward()
    grads = [
        (p.grad.full_tensor(), q.grad)
        for p, q in zip(model.parameters(), reference.parameters())
    ]
    difference = largest(grads)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (model, reference)]
    saved = {k: v.full_tensor().clone() for k, v in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return {
        "grad": difference,
        "norm": abs(norms[0].full_tensor().item() - norms[1].item()),
        "loaded": largest(
            (v.full_tensor(), saved[k]) for k, v in model.state_dict().items()
        ),
    }


def accumulate(size: int) -> float:
    """Two batches into one gradient, the losses scaled."""
    model, reference = pair("llama")
    fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
    for m in (model, reference):
        for i, scale in enumerate((0.5, 8.0)):
            (m(**batch(1, 19, seed=i)).loss * scale).backward()
    grads = zip(model.parameters(), reference.parameters())
    return largest((p.grad / 8, q.grad / 8) for p, q in grads)


def ignored(size: int) -> dict[str, float]:
    """All labels of the first chunks are ignored, and evaluation."""
    model, reference = pair("llama")
    fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
    given = batch(1, 40)
    given["labels"] = given["labels"].clone()
    given["labels"][:, :21] = -100
    losses = []
    for m in (model, reference):
        loss = m(**given).loss
        loss.backward()
        with torch.no_grad():
            losses.append((loss.item(), m.eval()(**given).loss.item()))
    grads = zip(model.parameters(), reference.parameters())
    return {
        "grad": largest((p.grad, q.grad) for p, q in grads),
        "train": abs(losses[0][0] - losses[1][0]),
        "eval": abs(losses[0][1] - losses[1][1]),
    }


def trained(size: int, **options: Any) -> float:
    model, _ = pair("llama")
    fpdt_compile.optimize(model, seq_parallel=size, **{**OPTIONS, **options})
    loss = model(**batch(2, 21)).loss
    loss.backward()
    return loss.item()


def differs(what: str, size: int) -> None:
    """Something is not the same on the last rank."""
    odd = dist.get_rank() == size - 1
    changes: dict[str, Any] = dict(num_hidden_layers=1)
    options = dict(OPTIONS)
    length, rows, seed = 21, 2, 0
    if odd and what == "model":
        changes["intermediate_size"] = 40
    elif odd and what == "plan":
        options["chunk_len"] = 5
    elif odd and what == "length":
        length = 25
    elif odd and what == "rows":
        rows = 3
    elif odd and what == "batch":
        seed = 1
    model, _ = pair("llama", **changes)
    if odd and what == "weights":
        with torch.no_grad():
            next(model.parameters()).add_(1e-3)
    fpdt_compile.optimize(model, seq_parallel=size, **options)
    model(**batch(rows, length, seed=seed)).loss.backward()


class Reversed(nn.Module):
    """Mixes tokens, and has no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).flip(1) * x


def not_shared(size: int) -> None:
    """Nothing in the model can be cut."""
    model = Reversed()
    fpdt_compile.optimize(model, seq_parallel=size, codegen="eager", chunk_len=4)
    model(torch.randn(2, 12, 8, requires_grad=True)).sum().backward()


def dies(size: int) -> None:
    """The last rank ends in the middle of a training step."""
    model, _ = pair("llama")
    fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
    model(**batch(2, 21)).loss.backward()
    if dist.get_rank() == size - 1:
        os._exit(3)
    model(**batch(2, 21)).loss.backward()


def adapters(size: int) -> dict[str, float]:
    """Low-rank adapters beside frozen weights."""
    model, reference = pair("llama")
    for m in (model, reference):
        m.requires_grad_(False)
        for layer in m.model.layers:
            layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    reference.load_state_dict(model.state_dict())
    fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
    for m in (model, reference):
        m(**batch(2, 23)).loss.backward()
    pairs = list(zip(model.parameters(), reference.parameters()))
    return {
        "grad": largest((p.grad, q.grad) for p, q in pairs if q.grad is not None),
        "frozen": sum(p.grad is not None for p, q in pairs if q.grad is None),
    }


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = base
        kind = dict(dtype=base.weight.dtype)
        self.down = nn.Parameter(torch.randn(base.in_features, 2, **kind))
        self.up = nn.Parameter(torch.randn(2, base.out_features, **kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


def dropout(size: int) -> dict[str, Any]:
    """Ranks with generators in other states drop the same, and the same as one process."""
    changes = dict(attention_dropout=0.3, attn_implementation="eager")
    alone, model = (pair("llama", **changes)[0] for _ in range(2))
    fpdt_compile.optimize(alone, **OPTIONS)
    fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
    losses = []
    for m in (alone, model):
        torch.manual_seed(7 + (m is model) * dist.get_rank())
        loss = m(**batch(2, 23)).loss
        loss.backward()
        losses.append(loss.item())
    grads = zip(alone.parameters(), model.parameters())
    difference = max(
        abs(losses[0] - losses[1]), largest((p.grad, q.grad) for p, q in grads)
    )
    return {"loss": losses[1], "difference": difference}


def volume(size: int, rows: int = 2, length: int = 64) -> dict[str, dict[str, int]]:
    """Elements that one rank sends to others, counted, and what they should be."""
    heads, groups, width, num_layers = 4, 2, 32, 2
    model, _ = plain_pair(torch.float32, heads=heads, groups=groups, layers=num_layers)
    options = {**OPTIONS, "chunk_len": 8}
    fpdt_compile.optimize(model, seq_parallel=size, **options)
    given = batch(rows, length)
    model(given["input_ids"], given["labels"]).backward()
    counters = backend_of(model).ranks.counters
    sent = {k: v for k, v in counters.sent_bytes.items() if k not in ("sum", "gather")}
    # This rank's tokens, all heads but its own share: N d / P * (P - 1) / P.
    one = rows * length * width // size * (size - 1) // size * num_layers
    key = one * groups // heads
    flags = (length // 8 // size) * num_layers * (size - 1) * 16
    formula = {
        "QKV": 2 * (one + 2 * key) * 4,  # forward, and recomputed in the backward
        "OUT": one * 4,
        "GRAD_OUT": 2 * one * 4 + flags,  # with the saved output
        "GRAD_QKV": (one + 2 * key) * 4 + 3 * flags,
    }
    return {"sent": sent, "formula": formula}


def shapes(size: int, rows: int, length: int, heads: int, groups: int) -> float:
    """Any batch, length and heads, causal attention, chunks of 3 tokens a rank."""
    model, reference = plain_pair(width=4 * heads, heads=heads, groups=groups, layers=1)
    fpdt_compile.optimize(model, seq_parallel=size, **{**OPTIONS, "chunk_len": 3})
    given = batch(rows, length)
    losses = []
    for m in (model, reference):
        loss = m(given["input_ids"], given["labels"])
        loss.backward()
        losses.append(loss.item())
    grads = zip(model.parameters(), reference.parameters())
    return max(abs(losses[0] - losses[1]), largest((p.grad, q.grad) for p, q in grads))


def timeline(size: int, path: str) -> None:
    model, _ = pair("llama", num_hidden_layers=1)
    fpdt_compile.optimize(model, seq_parallel=size, **OPTIONS)
    with recorded_timeline(model) as events:
        model(**batch(1, 23)).loss.backward()
    counters = exchange_counters(model)
    assert 0 < counters.exposed_seconds <= counters.in_flight_seconds
    if dist.get_rank() == 0:
        write_timeline(events, path)
    dist.barrier()
