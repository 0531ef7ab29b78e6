"""The longest sequence of which one training step fits a fixed memory, by implementation.

    python benchmarks/longest.py --limit-mib 768 --json longest.json --plot longest.png
    python benchmarks/longest.py --impl eager ours-disk --alst-python PATH

The reference model is loaded in a fresh process, whose private memory may then grow by ``limit``
(RLIMIT_DATA, compiling included) while it takes one step of forward and backward. Lengths are
doubled until a step does not fit, then the gap is halved until it is below ``--resolution``. A
length that takes longer than ``--seconds`` counts as not reached, and the table says so.
``ours-host`` keeps what is saved in main memory, ``ours-disk`` all of it in a file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

CONTENDER = Path(__file__).with_name("contender.py")
IMPLEMENTATIONS: dict[str, list[str]] = {
    "eager": ["--impl", "eager"],
    "checkpoint": ["--impl", "checkpoint"],
    "compile": ["--impl", "compile"],
    "alst": ["--impl", "alst"],
    "ours-host": ["--impl", "ours", "--offload", "host"],
    "ours-disk": ["--impl", "ours", "--offload", "disk"],
}
# What a process says whose memory is limited. Anything else that fails is an error of its own.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
    "mmap",
    "can't start new thread",
    "Resource temporarily unavailable",
)
STEP = 1024  # lengths are multiples


class Trial:
    """One step at one length: "fits", "memory" or "time"."""

    def __init__(self, length: int, outcome: str, seconds: float) -> None:
        self.length, self.outcome, self.seconds = length, outcome, seconds


def run_step(name: str, length: int, args: argparse.Namespace) -> Trial:
    python = args.alst_python if name == "alst" else Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="fpdt-longest-") as scratch:
        command = [str(python), str(CONTENDER), *IMPLEMENTATIONS[name]]
        command += ["--seq", str(length), "--layers", str(args.layers)]
        command += ["--limit-mib", str(args.limit_mib), "--warmup", "0"]
        command += ["--repeats", "0", "--result", f"{scratch}/result.json"]
        if name.startswith("ours") and args.chunk_len:
            command += ["--chunk-len", str(args.chunk_len)]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=args.seconds,
            )
        except subprocess.TimeoutExpired:
            return Trial(length, "time", time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if done.returncode == 0:
        return Trial(length, "fits", seconds)
    if done.returncode > 0 and not any(x in done.stdout for x in OUT_OF_MEMORY):
        raise SystemExit(f"{name} at S={length} failed:\n{done.stdout[-3000:]}")
    return Trial(length, "memory", seconds)


def longest(
    trial: Callable[[int], Trial], *, start: int, resolution: float
) -> tuple[int, str]:
    """The longest length that fits (0 if none does), and what stopped it there."""
    low, high, why = 0, start, ""
    while high:
        found = trial(high)
        if found.outcome != "fits":
            why = found.outcome
            break
        low, high = high, 2 * high
    while high - low > max(STEP, resolution * low):
        middle = (low + high) // 2 // STEP * STEP
        found = trial(middle)
        if found.outcome == "fits":
            low = middle
        else:
            high, why = middle, found.outcome
    return low, why


def draw(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([r["impl"] for r in rows], [r["longest"] for r in rows])
    axes.bar_label(bars, [f" {r['longest']}" for r in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"tokens in {args.limit_mib} MiB above the model")
    figure.savefig(args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--impl", nargs="+", choices=list(IMPLEMENTATIONS), metavar="NAME"
    )
    parser.add_argument("--limit-mib", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--chunk-len", type=int, help="ours")
    parser.add_argument("--start", type=int, default=STEP, help="first length")
    parser.add_argument("--resolution", type=float, default=0.125)
    parser.add_argument("--seconds", type=float, default=600, help="for one length")
    parser.add_argument("--alst-python", type=Path, help="a python with deepspeed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.impl and "alst" in args.impl and args.alst_python is None:
        parser.error("--impl alst needs --alst-python, a python with deepspeed")
    names = args.impl or [
        name for name in IMPLEMENTATIONS if name != "alst" or args.alst_python
    ]
    console, rows = Console(), []
    for name in names:
        trials: list[Trial] = []

        def trial(length: int, name: str = name, trials: list[Trial] = trials) -> Trial:
            trials.append(run_step(name, length, args))
            last = trials[-1]
            console.print(f"{name}, S={length}: {last.outcome}, {last.seconds:.0f} s")
            return last

        found, why = longest(trial, start=args.start, resolution=args.resolution)
        rows.append(
            {
                "impl": name,
                "longest": found,
                "stopped_by": why,
                "trials": [vars(t) for t in trials],
            }
        )
    first = rows[0]["longest"]
    table = Table(title=f"{args.limit_mib} MiB above the model", box=box.SIMPLE_HEAD)
    for heading in ("", "longest S", f"of {rows[0]['impl']}", "stopped by"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        ratio = f"{row['longest'] / first:.1f}" if first else "-"
        table.add_row(row["impl"], str(row["longest"]), ratio, row["stopped_by"])
    console.print(table)
    if args.json:
        settings = {"limit_mib": args.limit_mib, "layers": args.layers}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
    if args.plot:
        draw(rows, args)


if __name__ == "__main__":
    main()
