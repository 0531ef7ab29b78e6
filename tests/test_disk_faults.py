"""Offload to disk when the disk, a worker thread or the process fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from disk_cases import DISK, check_equal, train
from tiny_models import batch, plain_pair

import fpdt_compile
from fpdt_compile.errors import FpdtError, StoreError
from fpdt_compile.runtime import disk
from fpdt_compile.runtime.lanes import Lane
from fpdt_compile.runtime.stores import ValueStore


def full_disk(*args):
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_found_before_anything_changes(disk_pair, tmp_path, monkeypatch):
    model, _ = disk_pair
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "posix_fallocate", full_disk)
        with pytest.raises(StoreError, match=rf"{tmp_path}.*needs \d+ bytes.*No space"):
            train(model, batch(2, 40))
    assert all(p.grad is None for p in model.parameters())
    assert not list(tmp_path.iterdir())
    check_equal(*disk_pair, batch(2, 40))


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
def test_a_failing_disk_reaches_the_caller(what, disk_pair, tmp_path, monkeypatch):
    model, _ = disk_pair
    calls = []

    def broken(*args):
        calls.append(args)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, what, broken)
        with pytest.raises(StoreError, match=f"{tmp_path}.*Input/output error"):
            train(model, batch(2, 40))
    assert calls and not list(tmp_path.iterdir())
    check_equal(*disk_pair, batch(2, 40))


@pytest.mark.parametrize("lane", ["writer", "reader"])
def test_a_worker_thread_that_raises(lane, disk_pair, tmp_path, monkeypatch):
    model, _ = disk_pair
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
    check_equal(*disk_pair, batch(2, 40))


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


def test_a_step_that_failed_is_over(disk_pair, tmp_path, monkeypatch):
    model, _ = disk_pair
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
