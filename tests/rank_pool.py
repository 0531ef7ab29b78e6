"""Processes that act as ranks: they stay for many tests, because importing torch takes seconds.

``RankPool(P).run(function, *args)`` calls a module-level function on every rank of a gloo group
and returns their results in rank order. What a rank raises comes back as :class:`RankError`; a rank
that does not answer in time, or dies, ends the pool, and the next call starts a new one.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT = 60.0  # seconds that a collective waits for other ranks
PATIENCE = 240.0  # seconds that a test waits for its ranks


class RankError(AssertionError):
    """What ranks raised; ``errors[rank]`` is (class name, message) or None."""

    def __init__(self, errors: list[tuple[str, str] | None], text: str) -> None:
        super().__init__(text)
        self.errors = errors


def serve(rank: int, size: int, file: str, timeout: float, pipe: Any) -> None:
    """One rank: run what comes through ``pipe``."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, args, kwargs = task
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            pipe.send(("ok", function(*args, **kwargs)))
        except Exception as error:  # handed to the test, which raises it
            pipe.send(
                ("error", (type(error).__name__, str(error), traceback.format_exc()))
            )
    dist.destroy_process_group()


class RankPool:
    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        self.size = size
        self.timeout = timeout
        self.workers: list[tuple[Any, Any]] = []

    def start(self) -> None:
        folder = tempfile.mkdtemp(prefix="fpdt-ranks-")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, str(Path(folder) / "store"), self.timeout)
            process = context.Process(
                target=serve, args=(*arguments, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def stop(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Results in rank order. Raises RankError if a rank raised, died or was silent."""
        if not self.workers:
            self.start()
        for _, pipe in self.workers:
            pipe.send((function, args, kwargs))
        results, errors, text = [], [], ""
        for rank, (process, pipe) in enumerate(self.workers):
            kind, value = "error", ("Died", f"rank {rank} gave no answer", "")
            try:
                if pipe.poll(PATIENCE):
                    kind, value = pipe.recv()
            except EOFError:
                value = ("Died", f"rank {rank} ended, code {process.exitcode}", "")
            results.append(value if kind == "ok" else None)
            errors.append(None if kind == "ok" else (value[0], value[1]))
            if kind != "ok":
                text += f"\nrank {rank}: {value[0]}: {value[1]}\n{value[2]}"
        if text:
            if any(error and error[0] == "Died" for error in errors):
                self.stop()
            raise RankError(errors, text)
        return results
