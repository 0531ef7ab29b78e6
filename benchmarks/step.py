"""Compares one training step of the reference model between implementations, on the CPU.

    python benchmarks/step.py --alst-python PATH --json step.json
    python benchmarks/step.py --seq 8192 16384 --impl hand ours --rounds 3
    python benchmarks/step.py --seq 16384 --impl ours --vary save=hidden offload=disk
    python benchmarks/step.py --compile-time --layers 2 12
    python benchmarks/step.py --memory-growth 8192 16384 32768

Every measurement is a fresh process (``contender.py``) with the same weights, the same tokens
and an empty compiler cache. Times of one machine move by a third between runs: compare ratios
inside one run, and use ``--rounds`` to run all contenders in turn several times and take medians.

``alst`` are the pieces of DeepSpeed's Arctic Long Sequence Training that run on one process;
they need a python with deepspeed, torch and transformers, named by ``--alst-python``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

COMPILING = ("compile", "hand", "ours")
IMPLEMENTATIONS = ("eager", "checkpoint", "compile", "alst", "hand", "ours")
CONTENDER = Path(__file__).with_name("contender.py")
ERROR_LINES = 15
Run = dict[str, Any]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--compile-time",
        action="store_true",
        help="compile seconds of `compile` and `ours` per depth, and region bodies of ours",
    )
    mode.add_argument(
        "--memory-growth",
        type=positive,
        nargs="+",
        metavar="S",
        help="bytes per token that ours adds between these lengths",
    )
    parser.add_argument("--impl", nargs="+", choices=IMPLEMENTATIONS, metavar="NAME")
    parser.add_argument("--seq", type=positive, nargs="+", metavar="S")
    parser.add_argument("--layers", type=positive, nargs="+", default=[4])
    parser.add_argument("--chunk-len", type=positive, help="hand and ours")
    saves = ["hidden", "attention", "qkv"]
    parser.add_argument("--save", choices=saves, default="attention")
    parser.add_argument("--order", choices=["queries", "keys"], default="queries")
    parser.add_argument("--offload", choices=["host", "disk", "none"], default="host")
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument(
        "--vary",
        nargs="+",
        metavar="OPTION=VALUE",
        help="ours only: rows of ours with these changes beside it, as in save=hidden",
    )
    parser.add_argument("--codegen", default="inductor", help="ours: region bodies")
    parser.add_argument("--repeats", type=positive, default=3, help="timed steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps after the first")
    parser.add_argument("--rounds", type=positive, default=1)
    parser.add_argument(
        "--alst-python", type=Path, metavar="PATH", help="a python with deepspeed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    args = parser.parse_args()

    if args.alst_python is not None and not args.alst_python.is_file():
        parser.error(f"--alst-python: no such file: {args.alst_python}")
    if args.impl and "alst" in args.impl and args.alst_python is None:
        parser.error("--impl alst needs --alst-python, a python with deepspeed")
    if args.compile_time:
        # Compile time hardly depends on the length; a short one keeps 12 layers short.
        default_seq, default_impl = [2048], ("compile", "ours")
        args.chunk_len = args.chunk_len or 512
    elif args.memory_growth:
        if len(set(args.memory_growth)) < 2:
            parser.error("--memory-growth needs at least two lengths")
        if args.seq:
            parser.error("--memory-growth names the lengths; leave --seq out")
        default_seq, default_impl = sorted(set(args.memory_growth)), ("ours",)
    else:
        default_seq, default_impl = [8192], IMPLEMENTATIONS
    args.seq = args.seq or default_seq
    args.alst_left_out = False
    for change in args.vary or ():
        if "=" not in change:
            parser.error(f"--vary: {change} is not OPTION=VALUE")
    if args.impl is None:
        args.impl = list(default_impl)
        if "alst" in default_impl and args.alst_python is None:
            args.impl.remove("alst")
            args.alst_left_out = True
    args.impl += [f"ours {change}" for change in args.vary or ()]
    return args


class ContenderFailed(RuntimeError):
    """A contender's process did not finish; the message is the end of what it wrote."""


def run_contender(impl: str, seq: int, layers: int, args: argparse.Namespace) -> Run:
    """One measurement in a fresh process with cold compiler caches."""
    python = args.alst_python if impl == "alst" else Path(sys.executable)
    name, *changes = impl.split()  # "ours save=hidden"
    with tempfile.TemporaryDirectory(prefix="fpdt-bench-") as scratch:
        result = Path(scratch) / "result.json"
        command: list[str | Path] = [python, CONTENDER, "--result", result]
        options = {
            "impl": name,
            "seq": seq,
            "layers": layers,
            "chunk-len": args.chunk_len,
            "save": args.save,
            "order": args.order,
            "offload": args.offload,
            "lookahead": args.lookahead,
            "codegen": args.codegen,
            "warmup": args.warmup,
            "repeats": args.repeats,
        }
        options.update(change.split("=", 1) for change in changes)
        for option, value in options.items():
            if value is not None:
                command += [f"--{option}", str(value)]
        cache = Path(scratch) / "cache"
        done = subprocess.run(
            command,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode or not result.exists():
            tail = "\n".join(done.stdout.splitlines()[-ERROR_LINES:])
            how = f"exit {done.returncode}"
            if done.returncode == -9:
                how = "killed, most likely out of memory"
            raise ContenderFailed(f"{impl} at S={seq}: {how}\n{tail}")
        return {**json.loads(result.read_text()), "impl": impl}


def run_all(args: argparse.Namespace, console: Console) -> tuple[list[Run], list[str]]:
    """All measurements, contenders in turn within a round; and what failed."""
    jobs = [
        (round_, layers, seq, impl)
        for round_ in range(args.rounds)
        for layers in args.layers
        for seq in args.seq
        for impl in args.impl
    ]
    runs, failures = [], []
    for number, (round_, layers, seq, impl) in enumerate(jobs, 1):
        label = f"[{number}/{len(jobs)}] {impl}, S={seq}, layers={layers}"
        with console.status(label):
            try:
                run = run_contender(impl, seq, layers, args)
            except ContenderFailed as error:
                failures.append(str(error))
                console.print(f"{label}: failed")
                continue
        run["round"] = round_
        runs.append(run)
        console.print(
            f"{label}: step {median(run['step_s']):.2f} s, "
            f"{run['above_mib']:.0f} MiB above the model"
        )
    return runs, failures


def summarize(runs: Iterable[Run]) -> list[Run]:
    """Medians over rounds, one entry per (layers, seq, impl), in order of appearance."""
    groups: dict[tuple[int, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run["layers"], run["seq"], run["impl"]), []).append(run)
    summary = []
    for (layers, seq, impl), group in groups.items():
        step_s = median(median(run["step_s"]) for run in group)
        compile_s = median(run["first_s"] - median(run["step_s"]) for run in group)
        summary.append(
            {
                "layers": layers,
                "seq": seq,
                "impl": impl,
                "loss": group[0]["loss"],
                "grad_norm": group[0]["grad_norm"],
                "step_s": step_s,
                "compile_s": compile_s,
                "above_mib": median(run["above_mib"] for run in group),
                "loaded_mib": median(run["loaded_mib"] for run in group),
                "counts": group[0]["counts"],
            }
        )
    return summary


def disagreement(entries: Sequence[Run]) -> float:
    """Largest relative difference of loss or gradient norm from the first entry's."""
    return max(
        abs(entry[key] / entries[0][key] - 1)
        for entry in entries
        for key in ("loss", "grad_norm")
    )


def step_table(entries: Sequence[Run], console: Console) -> None:
    first = entries[0]
    table = Table(
        title=f"S = {first['seq']}, layers = {first['layers']}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for heading in (
        "loss",
        "grad norm",
        "step\ns",
        "compile\ns",
        "peak\nMiB",
        "ours/it\ntime",
        "ours/it\nmemory",
    ):
        table.add_column(heading, justify="right")
    ours = next((entry for entry in entries if entry["impl"] == "ours"), None)
    for entry in entries:
        ratios = ("", "")
        if ours is not None and entry is not ours:
            ratios = tuple(
                f"{ours[key] / entry[key]:.2f}" if entry[key] > 0 else "-"
                for key in ("step_s", "above_mib")
            )
        table.add_row(
            entry["impl"],
            f"{entry['loss']:.5f}",
            f"{entry['grad_norm']:.6f}",
            f"{entry['step_s']:.2f}",
            f"{entry['compile_s']:.1f}"
            if entry["impl"].split()[0] in COMPILING
            else "-",
            f"{entry['above_mib']:.0f}",
            *ratios,
        )
    console.print(table)
    if len(entries) > 1:
        console.print(
            f"Loss and gradient norm differ from those of {first['impl']} by at most "
            f"{disagreement(entries):.1e} (relative)."
        )


def compile_table(entries: Sequence[Run], console: Console) -> None:
    table = Table(
        title=f"Cold compile time, S = {entries[0]['seq']}", box=box.SIMPLE_HEAD
    )
    table.add_column("")
    for heading in ("layers", "compile s", "ours/it", "bodies", "body compiles"):
        table.add_column(heading, justify="right")
    ours_s = {e["layers"]: e["compile_s"] for e in entries if e["impl"] == "ours"}
    for entry in entries:
        counts = entry["counts"] or {}
        ratio = ""
        if entry["impl"] != "ours" and entry["layers"] in ours_s:
            ratio = f"{ours_s[entry['layers']] / entry['compile_s']:.2f}"
        table.add_row(
            entry["impl"],
            str(entry["layers"]),
            f"{entry['compile_s']:.1f}",
            ratio,
            str(counts.get("bodies", "")),
            str(counts.get("body_compiles", "")),
        )
    console.print(table)


def growth_table(entries: Sequence[Run], console: Console) -> None:
    table = Table(title="Peak memory by length", box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("S", "step s", "peak MiB", "bytes per added token"):
        table.add_column(heading, justify="right")
    before: dict[tuple[str, int], Run] = {}
    for entry in entries:
        shorter = before.get((entry["impl"], entry["layers"]))
        growth = ""
        if shorter is not None:
            added_bytes = (entry["above_mib"] - shorter["above_mib"]) * (1 << 20)
            growth = f"{added_bytes / (entry['seq'] - shorter['seq']):.0f}"
        before[entry["impl"], entry["layers"]] = entry
        table.add_row(
            entry["impl"],
            str(entry["seq"]),
            f"{entry['step_s']:.2f}",
            f"{entry['above_mib']:.0f}",
            growth,
        )
    console.print(table)


def main() -> int:
    args = parse_arguments()
    console = Console()
    runs, failures = run_all(args, console)
    summary = summarize(runs)
    if summary and args.compile_time:
        compile_table(summary, console)
    elif summary and args.memory_growth:
        growth_table(summary, console)
    elif summary:
        shapes = dict.fromkeys((entry["layers"], entry["seq"]) for entry in summary)
        for layers, seq in shapes:
            step_table(
                [e for e in summary if (e["layers"], e["seq"]) == (layers, seq)],
                console,
            )
    if args.alst_left_out:
        console.print("alst left out: name a python with deepspeed by --alst-python.")
    for failure in failures:
        console.print(f"\n{failure}", style="red", markup=False)
    if args.json is not None:
        settings = {
            k: v for k, v in vars(args).items() if k not in ("json", "alst_python")
        }
        report = {"settings": settings, "summary": summary, "runs": runs}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"Written: {args.json}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
