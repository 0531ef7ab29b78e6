"""The forecast of a step's memory, beside the bytes of live tensors counted while it runs."""

from __future__ import annotations

import weakref

import pytest
import torch
from disk_cases import EAGER, train
from tiny_models import batch, pair, plain_pair, watching
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fpdt_compile


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operators made, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                self.note(x.untyped_storage(), given)
        return result

    def note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in given:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save": "qkv", "order": "keys"},
        {"offload": "disk"},
        {"offload": "disk", "order": "keys", "save": "hidden"},
    ],
    ids=str,
)
def test_within_a_tenth_of_what_is_live(options, tmp_path):
    model, _ = plain_pair(width=64, heads=8, groups=2, layers=2, vocab=97)
    fpdt_compile.optimize(
        model,
        codegen="eager",
        chunk_len=32,
        head_len=16,
        offload_dir=tmp_path,
        **options,
    )
    inputs = batch(2, 256)
    expected = fpdt_compile.forecast_memory(
        model, inputs["input_ids"], inputs["labels"]
    )
    assert all(p.grad is None for p in model.parameters()), "it ran"
    train(model, batch(2, 40))
    with watching(LiveBytes()) as live:
        train(model, inputs)
    assert expected["memory"] == pytest.approx(live.peak, rel=0.1)


def test_it_grows_with_the_sequence_unless_it_is_on_disk(tmp_path):
    grown = {}
    for offload in ("host", "disk"):
        model, _ = plain_pair(layers=2)
        options = dict(offload=offload, offload_dir=tmp_path)
        fpdt_compile.optimize(model, **options, **EAGER)
        sizes = []
        for length in (256, 512):
            inputs = batch(2, length)
            sizes.append(fpdt_compile.forecast_memory(model, **plain(inputs))["memory"])
        grown[offload] = sizes[1] - sizes[0]
    assert grown["disk"] < 0.1 * grown["host"]
    assert not list(tmp_path.iterdir())


def plain(inputs):
    return {"ids": inputs["input_ids"], "labels": inputs["labels"]}


def test_what_has_no_forecast():
    with pytest.raises(ValueError, match="allowed is an optimized model"):
        fpdt_compile.forecast_memory(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    model = torch.nn.Linear(2, 2)
    fpdt_compile.optimize(model, codegen="eager")
    with pytest.raises(ValueError, match="something runs in chunks"):
        fpdt_compile.forecast_memory(model, torch.zeros(3, 2))


def test_a_compiled_model(tmp_path):
    model, _ = pair("llama", torch.float32)
    fpdt_compile.optimize(model, offload="disk", offload_dir=tmp_path)
    peaks = fpdt_compile.forecast_memory(model, **batch(1, 64))
    assert peaks["disk"] > 0 and peaks["memory"] > peaks["device"] > 0
