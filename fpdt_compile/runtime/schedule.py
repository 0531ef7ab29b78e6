"""The schedule: a block's forward and backward as a list of instructions over chunks.

In: a block of the program, the numbers of chunks, the tile table of each attention, and the plan's
choices. Out: a tuple of instructions; the executor runs them in order, and decides nothing.

Forward, chunk by chunk: pre; every attend of this chunk's queries; post; the block's result is put
into the store. A mask that lets queries see later chunks pulls those chunks' pre forward, so an
encoder does all pre first, then all attends, without a case of its own. Keys and values of another
sequence are made when a query chunk first attends to them.

Backward: all pre and keys (recomputed, or saved by the forward); then, with queries outside, for
each chunk from the last the backward of post and the tiles of its queries, with keys outside all
backwards of post, then the tiles of each key chunk from the first. As soon as a chunk's dq, dk and
dv are complete, the backward of pre (or keys). For a causal mask that is right after its own tiles.

Nothing here knows where values are kept, see ``copies``.

A block's sequences are numbered: 0 is the queries' (and of all else in the block), the others are
those that attentions take keys and values from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..graph import TileTable
from .block_shape import BlockShape, Value, key_region
from .instructions import (
    Attend,
    AttendBackward,
    Drop,
    Finish,
    Instruction,
    Mix,
    MixBackward,
    Run,
    RunBackward,
)


class Lifetimes:
    """Which attentions still need which key chunk."""

    def __init__(
        self, shape: BlockShape, tables: Sequence[TileTable], counts: Sequence[int]
    ) -> None:
        self.shape = shape
        self.waiting = [
            [set() for _ in range(counts[sequence])] for sequence in shape.key_sequences
        ]
        for a, table in enumerate(tables):
            for i in range(counts[0]):
                for j in table.keys_of(i):
                    self.waiting[a][j].add(i)

    def tiles_of_query(self, query: int) -> list[tuple[int, int, int]]:
        """(attention, query, key) of the tiles of a query chunk that have not been done."""
        return [
            (a, query, j)
            for a, waiting in enumerate(self.waiting)
            for j, queries in enumerate(waiting)
            if query in queries
        ]

    def tiles_of_key(self, key: int) -> list[tuple[int, int, int]]:
        """The same of the key chunks of that number (of any sequence)."""
        return [
            (a, i, key)
            for a, waiting in enumerate(self.waiting)
            if key < len(waiting)
            for i in sorted(waiting[key])
        ]

    def unfinished(self, query: int) -> bool:
        """Whether any tile of a query chunk has not been done."""
        return any(query in queries for keys in self.waiting for queries in keys)

    def done(self, attention: int, query: int, keys: Sequence[int]) -> None:
        for j in keys:
            self.waiting[attention][j].discard(query)

    def free(self, sequence: int, key: int, names: Collection[str] = ()) -> bool:
        """Whether no attention (of these keys or values) needs the key chunk any more."""
        return not any(
            self.waiting[a][key]
            for a, attention in enumerate(self.shape.attentions)
            if self.shape.key_sequences[a] == sequence
            and (not names or {*names} & {*attention[3:]})
        )


class Writer:
    """A list of instructions; a value is dropped at most once."""

    def __init__(self, kept: Collection[str]) -> None:
        self.out: list[Instruction] = []
        self.kept = kept
        self.dropped: set[tuple[str, int]] = set()

    def add(self, *instructions: Instruction) -> None:
        self.out.extend(instructions)

    def drop(self, name: str, chunk: int) -> None:
        if name not in self.kept and (name, chunk) not in self.dropped:
            self.dropped.add((name, chunk))
            self.out.append(Drop(name, chunk))


def saved_attention(shape: BlockShape, save: str) -> tuple[str, ...]:
    """What attentions leave for the backward."""
    if save == "hidden":
        return ()
    return tuple(name for a in shape.attentions for name in a[:2])


def keeps_qkv(shape: BlockShape, save: str) -> bool:
    """Whether pre is not run again in the backward. A mixer reads what pre makes, so it is then."""
    return save == "qkv" and not shape.num_mixers


def saved_qkv(shape: BlockShape, save: str) -> tuple[str, ...]:
    """What pre and keys leave for the backward."""
    if not keeps_qkv(shape, save):
        return ()
    made = [*(shape.pre or ()), *(name for names in shape.keys for name in names or ())]
    return (*made, *(f"{x}^" for a in shape.attentions for x in a[2:]))


def forward_schedule(
    shape: BlockShape,
    counts: tuple[int, ...],
    tables: Sequence[TileTable],
    *,
    train: bool,
    save: str,
) -> tuple[Instruction, ...]:
    """A block's forward. ``train`` keeps the state for the backward; else it is dropped.

    ``counts`` are the numbers of chunks of the block's sequences. ``save`` is what is kept besides:
    "hidden" (nothing), "attention" or "qkv".
    """
    state = {*shape.state_in, *(name for _, name in shape.key_state)}
    kept = {*shape.later, *shape.state_out, *(state if train else ())}
    if train:
        kept.update(saved_attention(shape, save), saved_qkv(shape, save))
    write, lives = Writer(kept), Lifetimes(shape, tables, counts)
    ready: set[tuple[int, int]] = set()

    def prepare(sequence: int, chunk: int) -> None:
        if (sequence, chunk) in ready:
            return
        ready.add((sequence, chunk))
        if has_region(shape, sequence):
            write.add(Run(key_region(sequence), chunk))

    if shape.num_mixers:
        for n, count in enumerate(counts):
            for i in range(count):
                prepare(n, i)
        write.add(*(Mix(m) for m in range(shape.num_mixers)))

    for i in range(counts[0]):
        prepare(0, i)
        for a, table in enumerate(tables):
            for j in table.keys_of(i):
                prepare(shape.key_sequences[a], j)
        for a, table in enumerate(tables):
            keys = table.keys_of(i)
            write.add(*(Attend(a, i, j, table.kinds[i][j]) for j in keys))
            write.add(Finish(a, i))
            lives.done(a, i, keys)
        for _, _, q, _, _ in shape.attentions:
            if not is_key_or_value(shape, q) and q not in state:
                write.drop(q, i)
        for a, (_, _, _, k, v) in enumerate(shape.attentions):
            sequence = shape.key_sequences[a]
            for j in range(counts[sequence] if sequence else i + 1):
                if (sequence, j) in ready and lives.free(sequence, j, (k, v)):
                    for name in {k: 0, v: 0}:
                        if name not in state:
                            write.drop(name, j)
        if shape.post is not None:
            write.add(Run("post", i))
        for name, lse, _, _, _ in shape.attentions:
            write.drop(name, i)
            write.drop(lse, i)
        for sequence, name in shape.mixer_values:
            if sequence == 0 and name not in state:
                write.drop(name, i)
        for name in shape.state_in:
            if not is_key_or_value(shape, name):
                write.drop(name, i)
    for sequence, name in (*shape.key_state, *shape.mixer_values, *own_keys(shape)):
        for j in range(counts[sequence]):
            write.drop(name, j)
    return tuple(write.out)


def own_keys(shape: BlockShape) -> list[Value]:
    """State that attention reads as it is."""
    return [(0, name) for name in shape.state_in if is_key_or_value(shape, name)]


def has_region(shape: BlockShape, sequence: int) -> bool:
    names = shape.pre if sequence == 0 else shape.keys[sequence - 1]
    return names is not None


def state_of(shape: BlockShape, sequence: int) -> tuple[str, ...]:
    """The state that the region of a sequence starts from."""
    if sequence == 0:
        return shape.state_in
    return tuple(name for n, name in shape.key_state if n == sequence)


def is_key_or_value(shape: BlockShape, name: str) -> bool:
    return any(name in (k, v) for _, _, _, k, v in shape.attentions)


def backward_schedule(
    shape: BlockShape,
    counts: tuple[int, ...],
    tables: Sequence[TileTable],
    *,
    save: str,
    keep: bool,
    order: str,
) -> tuple[Instruction, ...]:
    """A block's backward. ``keep``: the graph is retained, so saved values stay; ``save`` as in
    the forward; ``order`` is what the loop over tiles has outside, "queries" or "keys"."""
    lives = Lifetimes(shape, tables, counts)
    state = {*shape.state_in, *(name for _, name in shape.key_state)}
    saved = (*saved_attention(shape, save), *saved_qkv(shape, save))
    write = Writer({*state, *shape.state_out, *saved} if keep else ())
    num_chunks = counts[0]

    for n, count in enumerate(counts):
        backward = shape.pre_backward if n == 0 else shape.keys_backward[n - 1]
        needed = has_region(shape, n) and (backward or shape.attentions)
        if (needed or shape.num_mixers) and not keeps_qkv(shape, save):
            for i in range(count):
                if has_region(shape, n):
                    write.add(Run(key_region(n), i))
    write.add(*(Mix(m) for m in range(shape.num_mixers)))
    finished: set[int] = set()
    done: set[tuple[int, int]] = set()

    def post(i: int) -> None:
        if save == "hidden":
            for a, table in enumerate(tables):
                write.add(
                    *(Attend(a, i, j, table.kinds[i][j]) for j in table.keys_of(i))
                )
                write.add(Finish(a, i))
        if shape.post_backward:
            write.add(RunBackward("post", i))

    def tile(a: int, i: int, j: int) -> None:
        write.add(AttendBackward(a, i, j, tables[a].kinds[i][j]))
        lives.done(a, i, [j])

    def finish(i: int) -> None:
        """The query chunk has seen all its keys."""
        for name, lse, _, _, _ in shape.attentions:
            if name not in shape.state_in:
                write.drop(name, i)
            write.drop(lse, i)
        finished.add(i)

    def before(sequence: int, i: int) -> None:
        """The backward of pre (or keys), once what it made has all its gradients."""
        done.add((sequence, i))
        if sequence == 0:
            backward, made = shape.pre_backward, shape.pre
        else:
            backward, made = shape.keys_backward[sequence - 1], shape.keys[sequence - 1]
        if backward or shape.attentions:
            write.add(RunBackward(key_region(sequence), i))
        for name in made or ():
            if name not in state:
                write.drop(name, i)
        for n, name in shape.mixer_values:
            if n == sequence and name not in state:
                write.drop(name, i)
        for name in state_of(shape, sequence):
            if name not in shape.held:
                write.drop(name, i)

    def before_all_complete() -> None:
        for sequence, count in enumerate(counts):
            for c in reversed(range(count)):
                own = sequence == 0
                complete = lives.free(sequence, c) and (c in finished or not own)
                if complete and (sequence, c) not in done:
                    before(sequence, c)

    if order == "queries":
        for i in reversed(range(num_chunks)):
            post(i)
            for place in lives.tiles_of_query(i):
                tile(*place)
            finish(i)
            if not shape.num_mixers:
                before_all_complete()
    else:
        for i in reversed(range(num_chunks)):
            post(i)
        for j in range(max(counts)):
            for place in lives.tiles_of_key(j):
                tile(*place)
            for i in range(num_chunks):
                if i not in finished and not lives.unfinished(i):
                    finish(i)
            if not shape.num_mixers:
                before_all_complete()
    if shape.num_mixers:
        write.add(*(MixBackward(m) for m in range(shape.num_mixers)))
        before_all_complete()
    return tuple(write.out)
