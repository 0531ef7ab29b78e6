"""The schedule of a block whose sequence several ranks share: as ``schedule``, with exchanges.

In: as there. Out: instructions in which q, k and v go to heads form (``name^``: all tokens of a
chunk, this rank's heads) before they are attended with, and outputs and gradients come back.

With ``overlap`` an exchange is issued one chunk ahead and waited for where what it carries is first
used: forward, the next chunk's q, k and v are on their way while this chunk attends, and this
chunk's output while the next one does; backward, the same from the last chunk down. Without, every
exchange is waited for where it is issued. Every rank runs the same list.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..graph import TileTable
from .block_shape import BlockShape, key_region
from .instructions import (
    Attend,
    AttendBackward,
    Finish,
    Instruction,
    Mix,
    MixBackward,
    Run,
    RunBackward,
    Send,
    Transfer,
    Wait,
    check_exchanges,
)
from .schedule import (
    Lifetimes,
    Writer,
    has_region,
    keeps_qkv,
    own_keys,
    saved_attention,
    saved_qkv,
    state_of,
)

Place = tuple[int, int]  # (sequence, chunk)


def in_heads(name: str) -> str:
    """The name of a value's heads form."""
    return f"{name}^"


def exchanged(shape: BlockShape, sequence: int) -> tuple[str, ...]:
    """The values of a sequence that attentions read, in the order they are sent."""
    names: dict[str, None] = {}
    for (_, _, q, k, v), source in zip(
        shape.attentions, shape.key_sequences, strict=True
    ):
        if sequence == 0:
            names.setdefault(q)
        if sequence == source:
            names.setdefault(k)
            names.setdefault(v)
    return tuple(names)


class Exchanges:
    """Writes sends and waits: what is sent, and what has arrived."""

    def __init__(
        self,
        shape: BlockShape,
        write: Writer,
        lives: Lifetimes,
        private: Collection[str],
    ) -> None:
        self.shape = shape
        self.write = write
        self.lives = lives
        self.private = private  # values that stay in token form after they are sent
        self.prepared: dict[Place, None] = {}
        self.arrived: set[Place] = set()

    def prepare(self, sequence: int, chunk: int) -> None:
        """Compute a chunk's q, k, v (or keys of another sequence) and send them."""
        if (sequence, chunk) in self.prepared:
            return
        self.prepared[sequence, chunk] = None
        if has_region(self.shape, sequence):
            self.write.add(Run(key_region(sequence), chunk))
        names = exchanged(self.shape, sequence)
        if names:
            self.write.add(Send(Transfer.QKV, sequence, chunk))
        for name in names:
            if name not in self.private:
                self.write.drop(name, chunk)

    def arrive(self, sequence: int, chunk: int) -> None:
        if (sequence, chunk) in self.arrived or not exchanged(self.shape, sequence):
            return
        self.arrived.add((sequence, chunk))
        self.write.add(Wait(Transfer.QKV, sequence, chunk))

    def arrive_all(self) -> None:
        for place in self.prepared:
            self.arrive(*place)

    def drop_unused(self) -> None:
        """Drop keys and values that no query needs any more."""
        for a, (_, _, _, k, v) in enumerate(self.shape.attentions):
            sequence = self.shape.key_sequences[a]
            for place in sorted(self.arrived):
                if place[0] == sequence and self.lives.free(*place, (k, v)):
                    for name in {k: 0, v: 0}:
                        self.write.drop(in_heads(name), place[1])


def forward_parallel(
    shape: BlockShape,
    counts: tuple[int, ...],
    tables: Sequence[TileTable],
    *,
    train: bool,
    save: str,
    overlap: bool,
) -> tuple[Instruction, ...]:
    """A block's forward; see ``schedule.forward_schedule``."""
    state = {*shape.state_in, *(name for _, name in shape.key_state)}
    mixed = {name for _, name in shape.mixer_values}
    kept = {*shape.later, *shape.state_out, *(state if train else ())}
    if train:
        kept.update(saved_attention(shape, save))
        kept.update(x for x in saved_qkv(shape, save) if x.endswith("^"))
    write, lives = Writer(kept), Lifetimes(shape, tables, counts)
    moves = Exchanges(shape, write, lives, state | mixed)

    def prepare(sequence: int, chunk: int) -> None:
        moves.prepare(sequence, chunk)
        if not overlap:
            moves.arrive(sequence, chunk)

    def pull(i: int) -> None:
        prepare(0, i)
        for a, table in enumerate(tables):
            for j in table.keys_of(i):
                prepare(shape.key_sequences[a], j)

    def attends(i: int) -> None:
        moves.arrive(0, i)
        for a, table in enumerate(tables):
            for j in table.keys_of(i):
                moves.arrive(shape.key_sequences[a], j)
        for a, table in enumerate(tables):
            keys = table.keys_of(i)
            write.add(*(Attend(a, i, j, table.kinds[i][j]) for j in keys))
            write.add(Finish(a, i))
            lives.done(a, i, keys)
        if shape.attentions:
            write.add(Send(Transfer.OUT, 0, i))
        keys_too = {x for attention in shape.attentions for x in attention[3:]}
        for name, _, q, _, _ in shape.attentions:
            write.drop(in_heads(name), i)
            if q not in keys_too:
                write.drop(in_heads(q), i)
        moves.drop_unused()

    def complete(i: int) -> None:
        if shape.attentions:
            write.add(Wait(Transfer.OUT, 0, i))
        if shape.post is not None:
            write.add(Run("post", i))
        for name, lse, _, _, _ in shape.attentions:
            write.drop(name, i)
            write.drop(lse, i)
        unread = {name for _, name in own_keys(shape)}
        for name in shape.state_in:
            if name not in unread:
                write.drop(name, i)

    if shape.num_mixers:
        for n, count in enumerate(counts):
            for i in range(count):
                prepare(n, i)
        write.add(*(Mix(m) for m in range(shape.num_mixers)))
    last = counts[0] - 1
    for i in range(counts[0]):
        pull(i)
        if overlap and i < last:
            pull(i + 1)
        attends(i)
        if overlap and i > 0:
            complete(i - 1)
        if not overlap or i == last:
            complete(i)
    moves.arrive_all()
    moves.drop_unused()
    for sequence, name in (*shape.key_state, *shape.mixer_values, *own_keys(shape)):
        for j in range(counts[sequence]):
            write.drop(name, j)
    check_exchanges(write.out)
    return tuple(write.out)


def backward_parallel(
    shape: BlockShape,
    counts: tuple[int, ...],
    tables: Sequence[TileTable],
    *,
    save: str,
    keep: bool,
    overlap: bool,
    order: str,
) -> tuple[Instruction, ...]:
    """A block's backward; see ``schedule.backward_schedule``."""
    state = {*shape.state_in, *(name for _, name in shape.key_state)}
    mixed = {name for _, name in shape.mixer_values}
    recomputes = save == "hidden"
    saved = [*saved_attention(shape, save), *saved_qkv(shape, save)]
    write = Writer({*state, *shape.state_out, *saved} if keep else ())
    lives = Lifetimes(shape, tables, counts)
    moves = Exchanges(shape, write, lives, state | mixed)
    num_chunks = counts[0]
    finished: set[int] = set()
    done: set[Place] = set()
    returning: list[Place] = []

    def recompute() -> None:
        if keeps_qkv(shape, save):
            return
        for n, count in enumerate(counts):
            backward = shape.pre_backward if n == 0 else shape.keys_backward[n - 1]
            needed = has_region(shape, n) and (backward or shape.attentions)
            if needed or shape.num_mixers or exchanged(shape, n):
                for i in range(count):
                    moves.prepare(n, i)
                    if not overlap:
                        moves.arrive(n, i)
                    elif i > 0:
                        moves.arrive(n, i - 1)
        moves.arrive_all()
        write.add(*(Mix(m) for m in range(shape.num_mixers)))

    def attends(i: int) -> None:
        """Attention again, where its output was not saved."""
        if not recomputes or not shape.attentions:
            return
        for a, table in enumerate(tables):
            keys = table.keys_of(i)
            write.add(*(Attend(a, i, j, table.kinds[i][j]) for j in keys))
            write.add(Finish(a, i))
        write.add(Send(Transfer.OUT, 0, i))

    def post(i: int) -> None:
        if recomputes and shape.attentions:
            write.add(Wait(Transfer.OUT, 0, i))
        if shape.post_backward:
            write.add(RunBackward("post", i))
        if shape.attentions:
            write.add(Send(Transfer.GRAD_OUT, 0, i))

    def out_grad(i: int) -> None:
        if shape.attentions:
            write.add(Wait(Transfer.GRAD_OUT, 0, i))

    def tiles(places: Sequence[tuple[int, int, int]]) -> None:
        for a, i, j in places:
            write.add(AttendBackward(a, i, j, tables[a].kinds[i][j]))
            lives.done(a, i, [j])

    def finish(i: int) -> None:
        """The query chunk has seen all its keys."""
        for name, lse, _, _, _ in shape.attentions:
            write.drop(in_heads(name), i)
            if name not in shape.state_in:
                write.drop(name, i)
            write.drop(lse, i)
        finished.add(i)

    def hand_back(sequence: int, i: int) -> None:
        """All gradients of a chunk's q, k and v are there: send them."""
        done.add((sequence, i))
        names = exchanged(shape, sequence)
        if names:
            write.add(Send(Transfer.GRAD_QKV, sequence, i))
        for name in names:
            write.drop(in_heads(name), i)
        returning.append((sequence, i))

    def before(sequence: int, i: int) -> None:
        """The backward of pre (or keys) of a chunk whose gradients have been sent."""
        if exchanged(shape, sequence):
            write.add(Wait(Transfer.GRAD_QKV, sequence, i))
        if sequence == 0:
            backward, made = shape.pre_backward, shape.pre
        else:
            backward, made = shape.keys_backward[sequence - 1], shape.keys[sequence - 1]
        if backward or shape.attentions:
            write.add(RunBackward(key_region(sequence), i))
        for name in made or ():
            if name not in state and not keeps_qkv(shape, save):
                write.drop(name, i)
        for n, name in shape.mixer_values:
            if n == sequence and name not in state:
                write.drop(name, i)
        for name in state_of(shape, sequence):
            if name not in shape.held:
                write.drop(name, i)

    def hand_back_complete() -> None:
        earlier = returning[:]
        for sequence, count in enumerate(counts):
            for c in reversed(range(count)):
                own = sequence == 0
                complete = lives.free(sequence, c) and (c in finished or not own)
                if complete and (sequence, c) not in done:
                    hand_back(sequence, c)
        flush(earlier if overlap else returning[:])

    def flush(places: Sequence[Place]) -> None:
        for place in places:
            returning.remove(place)
            before(*place)

    def queries_outer() -> None:
        last = num_chunks - 1
        ahead = overlap and last > 0
        if ahead:
            attends(last)
            post(last)
        for i in reversed(range(num_chunks)):
            if not ahead:
                attends(i)
                post(i)
            elif i > 0:
                attends(i - 1)
                if not recomputes:
                    post(i - 1)
            out_grad(i)
            tiles(lives.tiles_of_query(i))
            finish(i)
            if ahead and i > 0 and recomputes:
                post(i - 1)
            if not shape.num_mixers:
                hand_back_complete()

    def keys_outer() -> None:
        for i in reversed(range(num_chunks)):
            attends(i)
            post(i)
            if not overlap:
                out_grad(i)
            elif i + 1 < num_chunks:
                out_grad(i + 1)
        if overlap:
            out_grad(0)
        for j in range(max(counts)):
            tiles(lives.tiles_of_key(j))
            for i in range(num_chunks):
                if i not in finished and not lives.unfinished(i):
                    finish(i)
            if not shape.num_mixers:
                hand_back_complete()

    recompute()
    if order == "queries":
        queries_outer()
    else:
        keys_outer()
    if shape.num_mixers:
        write.add(*(MixBackward(m) for m in range(shape.num_mixers)))
        hand_back_complete()
    flush(returning[:])
    check_exchanges(write.out)
    return tuple(write.out)
