"""Trains a small Llama on one long text, in the memory the plain model needs for a short one.

    python examples/quickstart.py

The text is the Python source of the running interpreter's standard library, byte by byte; the
model is Hugging Face's ``LlamaForCausalLM`` with random weights. One line makes it train in
chunks: ``fpdt_compile.optimize(model)``. Shown first: what the compiler found and what it will
do. Then training, with peak memory. At the end, the plain model is trained as many steps in
processes of its own, at the longest context that fits the memory that the chunked one took.

Memory is peak resident memory less what was resident once the model was built: activations,
gradients, optimizer state and, for the chunked model, everything the compiler needs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

try:
    import torch
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise SystemExit(
        f'{error}\nInstall what the examples need: pip install -e ".[examples]"'
    ) from error

LEARNING_RATE = 2e-3
SEARCH_GRID = 64  # the plain model's length is found to the 64th part of --seq-len


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a training run is judged by."""

    seq_len: int
    losses: list[float]
    tokens_per_s: float  # of the steps after the first, which compiles
    first_step_s: float
    memory_mib: float  # peak, above the loaded model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=16384, metavar="S")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--chunk-len", type=int, default=1024)
    parser.add_argument("--codegen", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--feed-forward-size", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-compare", action="store_true", help="leave the plain model out"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="train the plain model instead and print one line of JSON",
    )
    args = parser.parse_args()
    for name in ("steps", "layers", "hidden_size", "feed_forward_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.plain:
        args.chunk_len = None  # read by the chunked model only
    elif args.seq_len < SEARCH_GRID:
        parser.error(f"--seq-len must be at least {SEARCH_GRID}, got {args.seq_len}")
    if args.chunk_len is not None and not 1 <= args.chunk_len <= args.seq_len:
        parser.error(
            f"--chunk-len must lie between 1 and --seq-len ({args.seq_len}), "
            f"got {args.chunk_len}"
        )
    if args.heads < 1 or args.kv_heads < 1 or args.heads % args.kv_heads:
        parser.error(
            f"--kv-heads must divide --heads, got {args.kv_heads} and {args.heads}"
        )
    if args.head_dim < 2 or args.head_dim % 2:
        parser.error(f"--head-dim must be even (rotary pairs), got {args.head_dim}")
    return args


def library_text(num_bytes: int) -> torch.Tensor:
    """The first ``num_bytes`` of the standard library's sources, as token ids 0..255."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    if len(text) < num_bytes:
        raise SystemExit(
            f"The Python sources in {folder} hold {len(text)} bytes, {num_bytes} are "
            "needed: ask for fewer --steps or a shorter --seq-len"
        )
    return torch.tensor(memoryview(text)[:num_bytes].tolist(), dtype=torch.long)


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=args.feed_forward_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=max(args.seq_len, 2048),
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def peak_mib() -> float:
    """Peak resident memory of this process.

    Linux hands ``ru_maxrss`` on to a started program, VmHWM starts anew: the plain model's
    processes must not begin with this one's peak.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def train(
    model: LlamaForCausalLM,
    text: torch.Tensor,
    args: argparse.Namespace,
    *,
    loaded_mib: float,
    show_progress: bool,
) -> Outcome:
    """Ordinary training; nothing in here knows whether the model was optimized."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, seconds = [], []
    with tqdm(
        text.view(args.steps, 1, args.seq_len),
        desc="training",
        unit="step",
        disable=not show_progress,
    ) as progress:
        for ids in progress:
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            progress.set_postfix_str(
                f"loss {losses[-1]:.3f}, {args.seq_len / seconds[-1]:.0f} tokens/s, "
                f"peak {peak_mib() - loaded_mib:.0f} MiB above the model"
            )
    steady = seconds[1:] or seconds
    return Outcome(
        seq_len=args.seq_len,
        losses=losses,
        tokens_per_s=args.seq_len * len(steady) / sum(steady),
        first_step_s=seconds[0],
        memory_mib=peak_mib() - loaded_mib,
    )


def train_plain(seq_len: int) -> Outcome:
    """The unmodified model at ``seq_len``, in a fresh process with the same options."""
    # Of an option given twice, the last one counts.
    command = [sys.executable, __file__, *sys.argv[1:]]
    command += ["--plain", "--seq-len", str(seq_len)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The plain model failed at {seq_len} tokens:\n{done.stderr}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def longest_plain(memory_mib: float, seq_len: int) -> tuple[Outcome | None, Outcome]:
    """The plain model at the longest length within ``memory_mib``, and at one beyond it.

    Lengths are doubled until one takes more, then the gap is halved down to the grid. The first
    is None when even the shortest length takes more; the second is the first when the plain
    model fits at ``seq_len`` itself.
    """
    grid = seq_len // SEARCH_GRID
    fits: Outcome | None = None
    beyond: Outcome | None = None
    parts = 2
    low, high = 0, SEARCH_GRID
    with tqdm(desc="plain model", bar_format="{desc}") as progress:
        while beyond is None or high - low > 1:
            outcome = train_plain(parts * grid)
            within = outcome.memory_mib <= memory_mib
            progress.set_description_str(
                f"plain model: {outcome.seq_len} tokens take {outcome.memory_mib:.0f} MiB, "
                f"{'within' if within else 'more than'} {memory_mib:.0f}"
            )
            if within:
                fits, low = outcome, parts
            else:
                beyond, high = outcome, parts
            if within and parts == SEARCH_GRID:
                return fits, fits
            parts = min(2 * parts, SEARCH_GRID) if beyond is None else (low + high) // 2
    return fits, beyond


def compare(ours: Outcome, console: Console) -> None:
    """Finds the plain model's longest length and prints both side by side."""
    fits, beyond = longest_plain(ours.memory_mib, ours.seq_len)
    table = Table(title=f"After {len(ours.losses)} steps")
    table.add_column("model")
    for heading in ("context", "first loss", "last loss", "tokens/s", "peak MiB"):
        table.add_column(heading, justify="right")
    rows = {"fpdt_compile": ours, "plain, fits": fits}
    if beyond is not fits:
        rows["plain, too long"] = beyond
    for name, outcome in rows.items():
        if outcome is not None:
            table.add_row(
                name,
                str(outcome.seq_len),
                f"{outcome.losses[0]:.3f}",
                f"{outcome.losses[-1]:.3f}",
                f"{outcome.tokens_per_s:.0f}",
                f"{outcome.memory_mib:.0f}",
            )
    console.print(table)
    if fits is None:
        console.print(
            f"The plain model took more memory even at {beyond.seq_len} tokens: the context "
            f"is more than {ours.seq_len / beyond.seq_len:.1f} times as long."
        )
    elif beyond is fits:
        console.print(
            "The plain model fits at this length too: try a longer --seq-len."
        )
    else:
        console.print(
            f"In {ours.memory_mib:.0f} MiB above the model, the context is "
            f"{ours.seq_len / fits.seq_len:.1f} times as long as the plain model's."
        )


def main() -> None:
    args = parse_arguments()
    text = library_text(args.steps * args.seq_len)
    model = build_model(args)
    loaded_mib = peak_mib()
    if args.plain:
        outcome = train(model, text, args, loaded_mib=loaded_mib, show_progress=False)
        print(json.dumps(asdict(outcome)))
        return

    import fpdt_compile

    start = time.perf_counter()
    console = Console()
    ids = text[None, : args.seq_len]
    options = {"chunk_len": args.chunk_len, "codegen": args.codegen}
    print(fpdt_compile.explain(model, options=options, input_ids=ids, labels=ids))
    model = fpdt_compile.optimize(model, **options)
    ours = train(model, text, args, loaded_mib=loaded_mib, show_progress=True)
    console.print(
        f"First step, which compiles: {ours.first_step_s:.0f} s; then "
        f"{ours.tokens_per_s:.0f} tokens/s."
    )
    if not args.no_compare:
        compare(ours, console)
    console.print(f"Total: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
