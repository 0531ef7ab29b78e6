"""What an optimized model's ranks exchange: counted, and as a timeline of steps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from .api import backend_of
from .runtime.ranks import Event, ExchangeCounters


def exchange_counters(model: nn.Module) -> ExchangeCounters:
    """What an optimized model's ranks exchanged since it was optimized, bytes and seconds."""
    return backend_of(model).ranks.counters


@contextlib.contextmanager
def recorded_timeline(model: nn.Module) -> Iterator[list[Event]]:
    """The spans of compute, exchanges and waits of the steps inside, in seconds."""
    ranks = backend_of(model).ranks
    ranks.events = events = []
    try:
        yield events
    finally:
        ranks.events = None


def write_timeline(events: list[Event], path: str | Path) -> None:
    """Write recorded spans as a Chrome trace (chrome://tracing, Perfetto), a lane per kind."""
    start = min((e.start for e in events), default=0.0)
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(e.lane for e in events))}
    rows = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}}
        for lane, i in lanes.items()
    ]
    rows += [
        {
            "ph": "X",
            "name": e.label,
            "pid": 0,
            "tid": lanes[e.lane],
            "ts": (e.start - start) * 1e6,
            "dur": (e.end - e.start) * 1e6,
        }
        for e in events
    ]
    Path(path).write_text(json.dumps({"traceEvents": rows}))
