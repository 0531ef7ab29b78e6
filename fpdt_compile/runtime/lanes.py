"""Worker threads that move bytes while the main thread computes.

A lane runs its jobs one after the other, in the order they were submitted. What a job raises is
raised by whoever waits for it, and by every later use of its lane: no error is lost, nobody hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

Record = Callable[[str, str, float, float], None]


@dataclass(slots=True)
class LaneTimes:
    """Seconds of a step's copies: ``busy`` in worker threads, ``exposed`` waited for."""

    busy: float = 0.0
    exposed: float = 0.0

    @property
    def hidden(self) -> float:
        return max(0.0, self.busy - self.exposed)


@dataclass(slots=True, eq=False)
class Job:
    """Work on its way. ``held`` is what it reads, given up as soon as it is done."""

    lane: Lane
    label: str
    num_bytes: int
    held: Any
    future: Future[Any] | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        assert self.future is not None
        return self.future.done()

    def result(self) -> Any:
        """What the job returned; for other lanes, whose waits are hidden."""
        assert self.future is not None
        return self.future.result()

    def wait(self) -> Any:
        """What the job returned; the time waited counts as exposed."""
        assert self.future is not None
        if self.future.done():
            return self.future.result()
        start = time.perf_counter()
        try:
            return self.future.result()
        finally:
            end = time.perf_counter()
            self.lane.times.exposed += end - start
            self.lane.record("wait", self.label, start, end)


class Lane:
    """One worker thread; it starts with the first job."""

    def __init__(self, name: str, times: LaneTimes, record: Record) -> None:
        self.name = name
        self.times = times
        self.record = record
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=f"fpdt-{name}")
        self.error: BaseException | None = None

    def submit(
        self, label: str, num_bytes: int, work: Callable[[Any], Any], held: Any = None
    ) -> Job:
        """Run ``work(held)`` after the jobs before it."""
        if self.error is not None:
            raise self.error
        job = Job(self, label, num_bytes, held)
        job.future = self.pool.submit(self.run, job, work)
        return job

    def run(self, job: Job, work: Callable[[Any], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work(job.held)
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            job.held = None
            end = time.perf_counter()
            self.times.busy += end - start
            self.record(self.name, job.label, start, end)

    def close(self) -> None:
        """Jobs that have not begun are not run; the one that runs is waited for."""
        self.pool.shutdown(wait=True, cancel_futures=True)
