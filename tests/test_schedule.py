"""Schedules as text, and what must hold for every schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st

from fpdt_compile.config import ORDER
from fpdt_compile.graph import TileKind, TileTable
from fpdt_compile.plan import LEVELS
from fpdt_compile.runtime.block_shape import BlockShape
from fpdt_compile.runtime.chunks import chunk_bounds
from fpdt_compile.runtime.instructions import (
    Attend,
    AttendBackward,
    Drop,
    Finish,
    Run,
    RunBackward,
    text,
)
from fpdt_compile.runtime.schedule import (
    backward_schedule,
    forward_schedule,
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
    key_state=(),
    keys=(),
    key_sequences=(0,),
    keys_backward=(),
    pre_backward=True,
    post_backward=True,
    held=(),
    later=(),
    reads=(("pre", ("h0",)), ("post", ("h0", "o"))),
    trained=(("pre", ("h0",)), ("post", ("h0", "o"))),
)
# Queries from h0, keys and values from another sequence, whose state a later block reads too.
CROSS = replace(
    DECODER,
    pre=("q",),
    key_state=((1, "e"),),
    keys=(("k", "v"),),
    key_sequences=(1,),
    keys_backward=(True,),
    later=("e",),
    reads=(("pre", ("h0",)), ("post", ("h0", "o")), ("keys1", ("e",))),
    trained=(("pre", ("h0",)), ("post", ("h0", "o")), ("keys1", ("e",))),
)
SAVES = st.sampled_from(LEVELS)
ORDERS = st.sampled_from(ORDER)


class Golden(TestCase):
    def test_causal_forward(self):
        schedule = forward_schedule(
            DECODER, (2,), (plain_table(2, 2, True),), train=True, save="attention"
        )
        self.assertExpectedInline(
            text(schedule),
            """\
run      pre[0]
attend   a0 q[0] k[0] causal
finish   a0 q[0]
drop     q[0]
run      post[0]
run      pre[1]
attend   a0 q[1] k[0] full
attend   a0 q[1] k[1] causal
finish   a0 q[1]
drop     q[1]
drop     k[0]
drop     v[0]
drop     k[1]
drop     v[1]
run      post[1]""",
        )

    def test_causal_backward(self):
        schedule = backward_schedule(
            DECODER,
            (2,),
            (plain_table(2, 2, True),),
            save="attention",
            keep=False,
            order="queries",
        )
        self.assertExpectedInline(
            text(schedule),
            """\
run      pre[0]
run      pre[1]
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
            DECODER, (3,), (plain_table(3, 3, False),), train=False, save="attention"
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
def blocks(draw):
    """(shape, table, numbers of chunks) of self-attention or attention to another sequence."""
    shape = draw(st.sampled_from([DECODER, CROSS]))
    n = draw(st.integers(1, 5))
    counts = (n,) if shape is DECODER else (n, draw(st.integers(1, 5)))
    row = st.lists(KINDS, min_size=counts[-1], max_size=counts[-1])
    rows = draw(st.lists(row, min_size=n, max_size=n))
    return shape, TileTable(kinds=tuple(map(tuple, rows))), counts


def sources_of(shape, region):
    """(state, results) of a region before attention."""
    if shape is DECODER:
        return "h0", ("q", "k", "v")
    return ("h0", ("q",)) if region == "pre" else ("e", ("k", "v"))


@settings(max_examples=120)
@given(blocks(), st.booleans(), SAVES)
def test_forward_invariants(block, train, save):
    shape, table, counts = block
    schedule = forward_schedule(shape, counts, (table,), train=train, save=save)
    state = {("h0", i) for i in range(counts[0])}
    if shape is CROSS:
        state |= {("e", i) for i in range(counts[1])}
    live, tiles = set(state), []
    for step in schedule:
        match step:
            case Run("post", i):
                assert {("o", i), ("h0", i)} <= live
                live.add(("h1", i))
            case Run(region, i):
                source, made = sources_of(shape, region)
                assert (source, i) in live
                live |= {(name, i) for name in made}
            case Attend(0, i, j, kind):
                assert {("q", i), ("k", j), ("v", j)} <= live
                assert kind is not TileKind.EMPTY
                tiles.append((i, j))
            case Finish(0, i):
                live |= {("o", i), ("o.lse", i)}
            case Drop(name, i):
                assert (name, i) in live
                live.discard((name, i))
    n = counts[0]
    assert sorted(tiles) == [(i, j) for i in range(n) for j in table.keys_of(i)]
    left = Counter(name for name, _ in live)
    kept = {"h1": n} | ({"h0": n} if train else {})
    if train and save != "hidden":
        kept |= {"o": n, "o.lse": n}
    if train and save == "qkv":
        kept |= {"q": n, "k": counts[-1], "v": counts[-1]}
    kept |= {"e": counts[1]} if shape is CROSS else {}
    made = {j for i in range(n) for j in table.keys_of(i)}
    if shape is CROSS and save == "qkv" and train:
        kept |= {"k": len(made), "v": len(made)}
    assert left == Counter({name: count for name, count in kept.items() if count})


@settings(max_examples=120)
@given(blocks(), SAVES, st.booleans(), st.booleans(), ORDERS)
def test_backward_invariants(block, save, keep, held, order):
    shape, table, counts = block
    if held:
        shape = replace(shape, held=("e",) if shape.key_state else ())
    schedule = backward_schedule(
        shape, counts, (table,), save=save, keep=keep, order=order
    )
    cross, n = bool(shape.key_state), counts[0]
    names = ["h0", *(["o", "o.lse"] if save != "hidden" else [])]
    saved = {(name, i) for name in names for i in range(n)}
    if save == "qkv":
        saved |= {("q", i) for i in range(n)}
        saved |= {(name, j) for name in "kv" for j in range(counts[-1])}
    states = {("e", i) for i in range(counts[1])} if cross else set()
    live = saved | states
    done: set[tuple[int, int]] = set()
    posts: set[int] = set()
    for step in schedule:
        match step:
            case Run(region, i):
                live |= {
                    (name, i)
                    for name in sources_of(CROSS if cross else DECODER, region)[1]
                }
            case Finish(0, i):
                live |= {("o", i), ("o.lse", i)}
            case RunBackward("post", i):
                assert {("o", i), ("h0", i)} <= live
                posts.add(i)
            case AttendBackward(0, i, j, _):
                needed = {("q", i), ("k", j), ("v", j), ("o", i), ("o.lse", i)}
                assert needed <= live and i in posts
                done.add((i, j))
            case RunBackward(region, i):
                source, made = sources_of(CROSS if cross else DECODER, region)
                assert (source, i) in live
                touching = {
                    (a, b)
                    for a in range(n)
                    for b in table.keys_of(a)
                    if ("q" in made and a == i) or ("k" in made and b == i)
                }
                assert touching <= done, "a gradient was used before it was complete"
            case Drop(name, i):
                assert (name, i) in live
                live.discard((name, i))
    runs = Counter((s.region, s.chunk) for s in schedule if isinstance(s, RunBackward))
    expected = Counter((region, i) for region in ("pre", "post") for i in range(n))
    expected.update(("keys1", i) for i in range(counts[1] if cross else 0))
    assert runs == expected
    assert live == (saved | states if keep else states if held else set())


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
