"""Saves, prefetches and releases: added to a schedule, from what each instruction reads and writes.

In: instructions that compute and drop, and the tier of each kind of value. Out: the same with

- a ``Save`` after a value was made or changed, and a ``Release`` after it was only read, where its
  next use is more than ``lookahead`` steps away (or in another schedule);
- a ``Prefetch`` ``lookahead`` steps before that use.

So at most what ``lookahead`` steps use is on the device at a time, besides what they work on. A
step is an instruction that computes. Values are named as in the block's shape; ``name'`` is a
value's gradient, ``name^`` its heads form, ``out.dq`` the running gradient of an attention's q.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .block_shape import BlockShape, key_region
from .instructions import (
    Attend,
    AttendBackward,
    Drop,
    Finish,
    Instruction,
    Mix,
    MixBackward,
    Prefetch,
    Release,
    Run,
    RunBackward,
    Save,
    Send,
    Transfer,
    Wait,
)
from .parallel_schedule import exchanged

Key = tuple[str, int]
SUM = re.compile(r"\.d[qkv]$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The tier of each kind of value; ``copied`` are the tiers that are not the device's memory."""

    hidden: str = "device"
    attention: str = "device"
    kv: str = "device"
    copied: tuple[str, ...] = ()
    lookahead: int = 2

    @property
    def tiers(self) -> tuple[str, ...]:
        return self.hidden, self.attention, self.kv

    def tier(self, kind: str) -> str:
        return {"hidden": self.hidden, "attention": self.attention, "kv": self.kv}[kind]

    def copies(self, tier: str) -> bool:
        return tier in self.copied


@dataclass(slots=True)
class Touched:
    """What an instruction does to values. ``taken`` values are gone afterwards."""

    read: list[Key] = field(default_factory=list)
    changed: list[Key] = field(default_factory=list)
    taken: list[Key] = field(default_factory=list)


class Accesses:
    """What each instruction of a block's schedule touches."""

    def __init__(
        self, shape: BlockShape, counts: Sequence[int], *, parallel: bool, saved: bool
    ) -> None:
        self.shape = shape
        self.counts = counts
        self.parallel = parallel
        self.saved = saved  # attention outputs are
        self.reads = dict(shape.reads)
        self.trained = dict(shape.trained)
        self.made = {"pre": shape.pre or (), "post": shape.post or ()}
        for n, names in enumerate(shape.keys, 1):
            self.made[key_region(n)] = names or ()

    def form(self, name: str) -> str:
        """What attention reads or writes."""
        return f"{name}^" if self.parallel else name

    def of(self, x: Instruction) -> Touched:
        match x:
            case Run(region, i):
                return Touched(
                    [(n, i) for n in self.reads[region]],
                    [(n, i) for n in self.made[region]],
                )
            case RunBackward(region, i):
                return self.region_backward(region, i)
            case Attend(a, i, j):
                _, _, q, k, v = self.shape.attentions[a]
                form = self.form
                return Touched([(form(q), i), (form(k), j), (form(v), j)])
            case Finish(a, i):
                out, lse, q, _, _ = self.shape.attentions[a]
                form = self.form
                return Touched([(form(q), i)], [(form(out), i), (lse, i)])
            case AttendBackward(a, i, j):
                return self.tile_backward(a, i, j)
            case Mix():
                return Touched([], self.mixed())
            case MixBackward():
                grads = [(f"{n}'", i) for n, i in self.mixed()]
                return Touched(self.mixed(), grads)
            case Send(what, sequence, i):
                return self.send(what, sequence, i)
            case Wait(what, sequence, i):
                return self.wait(what, sequence, i)
        return Touched()

    def mixed(self) -> list[Key]:
        return [
            (name, i)
            for sequence, name in self.shape.mixer_values
            for i in range(self.counts[sequence])
        ]

    def region_backward(self, region: str, i: int) -> Touched:
        found = Touched([(n, i) for n in self.reads[region]])
        found.taken += [(f"{n}'", i) for n in self.made[region]]
        found.changed += [(f"{n}'", i) for n in self.trained[region]]
        if self.parallel:
            return found
        for a, (out, _, q, k, v) in enumerate(self.shape.attentions):
            if region == "pre":
                found.taken += [(f"{out}.dq", i), (f"{out}'", i)]
                found.changed.append((f"{q}'", i))
            if region == key_region(self.shape.key_sequences[a]):
                found.taken += [(f"{out}.dk", i), (f"{out}.dv", i)]
                found.changed += [(f"{k}'", i), (f"{v}'", i)]
        gone = set(found.taken)
        found.changed = [key for key in found.changed if key not in gone]
        return found

    def tile_backward(self, a: int, i: int, j: int) -> Touched:
        out, lse, q, k, v = self.shape.attentions[a]
        form = self.form
        read = [(form(q), i), (form(k), j), (form(v), j), (form(out), i), (lse, i)]
        changed = [(f"{out}.dq", i), (f"{out}.dk", j), (f"{out}.dv", j)]
        return Touched([*read, (f"{form(out)}'", i)], changed)

    def send(self, what: Transfer, sequence: int, i: int) -> Touched:
        outs = [x[0] for x in self.shape.attentions]
        if what is Transfer.QKV:
            return Touched([(n, i) for n in exchanged(self.shape, sequence)])
        if what is Transfer.OUT:
            return Touched([(f"{n}^", i) for n in outs])
        if what is Transfer.GRAD_OUT:
            read = [(n, i) for n in outs] if self.saved else []
            return Touched(read, [], [(f"{n}'", i) for n in outs])
        found = Touched()
        for out, source in zip(outs, self.shape.key_sequences):
            if sequence == 0:
                found.taken += [(f"{out}.dq", i), (f"{out}^'", i)]
            if sequence == source:
                found.taken += [(f"{out}.dk", i), (f"{out}.dv", i)]
        return found

    def wait(self, what: Transfer, sequence: int, i: int) -> Touched:
        outs = [x[0] for x in self.shape.attentions]
        if what is Transfer.QKV:
            return Touched([], [(f"{n}^", i) for n in exchanged(self.shape, sequence)])
        if what is Transfer.OUT:
            return Touched([], [(n, i) for n in outs])
        if what is Transfer.GRAD_OUT:
            forms = [f"{n}^" for n in outs] if self.saved else []
            return Touched([], [(n, i) for n in (*forms, *(f"{n}^'" for n in outs))])
        return Touched([], [(f"{n}'", i) for n in exchanged(self.shape, sequence)])


class Kinds:
    """The kind of every value of a block: hidden states, attention outputs, or q, k, v."""

    def __init__(self, shape: BlockShape) -> None:
        self.attention = {x for a in shape.attentions for x in a[:2]}
        self.kv = {x for a in shape.attentions for x in a[2:]}
        self.hidden = {*shape.state_in, *shape.state_out}
        self.hidden.update(name for _, name in shape.key_state)

    def of(self, name: str) -> str:
        if is_sum(name):
            return "kv"
        base = name.rstrip("^'")
        if base in self.hidden:
            return "hidden"
        if base in self.attention:
            return "attention"
        return "kv" if base in self.kv else "hidden"


def split_name(name: str) -> tuple[str, str]:
    """A value's own name, and what the form or gradient of it adds."""
    end = re.search(r"(\^?'?|\.d[qkv])$", name)
    assert end is not None
    return name[: end.start()], end.group()


def is_sum(name: str) -> bool:
    """Whether it is a running gradient of an attention's q, k or v."""
    return SUM.search(name) is not None


def computes(x: Instruction) -> bool:
    """Whether an instruction takes time on the compute device."""
    return isinstance(x, (Run, RunBackward, Attend, AttendBackward, Mix, MixBackward))


def place_copies(
    instructions: Sequence[Instruction],
    shape: BlockShape,
    counts: Sequence[int],
    placement: Placement,
    *,
    parallel: bool,
    saved: bool,
) -> tuple[Instruction, ...]:
    """Add the copies; see the module's docstring."""
    accesses = Accesses(shape, counts, parallel=parallel, saved=saved)
    kinds = Kinds(shape)
    steps: list[int] = []  # of each instruction
    uses: dict[Key, list[tuple[int, bool]]] = {}  # (instruction, whether it changes it)
    gone: set[Key] = set()  # at the end
    dropped: dict[Key, int] = {}  # the step before which
    done = 0
    for at, x in enumerate(instructions):
        steps.append(done)
        done += computes(x)
        if isinstance(x, Drop):
            gone.add((x.name, x.chunk))
            dropped[x.name, x.chunk] = done
            continue
        touched = accesses.of(x)
        for keys, changes in ((touched.read, False), (touched.changed, True)):
            for key in keys:
                uses.setdefault(key, []).append((at, changes))
                gone.discard(key)
        for key in touched.taken:
            uses.setdefault(key, []).append((at, False))
            gone.add(key)
    first_at: dict[int, int] = {}
    for at, step in enumerate(steps):
        first_at.setdefault(step, at)
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    for key, found in uses.items():
        kind = kinds.of(key[0])
        tier = placement.tier(kind)
        if tier == "device":
            continue
        if not placement.copies(tier):
            if key not in gone and any(changes for _, changes in found):
                after.setdefault(found[-1][0], []).append(Save(*key, tier))
            continue
        away, dirty = True, False
        for n, (at, changes) in enumerate(found):
            made = changes and n == 0 and is_made(key, kind, instructions[at])
            if away and not made:
                ahead = first_at[max(0, steps[at] - placement.lookahead)]
                last = found[n - 1][0] + 1 if n else 0
                before.setdefault(min(at, max(last, ahead)), []).append(Prefetch(*key))
            dirty |= changes
            if n + 1 < len(found):
                distance = steps[found[n + 1][0]] - steps[at]
                away = distance > placement.lookahead
            elif key in gone:
                # Every key chunk is used by the last query chunk and dropped only after it.
                waits = dropped.get(key, steps[at]) - steps[at]
                away = waits > placement.lookahead + 1 and not dirty
            else:
                away = True
            if away:
                leave = Save(*key, tier) if dirty else Release(*key)
                after.setdefault(at, []).append(leave)
                dirty = False
    out: list[Instruction] = []
    for at, x in enumerate(instructions):
        out += before.get(at, ())
        out.append(x)
        out += after.get(at, ())
    return tuple(out)


def is_made(key: Key, kind: str, x: Instruction) -> bool:
    """Whether the first instruction of a schedule to change a value makes it: a part of a hidden
    state's gradient may be there from the schedule before."""
    if key[0].endswith("'"):
        return kind != "hidden"
    return is_sum(key[0]) or isinstance(x, (Run, Finish, Wait))
