"""Stores give back what was put, and count bytes once."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fpdt_compile
from fpdt_compile.runtime.disk import Space
from fpdt_compile.runtime.stores import TIERS, ValueStore

BASE = torch.arange(240, dtype=torch.float64).reshape(2, 4, 5, 6)
VALUES = {
    "contiguous": BASE.clone(),
    "view with an offset": BASE[1, 1:, 2:],
    "transposed": BASE.transpose(1, 3),
    "expanded": torch.arange(5.0)[:, None].expand(5, 7),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.5),
    "integers": torch.arange(9)[2:7],
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", VALUES)
def test_round_trip(name, tier, tmp_path):
    store, value = ValueStore(directory=tmp_path), VALUES[name]
    store.put(("x", 0), value, tier)
    store.prefetch(("x", 0))
    got = store.get(("x", 0))
    assert (
        torch.equal(got, value)
        and got.dtype == value.dtype
        and got.shape == value.shape
    )
    assert store.counters.held_bytes[tier] == got.untyped_storage().nbytes()
    store.drop(("x", 0))
    assert not any(store.counters.held_bytes.values())
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_view_does_not_keep_its_base_alive():
    store = ValueStore()
    base = torch.zeros(1000, 8)
    store.put(("x", 0), base[:10])
    assert store.counters.held_bytes["device"] == 10 * 8 * 4


def test_replacing_and_moving_count_once():
    store = ValueStore()
    for _ in range(3):
        store.put(("x", 0), torch.zeros(16))
    store.save(("x", 0), "host")
    assert store.counters.held_bytes == {"device": 0, "host": 64, "disk": 0}
    assert store.counters.put_bytes == {"device": 192, "host": 64, "disk": 0}
    store.clear()
    assert store.counters.held_bytes["host"] == 0


@pytest.mark.parametrize("save", ["attention", "hidden"])
def test_saved_bytes_are_the_formula(save, monkeypatch):
    """Layers x S x d x itemsize for the hidden states, plus out and lse of every attention."""
    from tiny_models import batch, plain_pair

    from fpdt_compile.runtime import autograd

    model, _ = plain_pair(width=32, heads=4, groups=2, layers=3)
    fpdt_compile.optimize(model, codegen="eager", chunk_len=8, head_len=8, save=save)
    seen = []
    original = autograd.StepRunner.outputs

    def spy(self, step, results):
        seen.append(step.store.counters.held_bytes["host"])
        return original(self, step, results)

    monkeypatch.setattr(autograd.StepRunner, "outputs", spy)
    inputs = batch(2, 40)
    model(inputs["input_ids"], inputs["labels"]).backward()
    rows = 2 * 40
    hidden = 3 * rows * 32 * 8
    attention = 3 * rows * (32 * 8 + 4 * 8) if save == "attention" else 0
    # The last block's result was consumed by the head, which left its gradient.
    assert seen == [hidden + attention + rows * 32 * 8]
    plan = fpdt_compile.api.backend_of(model).analyses[0].plan
    assert plan.stored_bytes_per_token * 40 == hidden + attention + rows * 32 * 8


@st.composite
def moves(draw):
    """What happens to a few values, as a schedule might have it and worse."""
    names = st.sampled_from("abc")
    acts = st.sampled_from(
        ["put", "save", "prefetch", "release", "change", "get", "drop"]
    )
    return draw(st.lists(st.tuples(acts, names), max_size=40))


@settings(max_examples=60, deadline=None)
@given(moves(), st.integers(0, 1000))
def test_nothing_is_lost_while_copies_are_late(sequence, seed):
    """Lanes with delays of their own: every value read is the value last written."""
    late = random.Random(seed)
    expected: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = ValueStore(directory=folder)
        for lane in (store.tiers["disk"].writer, store.tiers["disk"].reader):
            delay_jobs(lane, late)
        for number, (act, name) in enumerate(sequence):
            key = (name, 0)
            if act == "put":
                expected[name] = torch.full((50, 3), float(number))
                store.put(key, expected[name].clone())
            if name not in expected:
                continue
            if act == "save":
                store.save(key, "disk")
            elif act == "prefetch":
                store.prefetch(key)
            elif act == "release":
                store.release(key)
            elif act == "change":
                expected[name] = expected[name] + 1
                store.update(key).add_(1)
            elif act == "get":
                assert torch.equal(store.get(key), expected[name])
            elif act == "drop":
                store.drop(key)
                del expected[name]
        for name, value in expected.items():
            assert torch.equal(store.get((name, 0)), value)
        held = {key: x for key, x in store.counters.held_bytes.items()}
        assert held["device"] == 600 * len(expected)
        store.close()
        assert not any(store.counters.held_bytes.values())
        assert not list(Path(folder).iterdir())


def delay_jobs(lane, late):
    """Jobs of a lane take some time each."""
    run = lane.run

    def slow(job, work):
        time.sleep(late.choice([0, 0, 0.002]))
        return run(job, work)

    lane.run = slow


def test_a_tensor_that_is_still_used_keeps_its_buffer(tmp_path):
    """A gradient that is passed through shares the buffer that it was read into."""
    store = ValueStore(directory=tmp_path)
    for i in range(4):
        store.put(("x", i), torch.full((64,), float(i)), "disk")
    while not all(job.done for job in store.unwritten):
        time.sleep(0.001)
    kept = []
    for i in range(4):
        kept.append(store.get(("x", i)).view(8, 8))
        store.drop(("x", i))
    assert [x.unique().tolist() for x in kept] == [[0.0], [1.0], [2.0], [3.0]]
    del kept
    pool = store.tiers["disk"].pool
    assert pool.num_bytes == 4 * 256
    store.put(("y", 0), torch.ones(64), "disk")
    store.unwritten[-1].wait()
    store.get(("y", 0))
    assert pool.num_bytes == 4 * 256
    store.close()


def test_space_is_used_again():
    space = Space()
    a, b, c = (space.take(n) for n in (5000, 100, 4096))
    assert (a, b, c, space.end) == (0, 8192, 12288, 16384)
    space.give(a)
    space.give(b)
    assert space.take(12288) == 0 and space.end == 16384
    space.give(c)
    assert space.take(8000) == 12288 and space.end == 20480
