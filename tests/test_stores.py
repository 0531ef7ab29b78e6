"""Stores give back what was put, and count bytes once."""

from __future__ import annotations

import pytest
import torch

import fpdt_compile
from fpdt_compile.runtime.stores import ValueStore

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


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("name", VALUES)
def test_round_trip(name, tier):
    store, value = ValueStore(), VALUES[name]
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
    assert store.counters.held_bytes == {"device": 0, "host": 0}


def test_a_view_does_not_keep_its_base_alive():
    store = ValueStore()
    base = torch.zeros(1000, 8)
    store.put(("x", 0), base[:10])
    assert store.counters.held_bytes["device"] == 10 * 8 * 4


def test_replacing_and_moving_count_once():
    store = ValueStore()
    for _ in range(3):
        store.put(("x", 0), torch.zeros(16))
    store.move(("x", 0), "host")
    assert store.counters.held_bytes == {"device": 0, "host": 64}
    assert store.counters.put_bytes == {"device": 192, "host": 64}
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
    hidden = 3 * rows * 32 * 8  # the last block's result was consumed by the head
    attention = 3 * rows * (32 * 8 + 4 * 8) if save == "attention" else 0
    assert seen == [hidden + attention]
    plan = fpdt_compile.api.backend_of(model).analyses[0].plan
    # The plan counts the last block's result too.
    assert plan.stored_bytes_per_token * 40 == hidden + attention + rows * 32 * 8
