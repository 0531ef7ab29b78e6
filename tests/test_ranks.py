"""Several ranks compute what one process does: loss and every gradient, on gloo."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import rank_cases
import rank_training
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankError, RankPool

pytestmark = pytest.mark.xdist_group("ranks")
CASTS = 2e-6  # transformers computes norms and losses in float32
EXACT = 1e-9


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save": "hidden", "order": "keys"},
        {"save": "qkv", "overlap": False, "chunk_len": 5},
        {"save": "qkv", "offload": "disk", "order": "keys", "lookahead": 1},
    ],
)
def test_two_ranks(two, options):
    rank_cases.check(two.run(rank_cases.compare, "llama", 2, options=options), CASTS)


def test_compiled_bodies(two):
    options = {"codegen": "inductor", "chunk_len": 8}
    found = two.run(
        rank_cases.compare, "llama", 2, dtype=torch.float32, options=options
    )
    rank_cases.check(found, 5e-5)


ARCHITECTURES = [
    "gemma2",  # softcap
    "bloom",  # ALiBi, a mask that differs by head
    "gpt_oss",  # sinks, window, experts
    "mixtral",
    "lfm2",  # a mixer that runs whole on every rank
    "bert",
    "t5",  # two sequences, a learned table of biases
    "decoder_layer",
]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_on_two(two, name):
    found = two.run(rank_cases.compare_entry, name, 2)
    rank_cases.check(found, found[0]["tolerance"])


PACKED = {"position_ids": (torch.arange(100) % 13)[None]}
FOUR = {
    "heads do not divide": dict(
        name="llama",
        num_attention_heads=6,
        num_key_value_heads=6,
        hidden_size=48,
    ),
    "seven heads": dict(
        name="llama",
        num_attention_heads=7,
        num_key_value_heads=7,
        hidden_size=56,
    ),
    "one key head": dict(name="llama", num_key_value_heads=1),
    "two key heads": dict(name="llama", num_key_value_heads=2),
    "window": dict(name="mistral_window", length=90),
    "packed": dict(name="llama", length=100, inputs=PACKED),
    "three tokens": dict(name="llama", rows=1, length=3),
}


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks(four, case):
    case = dict(num_hidden_layers=1, **FOUR[case])
    rank_cases.check(four.run(rank_cases.compare, case.pop("name"), 4, **case), CASTS)


@settings(max_examples=4)
@given(
    size=st.sampled_from([2, 4]),
    rows=st.integers(1, 3),
    length=st.integers(3, 40),
    groups=st.integers(1, 5),
    per_group=st.integers(1, 3),
)
def test_any_shape(four, size, rows, length, groups, per_group):
    found = four.run(
        rank_training.shapes, size, rows, length, groups * per_group, groups
    )
    assert max(found) < EXACT


def test_three_ranks_of_a_thousand_tokens():
    pool = RankPool(3)
    options = {"chunk_len": 64, "head_len": 32}
    try:
        found = pool.run(
            rank_cases.compare,
            "llama",
            3,
            length=1000,
            rows=1,
            options=options,
            num_hidden_layers=1,
        )
    finally:
        pool.stop()
    rank_cases.check(found, CASTS)


def test_adapters_and_dropout(two):
    for x in two.run(rank_training.adapters, 2):
        assert x["grad"] <= CASTS and x["frozen"] == 0
    first, second = two.run(rank_training.dropout, 2)
    assert first == second and first["difference"] <= CASTS


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_sharded_inputs(two, name):
    """Positions, masks and the label shift mean the whole sequence."""
    found = two.run(rank_cases.sharded, name, 2)
    rank_cases.check(found, CASTS)
    assert all(x["logits"] < EXACT for x in found)


def test_layers_compiled_one_at_a_time(two):
    for x in two.run(rank_cases.layers, 2):
        assert max(x.values()) < EXACT


def test_fsdp(two, tmp_path):
    for x in two.run(rank_training.fsdp, 2, str(tmp_path)):
        assert max(x.values()) < EXACT


def test_data_parallel_and_clipping(four):
    for x in four.run(rank_training.data_parallel, 2):
        assert max(x.values()) < EXACT


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
    ],
)
def test_data_parallel_as_frameworks_do(two, options):
    for x in two.run(rank_training.data_parallel_as_frameworks_do, **options):
        assert x["grad"] < CASTS
        assert x["logits"] == ((2, 23, 97), True)
        assert x["captures"] == 1 and not x["unused"]


def test_two_models_with_groups_of_their_own(four):
    for x in four.run(rank_training.int_groups, 2, 4):
        assert x["group 2"] == 2 and x["group 4"] == 4
        assert max(x[2], x[4]) < CASTS


def test_accumulated_and_scaled(two):
    assert max(two.run(rank_training.accumulate, 2)) < CASTS


def test_spellings_and_layouts(two):
    assert max(map(max, two.run(rank_cases.odd_spellings, 2))) < EXACT


def test_counts_of_the_caller_and_shifted_labels(two):
    assert max(map(max, two.run(rank_cases.scaled_losses, 2))) < CASTS


def test_ignored_labels(two):
    for x in two.run(rank_training.ignored, 2):
        assert max(x.values()) < CASTS


DIFFERENCES = {
    "model": "the model or its plan",
    "plan": '"chunk_len": 5',
    "length": r"input_ids: rank 0 has int64\[2, 21\], rank 1 has int64\[2, 25\]",
    "rows": r"int64\[3, 21\]",
    "batch": "the values of the inputs",
    "weights": "the model's weights",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_all_raise(two, what):
    with pytest.raises(RankError, match=DIFFERENCES[what]) as caught:
        two.run(rank_training.differs, what, 2)
    assert [kind for kind, _ in caught.value.errors] == ["RankMismatch"] * 2


def test_a_rank_that_dies(two):
    with pytest.raises(RankError) as caught:
        two.run(rank_training.dies, 2)
    (kind, text), _ = caught.value.errors
    assert kind == "FpdtError" and text.startswith("comparing ranks: rank 0 of 2")


def test_nothing_to_share(two):
    with pytest.raises(RankError, match="nothing in it can be shared") as caught:
        two.run(rank_training.not_shared, 2)
    assert [kind for kind, _ in caught.value.errors] == ["CantChunk"] * 2


def test_world_is_no_multiple(two):
    with pytest.raises(RankError, match="seq_parallel=3: the world has 2 ranks"):
        two.run(rank_training.trained, 3)


def test_a_timeline(two, tmp_path):
    path = tmp_path / "trace.json"
    two.run(rank_training.timeline, 2, str(path))
    rows = json.loads(path.read_text())["traceEvents"]
    lanes = [row["args"]["name"] for row in rows if row["ph"] == "M"]
    assert sorted(lanes) == ["collective", "compute", "exchange", "wait"]
    names = [row["name"] for row in rows if row["ph"] == "X"]
    assert any(name.startswith("attend   a0") for name in names)
    assert any("out to tokens" in name for name in names)


def test_volume_is_the_formula(two):
    """Elements that a rank sends to others, of one block: see docs in README."""
    for x in two.run(rank_training.volume, 2):
        assert x["sent"] == x["formula"]
