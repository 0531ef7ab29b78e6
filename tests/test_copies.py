"""Copies between tiers: where they are put into a schedule."""

from __future__ import annotations

from dataclasses import replace

from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule import CROSS, DECODER, ORDERS, SAVES, blocks

from fpdt_compile.runtime.block_schedule import block_schedule
from fpdt_compile.runtime.copies import Accesses, Kinds, Placement, computes
from fpdt_compile.runtime.instructions import Drop, Prefetch, Release, Save, text
from fpdt_compile.runtime.step import plain_table

DISK = Placement(
    hidden="disk", attention="disk", kv="disk", copied=("disk",), lookahead=1
)


class Golden(TestCase):
    def test_forward(self):
        tables = (plain_table(3, 3, True),)
        schedule = block_schedule(
            DECODER, (3,), tables, DISK, None, train=True, save="attention"
        )
        last = [x for x in schedule if getattr(x, "chunk", getattr(x, "query", 2)) == 2]
        self.assertExpectedInline(
            text(last),
            """\
prefetch h0[2]
run      pre[2]
release  h0[2]
save     k[2] to disk
save     v[2] to disk
attend   a0 q[2] k[0] full
prefetch k[2]
prefetch v[2]
attend   a0 q[2] k[1] full
prefetch h0[2]
attend   a0 q[2] k[2] causal
finish   a0 q[2]
save     o.lse[2] to disk
drop     q[2]
drop     k[2]
drop     v[2]
run      post[2]
release  h0[2]
save     o[2] to disk
save     h1[2] to disk""",
        )

    def test_main_memory_is_the_device(self):
        """On a CPU nothing is copied to main memory; what stays is only counted there."""
        place = replace(DISK, hidden="host", attention="host", kv="host")
        tables = (plain_table(2, 2, True),)
        schedule = block_schedule(
            DECODER, (2,), tables, place, None, train=True, save="attention"
        )
        moves = [x for x in schedule if isinstance(x, (Save, Prefetch, Release))]
        self.assertExpectedInline(
            text(moves),
            """\
save     o.lse[0] to host
save     o[0] to host
save     h1[0] to host
save     o.lse[1] to host
save     o[1] to host
save     h1[1] to host""",
        )

    def test_nothing_is_moved_without_offload(self):
        schedule = block_schedule(
            DECODER,
            (2,),
            (plain_table(2, 2, True),),
            Placement(),
            None,
            train=True,
            save="qkv",
        )
        assert not [x for x in schedule if isinstance(x, (Save, Prefetch, Release))]


@settings(max_examples=150)
@given(
    blocks(),
    SAVES,
    ORDERS,
    st.integers(0, 4),
    st.sampled_from(["forward", "backward"]),
    st.sampled_from([None, True, False]),
)
def test_every_value_is_there_when_it_is_used(
    block, save, order, lookahead, which, overlap
):
    """And is written after it changed, and given up where its next use is far."""
    shape, table, counts = block
    choices = dict(save=save)
    choices |= dict(train=True) if which == "forward" else dict(keep=False, order=order)
    place = replace(DISK, lookahead=lookahead)
    schedule = block_schedule(shape, counts, (table,), place, overlap, **choices)
    parallel = overlap is not None
    accesses = Accesses(shape, counts, parallel=parallel, saved=save != "hidden")
    kinds = Kinds(shape)
    saved = {"h0": counts[0]} | ({"e": counts[-1]} if shape is CROSS else {})
    if which == "backward":
        form = "^" if parallel else ""
        if save != "hidden":
            saved |= {"o": counts[0], "o.lse": counts[0]}
        if save == "qkv":
            saved |= {f"q{form}": counts[0]}
            saved |= {f"{name}{form}": counts[-1] for name in "kv"}
    on_disk = {(name, i) for name, count in saved.items() for i in range(count)}
    here, dirty, used = set(), set(), {}
    step = 0
    for x in schedule:
        match x:
            case Save(name, i, tier):
                assert tier == "disk" and (name, i) in here
                on_disk.add((name, i))
                here.discard((name, i))
                dirty.discard((name, i))
            case Release(name, i):
                assert (name, i) in here - dirty and (name, i) in on_disk
                here.discard((name, i))
            case Prefetch(name, i):
                assert (name, i) not in here, "read twice"
                if (name, i) in on_disk:
                    here.add((name, i))
                    used[name, i] = step + lookahead
            case Drop(name, i):
                assert (name, i) in here | on_disk
                here.discard((name, i))
                on_disk.discard((name, i))
            case _:
                touched = accesses.of(x)
                step += computes(x)
                for key in touched.read:
                    assert key in here or key[0].endswith("'"), f"{x} waits for {key}"
                    used[key] = step
                here |= set(touched.changed)
                dirty |= set(touched.changed)
                used.update(dict.fromkeys(touched.changed, step))
                for key in touched.taken:
                    here.discard(key)
                    on_disk.discard(key)
                    dirty.discard(key)
        for key in here - dirty:
            assert step - used[key] <= lookahead + 1, f"{key} stays for nothing"
    assert not here, "not saved at the end"
    assert {kinds.of(name) for name, _ in on_disk} <= {"hidden", "attention", "kv"}
