"""Offload to disk: equal gradients, files that come and go, and disks that fail."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_stores import delay_jobs
from tiny_models import batch, plain_pair

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.config import KINDS, ORDER
from fpdt_compile.errors import FpdtError, StoreError
from fpdt_compile.plan import LEVELS
from fpdt_compile.runtime import autograd, disk
from fpdt_compile.runtime.forecast import Forecast
from fpdt_compile.runtime.lanes import Lane
from fpdt_compile.runtime.stores import ValueStore
from fpdt_compile.testing import compare_gradients

EAGER = dict(codegen="eager", chunk_len=8, head_len=4, strict=True)
DISK = dict(offload="disk", **EAGER)


def train(model, inputs):
    model.zero_grad(set_to_none=True)
    loss = model(inputs["input_ids"], inputs["labels"])
    loss.backward()
    return loss.detach()


def check_equal(model, reference, inputs, tolerance=1e-9):
    expected = train(reference, inputs)
    compare_gradients(model, reference, train(model, inputs), expected).check(tolerance)


@pytest.fixture
def pair(tmp_path):
    """A model that offloads everything to ``tmp_path``, and the same model without."""
    model, reference = plain_pair(layers=2)
    fpdt_compile.optimize(model, offload_dir=tmp_path, **DISK)
    return model, reference


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


def test_late_copies(pair, monkeypatch):
    late, start = random.Random(0), Lane.__init__

    def slow(self, *args):
        start(self, *args)
        delay_jobs(self, late)

    monkeypatch.setattr(Lane, "__init__", slow)
    for _ in range(2):
        check_equal(*pair, batch(2, 40))


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
    for tier, expected in seen[0].items():
        assert expected == pytest.approx(peaks[tier], rel=0.1)


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


def test_evaluation_and_an_unused_step_leave_nothing(pair, tmp_path):
    model, _ = pair
    inputs = batch(2, 40)
    with torch.no_grad():
        model(inputs["input_ids"], inputs["labels"])
    assert not list(tmp_path.iterdir())
    loss = model(inputs["input_ids"], inputs["labels"])
    assert len(list(tmp_path.iterdir())) == 1
    del loss
    assert not list(tmp_path.iterdir())


def test_a_retained_graph_keeps_its_file_until_the_last_backward(pair, tmp_path):
    model, reference = pair
    inputs = batch(2, 40)
    for x in pair:
        loss = x(inputs["input_ids"], inputs["labels"])
        loss.backward(retain_graph=True)
        loss.backward()
    assert not list(tmp_path.iterdir())
    compare_gradients(model, reference, loss.detach(), loss.detach()).check(1e-9)


def test_two_steps_at_once_have_a_file_each(pair, tmp_path):
    model, reference = pair
    first, second = batch(2, 40), batch(2, 23)
    losses = []
    for x in pair:
        a = x(first["input_ids"], first["labels"])
        b = x(second["input_ids"], second["labels"])
        if x is model:
            assert len(list(tmp_path.iterdir())) == 2
        (a + b).backward()
        losses.append((a + b).detach())
    compare_gradients(model, reference, *losses).check(1e-9)
    assert not list(tmp_path.iterdir())


# faults -----------------------------------------------------------------------


def full_disk(*args):
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_found_before_anything_changes(pair, tmp_path, monkeypatch):
    model, _ = pair
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "posix_fallocate", full_disk)
        with pytest.raises(StoreError, match=rf"{tmp_path}.*needs \d+ bytes.*No space"):
            train(model, batch(2, 40))
    assert all(p.grad is None for p in model.parameters())
    assert not list(tmp_path.iterdir())
    check_equal(*pair, batch(2, 40))


def test_a_small_file_system(tmp_path):
    """A real one, where mounting is allowed."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path],
        capture_output=True,
    )
    if done.returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        model, _ = plain_pair(layers=2)
        fpdt_compile.optimize(model, offload_dir=tmp_path, **DISK)
        with pytest.raises(StoreError, match="No space left"):
            train(model, batch(2, 400))
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("what", ["pwrite", "preadv"])
def test_a_failing_disk_reaches_the_caller(what, pair, tmp_path, monkeypatch):
    model, _ = pair
    calls = []

    def broken(*args):
        calls.append(args)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, what, broken)
        with pytest.raises(StoreError, match=f"{tmp_path}.*Input/output error"):
            train(model, batch(2, 40))
    assert calls and not list(tmp_path.iterdir())
    check_equal(*pair, batch(2, 40))


@pytest.mark.parametrize("lane", ["writer", "reader"])
def test_a_worker_thread_that_raises(lane, pair, tmp_path, monkeypatch):
    model, _ = pair
    run, count = Lane.run, []

    def broken(self, job, work):
        count.append(job)
        if len(count) == 7:
            return run(self, job, lambda held: 1 / 0)
        return run(self, job, work)

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "run", broken)
        with pytest.raises(ZeroDivisionError):
            train(model, batch(2, 40))
    assert not list(tmp_path.iterdir())
    check_equal(*pair, batch(2, 40))


def test_a_directory_that_vanishes(tmp_path):
    folder = tmp_path / "offload"
    folder.mkdir()
    model, reference = plain_pair(layers=2)
    fpdt_compile.optimize(model, offload_dir=folder, **DISK)
    inputs = batch(2, 40)
    loss = model(inputs["input_ids"], inputs["labels"])
    shutil.rmtree(folder)
    loss.backward()  # the open file outlives its name
    with pytest.raises(StoreError, match=f"cannot make a file in {folder}"):
        train(model, inputs)
    folder.mkdir()
    check_equal(model, reference, inputs)


def test_a_step_that_failed_is_over(pair, tmp_path, monkeypatch):
    model, _ = pair
    inputs = batch(2, 40)
    loss = model(inputs["input_ids"], inputs["labels"])
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "preadv", full_disk)
        with pytest.raises(StoreError):
            loss.backward(retain_graph=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FpdtError, match="failed"):
        loss.backward()


KILLED = """
import sys, time
import torch
from fpdt_compile.runtime.stores import ValueStore
store = ValueStore(directory=sys.argv[1])
store.put(("x", 0), torch.ones(1000), "disk")
store.unwritten[0].wait()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_process_leaves_one_file_that_the_next_one_removes(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        (theirs,) = tmp_path.iterdir()
        other = tmp_path / "fpdt-notes.txt"
        other.write_text("mine")
        with_store(tmp_path, lambda: None)
        assert theirs.exists()  # it lives: its lock is held
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert theirs.exists()
        with_store(tmp_path, lambda: None)
        assert list(tmp_path.iterdir()) == [other]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def with_store(folder, act):
    store = ValueStore(directory=folder)
    store.put(("x", 0), torch.ones(10), "disk")
    act()
    store.close()


def test_files_are_gone_when_a_process_ends(tmp_path):
    code = KILLED.replace("time.sleep(600)", "")
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert not list(tmp_path.iterdir())


def test_a_directory_nobody_may_write_to(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    model, _ = plain_pair(layers=2)
    fpdt_compile.optimize(model, offload_dir=tmp_path, **DISK)
    with pytest.raises(StoreError, match="Permission denied"):
        train(model, batch(2, 40))


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
