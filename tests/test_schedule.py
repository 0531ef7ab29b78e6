"""Schedules as text, and what must hold for every schedule."""

from __future__ import annotations

from collections import Counter

from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st

from fpdt_compile.graph import TileKind, TileTable
from fpdt_compile.runtime.chunks import chunk_bounds
from fpdt_compile.runtime.schedule import (
    Attend,
    AttendBackward,
    BlockShape,
    Drop,
    Finish,
    Run,
    RunBackward,
    Save,
    backward_schedule,
    forward_schedule,
    text,
)
from fpdt_compile.runtime.step import plain_table

DECODER = BlockShape(
    pre=("q", "k", "v"),
    post=("h1",),
    attentions=(("o", "o.lse", "q", "k", "v"),),
    num_mixers=0,
    mixer_values=(),
    state_in=("h0",),
    state_out=("h1",),
    pre_backward=True,
    post_backward=True,
    held=(),
)


class Golden(TestCase):
    def test_causal_forward(self):
        schedule = forward_schedule(
            DECODER, 2, (plain_table(2, True),), train=True, save_attention=True
        )
        self.assertExpectedInline(
            text(schedule),
            """\
run      pre[0]
prefetch h0[1]
attend   a0 q[0] k[0] causal
finish   a0 q[0]
drop     q[0]
run      post[0]
save     h1[0]
save     o[0]
save     o.lse[0]
run      pre[1]
attend   a0 q[1] k[0] full
attend   a0 q[1] k[1] causal
finish   a0 q[1]
drop     q[1]
drop     k[0]
drop     v[0]
drop     k[1]
drop     v[1]
run      post[1]
save     h1[1]
save     o[1]
save     o.lse[1]""",
        )

    def test_causal_backward(self):
        schedule = backward_schedule(
            DECODER, 2, (plain_table(2, True),), save_attention=True, keep=False
        )
        self.assertExpectedInline(
            text(schedule),
            """\
prefetch h0[1]
run      pre[0]
run      pre[1]
prefetch o[0]
prefetch o.lse[0]
prefetch h0[0]
backward post[1]
attend'  a0 q[1] k[0] full
attend'  a0 q[1] k[1] causal
drop     o[1]
drop     o.lse[1]
backward pre[1]
drop     q[1]
drop     k[1]
drop     v[1]
drop     h0[1]
backward post[0]
attend'  a0 q[0] k[0] causal
drop     o[0]
drop     o.lse[0]
backward pre[0]
drop     q[0]
drop     k[0]
drop     v[0]
drop     h0[0]""",
        )

    def test_encoder_does_all_pre_first(self):
        schedule = forward_schedule(
            DECODER, 3, (plain_table(3, False),), train=False, save_attention=True
        )
        self.assertEqual(
            [str(i) for i in schedule if isinstance(i, (Run, Finish))],
            ["run      pre[0]", "run      pre[1]", "run      pre[2]"]
            + [
                line
                for i in range(3)
                for line in (f"finish   a0 q[{i}]", f"run      post[{i}]")
            ],
        )


KINDS = st.sampled_from([TileKind.EMPTY, TileKind.FULL, TileKind.PARTIAL])


@st.composite
def tables(draw):
    n = draw(st.integers(1, 5))
    rows = draw(
        st.lists(st.lists(KINDS, min_size=n, max_size=n), min_size=n, max_size=n)
    )
    return TileTable(kinds=tuple(tuple(row) for row in rows))


@settings(max_examples=60)
@given(tables(), st.booleans(), st.booleans())
def test_forward_invariants(table, train, save):
    n = len(table.kinds)
    schedule = forward_schedule(DECODER, n, (table,), train=train, save_attention=save)
    live: set[tuple[str, int]] = {("h0", i) for i in range(n)}
    tiles = []
    for step in schedule:
        match step:
            case Run("pre", i):
                assert ("h0", i) in live
                live |= {(name, i) for name in ("q", "k", "v")}
            case Attend(0, i, j, kind):
                assert {
                    ("q", i),
                    ("k", j),
                    ("v", j),
                } <= live and kind is not TileKind.EMPTY
                tiles.append((i, j))
            case Finish(0, i):
                live |= {("o", i), ("o.lse", i)}
            case Run("post", i):
                assert {("o", i), ("h0", i)} <= live
                live.add(("h1", i))
            case Save(name, i):
                assert (name, i) in live
            case Drop(name, i):
                assert (name, i) in live
                live.discard((name, i))
    expected = [(i, j) for i in range(n) for j in table.keys_of(i)]
    assert sorted(tiles) == expected
    left = Counter(name for name, _ in live)
    kept = {"h1": n} | ({"h0": n} if train else {})
    kept |= {"o": n, "o.lse": n} if train and save else {}
    assert left == kept


@settings(max_examples=60)
@given(tables(), st.booleans(), st.booleans())
def test_backward_invariants(table, save, keep):
    n = len(table.kinds)
    schedule = backward_schedule(DECODER, n, (table,), save_attention=save, keep=keep)
    saved = {"h0"} | ({"o", "o.lse"} if save else set())
    live = {(name, i) for name in saved for i in range(n)}
    done: set[tuple[int, int]] = set()
    posts: set[int] = set()
    for step in schedule:
        match step:
            case Run("pre", i):
                live |= {(name, i) for name in ("q", "k", "v")}
            case Finish(0, i):
                live |= {("o", i), ("o.lse", i)}
            case RunBackward("post", i):
                assert {("o", i), ("h0", i)} <= live
                posts.add(i)
            case AttendBackward(0, i, j, _):
                needed = {("q", i), ("k", j), ("v", j), ("o", i), ("o.lse", i)}
                assert needed <= live and i in posts
                done.add((i, j))
            case RunBackward("pre", i):
                assert ("h0", i) in live
                touching = {
                    (a, b) for a in range(n) for b in table.keys_of(a) if i in (a, b)
                }
                assert touching <= done, "a gradient was used before it was complete"
            case Drop(name, i):
                assert (name, i) in live
                live.discard((name, i))
    assert {i for _, i in posts_of(schedule)} == set(range(n))
    assert live == ({(name, i) for name in saved for i in range(n)} if keep else set())


def posts_of(schedule):
    return [
        (s.region, s.chunk)
        for s in schedule
        if isinstance(s, RunBackward) and s.region == "pre"
    ]


@settings(max_examples=200)
@given(st.integers(1, 300), st.integers(1, 70))
def test_chunk_bounds(length, chunk_len):
    bounds = chunk_bounds(length, chunk_len)
    assert bounds[0][0] == 0 and bounds[-1][1] == length
    assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
    sizes = [b - a for a, b in bounds]
    assert max(sizes) <= chunk_len
    if length > 1 and chunk_len > 2:
        assert min(sizes) >= 2
