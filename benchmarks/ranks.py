"""Several ranks that share a sequence: memory per rank, and time waited for exchanges.

    python benchmarks/ranks.py --seq 8192 --json ranks.json

One training step of a tiny Llama after a first one, for P ranks on gloo in fresh processes, one
thread each. ``activations`` is the most that a rank's stores held at once (hidden states, attention
outputs, q, k and v), ``peak`` its resident memory above the loaded model. ``exposed`` is the time
of a step that a rank waited for exchanges, issued ahead and not (overlap=False).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=1 << 20,
    use_cache=False,
)


def peak() -> float:
    """Peak resident memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def worker(length: int, chunk_len: int, overlap: bool, trace: str | None) -> None:
    """One rank; rank 0 prints the numbers of all."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import fpdt_compile
    from fpdt_compile.api import backend_of
    from fpdt_compile.timeline import recorded_timeline, write_timeline

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    ids = torch.randint(3, SHAPE["vocab_size"], (1, length))
    fpdt_compile.optimize(
        model,
        seq_parallel=size,
        chunk_len=chunk_len,
        codegen="eager",
        overlap=overlap,
        strict=True,
    )
    loaded = peak()
    model(input_ids=ids[:, :1024], labels=ids[:, :1024]).loss.backward()
    backend = backend_of(model)
    counters = backend.ranks.counters
    before = counters.exposed_seconds, counters.in_flight_seconds
    dist.barrier()
    start = time.perf_counter()
    with recorded_timeline(model) as events:
        model(input_ids=ids, labels=ids).loss.backward()
    seconds = time.perf_counter() - start
    if trace and dist.get_rank() == 0:
        write_timeline(events, trace)
    stored = backend.store_counters.peak_bytes
    mine = {
        "activations": sum(stored.values()) / 2**20,
        "peak": peak() - loaded,
        "step": seconds,
        "exposed": counters.exposed_seconds - before[0],
        "in_flight": counters.in_flight_seconds - before[1],
    }
    found: list[Any] = [None] * size
    dist.all_gather_object(found, mine)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(size: int, options: argparse.Namespace, overlap: bool) -> dict[str, float]:
    """The largest of every number over the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        base = dict(os.environ, WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
        base.update(MASTER_PORT=str(29500 + os.getpid() % 1000), OMP_NUM_THREADS="1")
        command = [sys.executable, __file__, "--worker", "--seq", str(options.seq)]
        command += ["--chunk-len", str(options.chunk_len)]
        command += [] if overlap else ["--no-overlap"]
        if options.trace and overlap and size == max(options.ranks):
            command += ["--trace", options.trace]
        started = []
        for rank in range(size):
            output = (Path(folder) / str(rank)).open("w+")
            environment = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, env=environment, stdout=output)
            started.append((process, output))
        for process, _ in started:
            if process.wait():
                raise SystemExit("a rank failed")
        output = started[0][1]
        output.seek(0)
        found = json.loads(output.read().splitlines()[-1])
    return {name: max(x[name] for x in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--chunk-len", type=int, default=256, help="per rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", help="write the numbers there too")
    parser.add_argument("--trace", help="write a Chrome trace of the most ranks there")
    parser.add_argument("--no-overlap", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.seq, options.chunk_len, not options.no_overlap, options.trace)
        return
    rows = []
    for size in options.ranks:
        for overlap in (True, False) if size > 1 else (True,):
            row = {"ranks": size, "overlap": overlap, **measure(size, options, overlap)}
            rows.append(row)
            print(
                f"P={size} overlap={overlap!s:5} activations {row['activations']:7.1f} MiB  "
                f"peak {row['peak']:6.0f} MiB  step {row['step']:6.2f} s  "
                f"exposed {row['exposed']:6.2f} s of {row['in_flight']:6.2f} s in flight",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
