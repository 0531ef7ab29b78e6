"""A step's timeline: what is in it, as a Chrome trace and as a picture."""

from __future__ import annotations

import json

import pytest
from disk_cases import DISK, train
from matplotlib.image import imread
from tiny_models import batch, plain_pair

import fpdt_compile
from fpdt_compile.timeline import store_counters


def test_lanes_of_a_step(tmp_path):
    model, _ = plain_pair(layers=2)
    fpdt_compile.optimize(model, lookahead=0, offload_dir=tmp_path, **DISK)
    with pytest.raises(ValueError, match="has run a step"):
        store_counters(model)
    train(model, batch(2, 40))
    with fpdt_compile.recorded_timeline(model) as events:
        train(model, batch(2, 40))
    found = len(events)
    train(model, batch(2, 40))
    assert len(events) == found, "recorded after the end"
    assert {e.lane for e in events} == {"compute", "wait", "reload", "offload"}
    labels = {e.label for e in events if e.lane == "compute"}
    assert {"run      pre[0]", "head[0]", "backward post[4]"} <= labels
    compute = sorted((e.start, e.end) for e in events if e.lane == "compute")
    assert all(a[1] <= b[0] for a, b in zip(compute, compute[1:]))
    counters = store_counters(model)
    writes = [e for e in events if e.lane == "offload"]
    assert len(writes) > 20 and counters.written_bytes["disk"] > 0

    fpdt_compile.write_timeline(events, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {row["args"]["name"] for row in trace if row["ph"] == "M"}
    assert lanes == {"compute", "wait", "reload", "offload"}
    assert sum(row["ph"] == "X" for row in trace) == len(events)

    figure = fpdt_compile.plot_timeline(events, tmp_path / "step.png")
    (axes,) = figure.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["compute", "wait", "reload", "offload"]
    picture = imread(tmp_path / "step.png")
    assert picture.shape[0] > 200 and picture.std() > 0.01


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="recorded_timeline"):
        fpdt_compile.plot_timeline([])
