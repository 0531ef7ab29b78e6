"""Stage texts and counts for people who debug the compiler.

``TORCH_LOGS="+fpdt_compile.passes"`` shows each pass; ``TORCH_TRACE`` (tlparse) gets the graph
after each one.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.fx import GraphModule

from ._torch_private import structured_trace

if TYPE_CHECKING:
    from .runtime.ranks import Event, ExchangeCounters, Ranks


def op_counts(module: GraphModule) -> Counter[str]:
    """Calls by operator."""
    return Counter(
        str(node.target) for node in module.graph.nodes if node.op == "call_function"
    )


def record_stage(name: str, module: GraphModule) -> None:
    """Hand a graph to the structured trace."""
    structured_trace(f"fpdt_{name}", lambda: module.print_readable(print_output=False))


def ranks_of(model: nn.Module) -> Ranks:
    backend = getattr(model._compiled_call_impl, "fpdt_backend", None)
    if backend is None:
        raise ValueError(f"model={type(model).__name__}: allowed is an optimized model")
    return backend.ranks


def exchange_counters(model: nn.Module) -> ExchangeCounters:
    """What an optimized model's ranks exchanged since it was optimized, bytes and seconds."""
    return ranks_of(model).counters


@contextlib.contextmanager
def recorded_timeline(model: nn.Module) -> Iterator[list[Event]]:
    """The spans of compute, exchanges and waits of the steps inside, in seconds."""
    ranks = ranks_of(model)
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
