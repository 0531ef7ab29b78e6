"""Runs the reference step by one implementation in this process and writes what it measured.

Started by ``step.py``, once per measurement, so that no implementation profits or suffers from
what another left in memory. In: the implementation's name and the shape. Out: one JSON object in
``--result``. Every implementation is measured by the same lines of code, in :func:`measure`:

- ``loaded_mib``: peak resident memory once the model is built and imports are done;
- ``first_s``: the first step, which compiles where the implementation does;
- ``step_s``: the timed steps, after ``--warmup`` more;
- ``above_mib``: peak resident memory after all steps, less ``loaded_mib``.

Peak memory is ``ru_maxrss`` of this process alone. It survives ``exec``, so the parent has to
be smaller than the loaded model: ``step.py`` imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from reference_model import (
    VOCAB_SIZE,
    reference_model,
    reference_tokens,
    watched_gradient,
)
from torch import Tensor
from transformers import LlamaForCausalLM

ALST_PIECE_LEN = 1024  # tokens per piece of a tiled op
Step = Callable[[Tensor], float]
Builder = Callable[[LlamaForCausalLM, argparse.Namespace], Step]


def step_of(call: Callable[..., Any]) -> Step:
    """The step a user writes: loss from ids and labels, backward."""

    def step(ids: Tensor) -> float:
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    return step


def eager(model: LlamaForCausalLM, args: argparse.Namespace) -> Step:
    return step_of(model)


def checkpoint(model: LlamaForCausalLM, args: argparse.Namespace) -> Step:
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    return step_of(model)


def compiled(model: LlamaForCausalLM, args: argparse.Namespace) -> Step:
    return step_of(torch.compile(model))


def alst(model: LlamaForCausalLM, args: argparse.Namespace) -> Step:
    """The pieces of Arctic Long Sequence Training that run on one CPU process.

    Tiled feed-forward, tiled logits and loss, and gradient checkpointing, which its tiled ops
    need in the reentrant form.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (
        TiledFusedLogitsLoss,
        TiledMLP,
    )
    from transformers.models.llama.modeling_llama import LlamaMLP

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": True}
    )
    num_pieces = max(1, args.seq // ALST_PIECE_LEN)
    whole_forward = LlamaMLP.forward

    def tiled_forward(self: LlamaMLP, x: Tensor) -> Tensor:
        weights = [self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight]
        return TiledMLP.apply(whole_forward, self, x, num_pieces, weights)

    LlamaMLP.forward = tiled_forward

    def loss_of_piece(owner: LlamaForCausalLM, x: Tensor, labels: Tensor) -> Tensor:
        logits = owner.lm_head(x).float().view(-1, VOCAB_SIZE)
        return F.cross_entropy(logits, labels.view(-1), reduction="sum")

    def step(ids: Tensor) -> float:
        hidden = model.model(input_ids=ids)[0]
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
        total = TiledFusedLogitsLoss.apply(
            loss_of_piece,
            model,
            hidden,
            labels,
            None,
            num_pieces,
            [model.lm_head.weight],
            "sum",
        )
        loss = total / (ids.shape[1] - 1)
        loss.backward()
        return loss.item()

    return step


def hand(model: LlamaForCausalLM, args: argparse.Namespace) -> Step:
    from hand_schedule import DEFAULT_CHUNK_LEN, HandSchedule

    chunk_len = args.chunk_len or min(DEFAULT_CHUNK_LEN, args.seq)
    return HandSchedule(model, chunk_len=chunk_len, save=args.save)


def ours(model: LlamaForCausalLM, args: argparse.Namespace) -> Step:
    import fpdt_compile

    return step_of(
        fpdt_compile.optimize(
            model,
            chunk_len=args.chunk_len,
            save=args.save,
            order=args.order,
            offload=args.offload,
            lookahead=args.lookahead,
            codegen=args.codegen,
        )
    )


BUILDERS: dict[str, Builder] = {
    "eager": eager,
    "checkpoint": checkpoint,
    "compile": compiled,
    "alst": alst,
    "hand": hand,
    "ours": ours,
}


def peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def limit_memory(limit_mib: int) -> None:
    """Let private memory (RLIMIT_DATA) grow by so much from here on. An allocation beyond fails in
    this process; a compiler that it starts has a limit of its own."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = [x for x in status if x.startswith("VmData:")]
    limit = int(line.split()[1]) * 1024 + (limit_mib << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def store_numbers(model: torch.nn.Module) -> dict[str, Any]:
    """Ours only: bytes copied by the last step, and seconds of copies that it waited for."""
    from fpdt_compile.timeline import store_counters

    counters = store_counters(model)
    return {
        "written_bytes": counters.written_bytes,
        "read_bytes": counters.read_bytes,
        "busy_s": counters.times.busy,
        "exposed_s": counters.times.exposed,
    }


def compile_counts(model: torch.nn.Module) -> dict[str, int]:
    """Ours only: how much was captured and compiled."""
    import fpdt_compile

    stats = fpdt_compile.compile_stats(model)
    return {
        "captures": stats.captures,
        "bodies": stats.bodies,
        "body_compiles": stats.body_compiles,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = reference_model(num_layers=args.layers)
    step = BUILDERS[args.impl](model, args)
    ids = reference_tokens(args.seq)
    loaded_mib = peak_mib()
    if args.limit_mib is not None:
        limit_memory(args.limit_mib)

    seconds = []
    loss = float("nan")
    for _ in range(1 + args.warmup + args.repeats):
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = step(ids)
        seconds.append(time.perf_counter() - start)
    above_mib = peak_mib() - loaded_mib

    return {
        "impl": args.impl,
        "seq": args.seq,
        "layers": args.layers,
        "loss": loss,
        "grad_norm": watched_gradient(model).norm().item(),
        "first_s": seconds[0],
        "step_s": seconds[1 + args.warmup :],
        "loaded_mib": loaded_mib,
        "above_mib": above_mib,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "counts": compile_counts(model) if args.impl == "ours" else None,
        "stores": store_numbers(model) if args.impl == "ours" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--impl", required=True, choices=list(BUILDERS))
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--chunk-len", type=int)
    parser.add_argument("--save", default="attention")
    parser.add_argument("--offload", default="host")
    parser.add_argument("--order", default="queries")
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument("--codegen", default="inductor")
    parser.add_argument("--limit-mib", type=int, help="data memory above the model's")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    args.result.write_text(json.dumps(measure(args)))


if __name__ == "__main__":
    main()
