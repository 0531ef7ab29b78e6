"""Offload to disk: equal gradients, files that come and go, and disks that fail."""

from __future__ import annotations

import random
import time

import pytest
import torch
from disk_cases import DISK, EAGER, check_equal, train
from test_stores import delay_jobs
from tiny_models import batch, plain_pair

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.config import KINDS, ORDER
from fpdt_compile.plan import LEVELS
from fpdt_compile.runtime import autograd
from fpdt_compile.runtime.forecast import Forecast
from fpdt_compile.runtime.lanes import Lane
from fpdt_compile.runtime.stores import TIERS
from fpdt_compile.testing import compare_gradients


@pytest.mark.parametrize("order", ORDER)
@pytest.mark.parametrize("save", LEVELS)
def test_what_is_saved_and_the_order_change_nothing(save, order, tmp_path):
    model, reference = plain_pair(layers=2)
    fpdt_compile.optimize(model, save=save, order=order, offload_dir=tmp_path, **DISK)
    check_equal(model, reference, batch(2, 40))
    counters = backend_of(model).store_counters
    assert counters.peak_bytes["host"] == 0 < counters.peak_bytes["disk"]
    assert not any(counters.held_bytes.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_lookahead(lookahead, tmp_path):
    model, reference = plain_pair(layers=2)
    options = dict(lookahead=lookahead, offload_dir=tmp_path, **DISK)
    fpdt_compile.optimize(model, **options)
    check_equal(model, reference, batch(2, 43))


@pytest.mark.parametrize(
    "tiers, used",
    [
        ({"kv": "disk"}, {"host", "disk"}),
        ({"hidden": "disk", "kv": "none", "attention": "disk"}, {"disk"}),
        ({"hidden": "none", "kv": "none", "attention": "disk"}, {"disk"}),
    ],
)
def test_a_tier_per_kind(tiers, used, tmp_path):
    model, reference = plain_pair(layers=2)
    fpdt_compile.optimize(model, offload=tiers, offload_dir=tmp_path, **EAGER)
    check_equal(model, reference, batch(2, 40))
    peaks = backend_of(model).store_counters.peak_bytes
    assert {tier for tier in ("host", "disk") if peaks[tier]} == used


def test_late_copies(disk_pair, monkeypatch):
    late, start = random.Random(0), Lane.__init__

    def slow(self, *args):
        start(self, *args)
        delay_jobs(self, late)

    monkeypatch.setattr(Lane, "__init__", slow)
    for _ in range(2):
        check_equal(*disk_pair, batch(2, 40))


def test_saving_less_within_a_number_of_bytes(tmp_path):
    """One block's attention outputs fit, the other's do not."""
    model, reference = plain_pair(layers=2)
    probe, _ = plain_pair(layers=2)
    fpdt_compile.optimize(probe, **EAGER)
    train(probe, batch(2, 40))
    plan = backend_of(probe).analyses[0].plan
    one = plan.blocks[0].attention * 40
    fpdt_compile.optimize(model, save="qkv", save_bytes=one, **EAGER)
    check_equal(model, reference, batch(2, 40))
    mixed = backend_of(model).analyses[0].plan
    assert mixed.saves(40) == ("attention", "hidden")
    assert mixed.saves(20) == ("attention", "attention")
    assert mixed.saves(1) == ("qkv", "qkv")
    assert mixed.saves(10**6) == ("hidden", "hidden")


def test_keys_and_values_stay_on_the_device_where_they_fit(tmp_path):
    model, reference = plain_pair(layers=2)
    options = dict(resident_bytes=1 << 30, offload_dir=tmp_path, **DISK)
    fpdt_compile.optimize(model, **options)
    check_equal(model, reference, batch(2, 40))
    plan = backend_of(model).analyses[0].plan
    needed = plan.blocks[0].kv * 40
    moved = backend_of(model).store_counters.read_bytes["disk"]
    other, _ = plain_pair(layers=2)
    fpdt_compile.optimize(other, **{**options, "resident_bytes": needed - 1})
    train(other, batch(2, 40))
    assert backend_of(other).store_counters.read_bytes["disk"] > moved


def test_queries_outside_move_less_for_grouped_heads(tmp_path):
    """H = 8, G = 2: k, v and their gradients are a quarter of q, out and theirs."""
    moved = {}
    for order in ORDER:
        model, _ = plain_pair(width=64, heads=8, groups=2, layers=1)
        options = dict(order=order, offload_dir=tmp_path, lookahead=1, **DISK)
        fpdt_compile.optimize(model, **options)
        train(model, batch(1, 8 * 24))
        counters = backend_of(model).store_counters
        moved[order] = counters.read_bytes["disk"] + counters.written_bytes["disk"]
    assert moved["queries"] <= 0.5 * moved["keys"]


@pytest.mark.parametrize(
    "save, offload, order",
    [
        ("attention", "host", "queries"),
        ("hidden", "host", "keys"),
        ("attention", "disk", "queries"),
        ("qkv", "disk", "keys"),
        ("hidden", "disk", "keys"),
    ],
)
def test_the_forecast_is_what_is_held(save, offload, order, tmp_path, monkeypatch):
    seen = []
    reserve = autograd.StepRunner.reserve

    def spy(self, step, train):
        seen.append(Forecast(step, self.shapes, self.held, train).peaks())
        reserve(self, step, train)

    monkeypatch.setattr(autograd.StepRunner, "reserve", spy)
    model, _ = plain_pair(layers=2)
    options = dict(save=save, order=order, offload=offload, offload_dir=tmp_path)
    fpdt_compile.optimize(model, **options, **EAGER)
    train(model, batch(2, 64))
    peaks = backend_of(model).store_counters.peak_bytes
    for tier in TIERS:
        assert seen[0][tier] == pytest.approx(peaks[tier], rel=0.1)


def test_frozen_weights_and_adapters(tmp_path):
    """No gradient of a frozen weight's input is written either."""
    model, reference = plain_pair(layers=2)
    for x in (model, reference):
        x.requires_grad_(False)
        x.blocks[1].up.requires_grad_(True)
    fpdt_compile.optimize(model, offload_dir=tmp_path, **DISK)
    check_equal(model, reference, batch(2, 40))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["hidden", "attention"])
def test_bytes_written_are_the_formula(kind, tmp_path):
    """Layers x S x d x itemsize, hidden states and gradients of the head's input; out and lse."""
    model, _ = plain_pair(width=32, heads=4, groups=2, layers=3)
    tiers = {**dict.fromkeys(KINDS, "none"), kind: "disk"}
    fpdt_compile.optimize(model, offload=tiers, offload_dir=tmp_path, **EAGER)
    inputs = batch(2, 40)
    loss = model(inputs["input_ids"], inputs["labels"])
    rows = 2 * 40
    expected = {
        "hidden": 5 * rows * 32 * 8,  # the embedding, 3 blocks, one gradient
        "attention": 3 * rows * (32 * 8 + 4 * 8),
    }
    written = backend_of(model).store_counters.written_bytes
    assert written["disk"] == expected[kind]
    del loss


def test_evaluation_and_an_unused_step_leave_nothing(disk_pair, tmp_path):
    model, _ = disk_pair
    inputs = batch(2, 40)
    with torch.no_grad():
        model(inputs["input_ids"], inputs["labels"])
    assert not list(tmp_path.iterdir())
    loss = model(inputs["input_ids"], inputs["labels"])
    assert len(list(tmp_path.iterdir())) == 1
    del loss
    assert not list(tmp_path.iterdir())


def test_a_retained_graph_keeps_its_file_until_the_last_backward(disk_pair, tmp_path):
    model, reference = disk_pair
    inputs = batch(2, 40)
    for x in disk_pair:
        loss = x(inputs["input_ids"], inputs["labels"])
        loss.backward(retain_graph=True)
        loss.backward()
    assert not list(tmp_path.iterdir())
    compare_gradients(model, reference, loss.detach(), loss.detach()).check(1e-9)


def test_two_steps_at_once_have_a_file_each(disk_pair, tmp_path):
    model, reference = disk_pair
    first, second = batch(2, 40), batch(2, 23)
    losses = []
    for x in disk_pair:
        a = x(first["input_ids"], first["labels"])
        b = x(second["input_ids"], second["labels"])
        if x is model:
            assert len(list(tmp_path.iterdir())) == 2
        (a + b).backward()
        losses.append((a + b).detach())
    compare_gradients(model, reference, *losses).check(1e-9)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(offload="ram"), "offload='ram': allowed are 'host', 'disk', 'none'"),
        (dict(offload={"keys": "disk"}), "a dict of 'hidden', 'kv', 'attention'"),
        (dict(offload={"kv": "gpu"}), "allowed are 'host', 'disk', 'none'"),
        (dict(offload_dir="/no/such/place"), "directories that exist"),
        (dict(lookahead=-1), "lookahead=-1: allowed are integers >= 0"),
        (dict(lookahead=None), "lookahead=None: allowed are integers >= 0"),
        (dict(save="all"), "allowed are 'hidden', 'attention', 'qkv'"),
        (dict(save_bytes=1.5), "save_bytes=1.5: allowed are None and integers >= 0"),
        (dict(order="both"), "allowed are 'queries', 'keys'"),
        (dict(resident_bytes=-1), "resident_bytes=-1"),
        (dict(max_intermediate_bytes=0), "max_intermediate_bytes=0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        fpdt_compile.optimize(torch.nn.Linear(2, 2), **options)


def test_a_bound_on_intermediates():
    model, reference = plain_pair(layers=2)
    bound = 4096
    fpdt_compile.optimize(
        model, codegen="eager", strict=True, max_intermediate_bytes=bound
    )
    inputs = batch(2, 300)
    report = fpdt_compile.explain(model, inputs["input_ids"], inputs["labels"])
    assert report.largest_tensor_after_bytes <= bound
    assert report.num_chunks > 1 and report.head_len < report.chunk_len
    check_equal(model, reference, inputs)


def test_waiting_is_counted(tmp_path, monkeypatch):
    """With no lookahead reads are waited for; with some the wait is a part of the copies' time."""
    model, _ = plain_pair(layers=2)
    fpdt_compile.optimize(model, lookahead=0, offload_dir=tmp_path, **DISK)
    start = time.perf_counter()
    train(model, batch(2, 80))
    elapsed = time.perf_counter() - start
    times = backend_of(model).store_counters.times
    assert 0 < times.exposed < elapsed and times.busy > 0
