"""Layouts of tokens and heads over ranks, and the schedule of a shared block."""

from __future__ import annotations

import pytest
import torch
from expecttest import TestCase
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import CROSS, DECODER

import fpdt_compile
from fpdt_compile.config import ORDER
from fpdt_compile.errors import InvariantError
from fpdt_compile.plan import LEVELS
from fpdt_compile.runtime.instructions import (
    Attend,
    Send,
    Transfer,
    Wait,
    check_exchanges,
    text,
)
from fpdt_compile.runtime.layout import SequenceLayout, share_heads
from fpdt_compile.runtime.parallel_schedule import backward_parallel, forward_parallel
from fpdt_compile.runtime.step import plain_table


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
def test_heads_are_shared_out_once(groups, per_group, size):
    shares = share_heads(groups * per_group, groups, size)
    heads = [h for s in shares for h in range(*s.queries)]
    assert heads == list(range(groups * per_group))
    for share in shares:
        read = {h // per_group for h in range(*share.queries)}
        assert read == set(range(*share.keys))
        if share.num_queries:  # every key head has equally many query heads on its rank
            assert share.num_queries % len(read) == 0
    assert {g for s in shares for g in range(*s.keys)} == set(range(groups))


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 8))
def test_tokens_are_held_once(length, chunk_len, size):
    layout = SequenceLayout.of(length, chunk_len, size)
    held = [t for parts in layout.parts for a, b in parts for t in range(a, b)]
    assert held == list(range(length))
    for r in range(size):
        local = [t for a, b in layout.local(r) for t in range(a, b)]
        assert local == list(range(layout.num_tokens(r)))
    for (a, b), parts in zip(layout.chunks, layout.parts, strict=True):
        if b - a == size * chunk_len:  # as in the paper: equal parts in rank order
            assert {y - x for x, y in parts} == {chunk_len}


@given(st.integers(16, 200), st.integers(1, 9), st.integers(1, 8), st.integers(0, 2))
def test_shards_round_trip(length, chunk_len, size, dim):
    shape = [2, 3, 5]
    shape[dim] = length
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [
        fpdt_compile.shard_tokens(
            x, seq_parallel=size, chunk_len=chunk_len, dim=dim, rank=r
        )
        for r in range(size)
    ]
    whole = fpdt_compile.unshard_tokens(shards, chunk_len=chunk_len, dim=dim)
    assert torch.equal(whole, x)


def test_a_batch_is_cut_by_its_token_dimension():
    given = {"ids": torch.arange(26).view(2, 13), "scale": 0.5, "count": torch.ones(2)}
    mine = fpdt_compile.shard_tokens(given, seq_parallel=2, chunk_len=2, rank=1)
    assert mine["ids"][0].tolist() == [2, 3, 6, 7]
    assert mine["scale"] == 0.5 and mine["count"].shape == (2,)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(seq_parallel=2, chunk_len=0, rank=0), "chunk_len=0: allowed are"),
        (dict(seq_parallel=2, chunk_len=4, rank=2), "rank=2: allowed are"),
        (dict(seq_parallel=8, chunk_len=4, rank=0), "at least 16"),
        (dict(seq_parallel=2, chunk_len=4), "rank=None: without a process group"),
    ],
)
def test_bad_shards(options, message):
    with pytest.raises(ValueError, match=message):
        fpdt_compile.shard_tokens(torch.zeros(2, 10), **options)


def test_shards_of_another_layout():
    with pytest.raises(ValueError, match=r"shards have \[3, 7\] tokens"):
        fpdt_compile.unshard_tokens([torch.zeros(1, 3), torch.zeros(1, 7)], chunk_len=4)


class Golden(TestCase):
    def test_the_next_exchange_is_issued_before_this_chunk_attends(self):
        schedule = forward_parallel(
            DECODER,
            (2,),
            (plain_table(2, 2, True),),
            train=True,
            save="attention",
            overlap=True,
        )
        self.assertExpectedInline(
            text(schedule),
            """\
run      pre[0]
send     q, k, v to heads s0[0]
drop     q[0]
drop     k[0]
drop     v[0]
run      pre[1]
send     q, k, v to heads s0[1]
drop     q[1]
drop     k[1]
drop     v[1]
wait     q, k, v to heads s0[0]
attend   a0 q[0] k[0] causal
finish   a0 q[0]
send     out to tokens s0[0]
drop     o^[0]
drop     q^[0]
wait     q, k, v to heads s0[1]
attend   a0 q[1] k[0] full
attend   a0 q[1] k[1] causal
finish   a0 q[1]
send     out to tokens s0[1]
drop     o^[1]
drop     q^[1]
drop     k^[0]
drop     v^[0]
drop     k^[1]
drop     v^[1]
wait     out to tokens s0[0]
run      post[0]
wait     out to tokens s0[1]
run      post[1]""",
        )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", [DECODER, CROSS])
@pytest.mark.parametrize("save", LEVELS)
@pytest.mark.parametrize("order", ORDER)
@pytest.mark.parametrize("causal", [True, False])
def test_every_exchange_is_waited_for_before_its_use(
    shape, overlap, save, order, causal
):
    cross = shape is CROSS
    counts = (3, 3) if cross else (3,)
    tables = (plain_table(3, 3, causal and not cross),)
    schedules = [
        forward_parallel(shape, counts, tables, train=True, save=save, overlap=overlap),
        backward_parallel(
            shape, counts, tables, save=save, keep=False, overlap=overlap, order=order
        ),
    ]
    for schedule in schedules:
        check_exchanges(schedule)
        arrived = set()
        for x in schedule:
            if isinstance(x, Wait) and x.what is Transfer.QKV:
                arrived.add((x.sequence, x.chunk))
            if isinstance(x, Attend):
                assert {(0, x.query), (int(cross), x.key)} <= arrived


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=8))
def test_what_the_invariant_refuses(moves):
    """Waiting for what was not sent, sending twice, not waiting."""
    schedule = [(Send if s else Wait)(Transfer.OUT, 0, c) for s, c in moves]
    open_now: set[int] = set()
    good = True
    for sends, chunk in moves:
        good &= sends != (chunk in open_now)
        open_now ^= {chunk}
    if good and not open_now:
        check_exchanges(schedule)
    else:
        with pytest.raises(InvariantError):
            check_exchanges(schedule)
