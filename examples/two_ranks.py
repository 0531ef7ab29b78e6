"""Trains the quickstart's Llama on two ranks that share every sequence, beside one process.

    torchrun --nproc-per-node 2 examples/two_ranks.py

Every rank runs this same code with the same batch; ``seq_parallel`` is all that differs from one
process. Losses are printed side by side: they agree to rounding. Each rank holds only its tokens'
activations, and attends with its heads; what moved between the ranks is printed at the end.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

try:
    from quickstart import build_model, library_text
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise SystemExit(
        f'{error}\nInstall what the examples need: pip install -e ".[examples]"'
    ) from error

import fpdt_compile
from fpdt_compile.timeline import exchange_counters

LEARNING_RATE = 2e-3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=2048, metavar="S")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--chunk-len", type=int, default=256, help="per rank")
    parser.add_argument("--codegen", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--feed-forward-size", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("seq_len", "steps", "chunk_len", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def train(
    args: argparse.Namespace, text: torch.Tensor, seq_parallel: int
) -> tuple[list[float], torch.nn.Module]:
    """Ordinary training; every rank does the same."""
    model = build_model(args)
    fpdt_compile.optimize(
        model,
        seq_parallel=seq_parallel,
        chunk_len=args.chunk_len,
        codegen=args.codegen,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for ids in text.view(args.steps, 1, args.seq_len):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, model


def main() -> None:
    args = parse_arguments()
    if "RANK" not in os.environ:
        raise SystemExit(
            "Start one process per rank: torchrun --nproc-per-node 2 examples/two_ranks.py"
        )
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    text = library_text(args.steps * args.seq_len)
    shared, model = train(args, text, size)
    alone, _ = train(args, text, 1)
    if dist.get_rank() == 0:
        table = Table(title=f"{args.seq_len} tokens")
        for heading in ("step", "one process", f"{size} ranks", "difference"):
            table.add_column(heading, justify="right")
        for step, (a, b) in enumerate(zip(alone, shared, strict=True)):
            table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
        console = Console()
        console.print(table)
        counters = exchange_counters(model)
        mib = sum(counters.sent_bytes.values()) / 2**20
        console.print(
            f"rank 0 sent {mib:.1f} MiB in {counters.exchanges} exchanges; it waited "
            f"{counters.exposed_seconds:.2f} s for them"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
