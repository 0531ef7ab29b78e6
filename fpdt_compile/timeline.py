"""What an optimized model moves between ranks and tiers: counted, and as a timeline of steps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .api import backend_of
from .runtime.ranks import Event, ExchangeCounters
from .runtime.stores import StoreCounters

LANES = ("compute", "wait", "exchange", "collective", "reload", "offload")
COLORS = {
    "attention": "tab:blue",
    "regions": "tab:green",
    "head": "tab:purple",
    "wait": "tab:red",
    "exchange": "tab:orange",
    "collective": "tab:brown",
    "reload": "tab:cyan",
    "offload": "tab:olive",
}


def exchange_counters(model: nn.Module) -> ExchangeCounters:
    """What an optimized model's ranks exchanged since it was optimized, bytes and seconds."""
    return backend_of(model).ranks.counters


def store_counters(model: nn.Module) -> StoreCounters:
    """What the last step of an optimized model held and copied, in bytes by tier, and the seconds
    its copies took and were waited for. Raises ValueError before the first step."""
    counters = backend_of(model).store_counters
    if counters is None:
        raise ValueError(
            f"model={type(model).__name__}: allowed is a model that has run a step"
        )
    return counters


@contextlib.contextmanager
def recorded_timeline(model: nn.Module) -> Iterator[list[Event]]:
    """The spans of a model's steps inside: of compute, of exchanges between ranks, of values that
    worker threads wrote (offload) and read (reload), and of waits for any of these."""
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


def kind_of(event: Event) -> str:
    """What a span is drawn as."""
    if event.lane != "compute":
        return event.lane
    if event.label.startswith("head"):
        return "head"
    return "attention" if event.label.startswith("attend") else "regions"


def plot_timeline(events: Sequence[Event], path: str | Path | None = None) -> Any:
    """Draw recorded spans, a row per lane; returns the matplotlib figure, written to ``path`` too.

    Raises ValueError without spans, ImportError without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if not events:
        raise ValueError("events=[]: allowed are the spans of recorded_timeline")
    lanes = [lane for lane in LANES if any(e.lane == lane for e in events)]
    start = min(e.start for e in events)
    figure = Figure(figsize=(14, 0.7 * len(lanes) + 1.6), layout="constrained")
    axes = figure.subplots()
    for kind, color in COLORS.items():
        spans = [e for e in events if kind_of(e) == kind]
        for lane in {e.lane for e in spans}:
            bars = [(e.start - start, e.end - e.start) for e in spans if e.lane == lane]
            axes.broken_barh(bars, (lanes.index(lane) - 0.4, 0.8), facecolor=color)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    used = [kind for kind in COLORS if any(kind_of(e) == kind for e in events)]
    axes.legend(
        handles=[Patch(color=COLORS[kind], label=kind) for kind in used],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(used),
        frameon=False,
    )
    if path is not None:
        figure.savefig(path)
    return figure
