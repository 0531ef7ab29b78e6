"""The schedule: a block's forward and backward as a list of instructions over chunks.

In: a block of the program, the number of chunks, the tile table of each attention, and the plan's
choices. Out: a tuple of instructions; the executor runs them in order, and decides nothing.

Forward, chunk by chunk: pre; every attend of this chunk's queries; post; the block's result is put
into the store. A mask that lets queries see later chunks pulls those chunks' pre forward, so an
encoder does all pre first, then all attends, without a case of its own.

Backward, queries outer, last chunk first: all pre (recomputed), then for each chunk the backward of
post, the tiles of its queries, and, as soon as a chunk's dq, dk and dv are complete, the backward
of pre. For a causal mask that is right after its own tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..graph import TileKind, TileTable
from .program import BlockProgram, OperandKind, RegionCall


@dataclass(frozen=True, slots=True)
class Run:
    """Run a region's forward on one chunk."""

    region: str
    chunk: int

    def __str__(self) -> str:
        return f"run      {self.region}[{self.chunk}]"


@dataclass(frozen=True, slots=True)
class RunBackward:
    """Recompute a region on one chunk and take its gradients."""

    region: str
    chunk: int

    def __str__(self) -> str:
        return f"backward {self.region}[{self.chunk}]"


@dataclass(frozen=True, slots=True)
class Attend:
    """Merge one tile into the running softmax of a query chunk."""

    attention: int
    query: int
    key: int
    kind: TileKind

    def __str__(self) -> str:
        return f"attend   a{self.attention} q[{self.query}] k[{self.key}] {self.kind.value}"


@dataclass(frozen=True, slots=True)
class Finish:
    """The query chunk has seen all its keys: its output and logsumexp become values."""

    attention: int
    query: int

    def __str__(self) -> str:
        return f"finish   a{self.attention} q[{self.query}]"


@dataclass(frozen=True, slots=True)
class AttendBackward:
    """Add one tile's part to dq of the query chunk and dk, dv of the key chunk."""

    attention: int
    query: int
    key: int
    kind: TileKind

    def __str__(self) -> str:
        return f"attend'  a{self.attention} q[{self.query}] k[{self.key}] {self.kind.value}"


@dataclass(frozen=True, slots=True)
class Mix:
    """Gather a mixer's inputs, run it whole, cut its outputs into chunks."""

    mixer: int

    def __str__(self) -> str:
        return f"mix      m{self.mixer}"


@dataclass(frozen=True, slots=True)
class MixBackward:
    """Gather inputs and output gradients, differentiate the mixer whole, cut the gradients."""

    mixer: int

    def __str__(self) -> str:
        return f"mix'     m{self.mixer}"


@dataclass(frozen=True, slots=True)
class Save:
    """Move a value to the tier where it waits for the backward (or the next block)."""

    name: str
    chunk: int

    def __str__(self) -> str:
        return f"save     {self.name}[{self.chunk}]"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start to bring a saved value back."""

    name: str
    chunk: int

    def __str__(self) -> str:
        return f"prefetch {self.name}[{self.chunk}]"


@dataclass(frozen=True, slots=True)
class Drop:
    """A value is not needed any more."""

    name: str
    chunk: int

    def __str__(self) -> str:
        return f"drop     {self.name}[{self.chunk}]"


Instruction = (
    Run
    | RunBackward
    | Attend
    | Finish
    | AttendBackward
    | Mix
    | MixBackward
    | Save
    | Prefetch
    | Drop
)


def text(instructions: Sequence[Instruction]) -> str:
    """The schedule as text, one instruction a line."""
    return "\n".join(str(i) for i in instructions)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What a block's schedule depends on; hashable, so equal blocks share a schedule."""

    pre: tuple[str, ...] | None  # names pre computes
    post: tuple[str, ...] | None
    attentions: tuple[tuple[str, ...], ...]  # name, lse, q, k, v
    num_mixers: int
    mixer_values: tuple[str, ...]  # inputs and outputs of mixers that are per token
    state_in: tuple[str, ...]
    state_out: tuple[str, ...]
    pre_backward: bool
    post_backward: bool
    held: tuple[
        str, ...
    ]  # part of state_in that the previous block's backward reads too


def block_shape(
    block: BlockProgram, previous: BlockProgram | None
) -> tuple[BlockShape, dict[str, str]]:
    """A block's shape in names of its own (v0, v1, ...), and what each stands for.

    Blocks of equal structure have equal shapes, so a schedule is made once for all of them.
    """
    short: dict[str, str] = {}

    def own(name: str) -> str:
        return short.setdefault(name, f"v{len(short)}")

    def owns(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(own(name) for name in names)

    def results(call: RegionCall | None) -> tuple[str, ...] | None:
        return None if call is None else owns(r.name for r in call.results)

    mixed: dict[str, None] = {}
    for mixer in block.mixers:
        for operand in mixer.operands:
            if operand.kind is OperandKind.TOKEN:
                mixed.setdefault(operand.name)
        for result in mixer.results:
            mixed.setdefault(result.name)
    earlier: set[str] = set()
    if previous is not None:
        earlier = {*previous.state_in, *(a.name for a in previous.attentions)}
    shape = BlockShape(
        state_in=owns(block.state_in),
        held=owns(name for name in block.state_in if name in earlier),
        pre=results(block.pre),
        attentions=tuple(
            owns((a.name, a.lse, a.q, a.k, a.v)) for a in block.attentions
        ),
        num_mixers=len(block.mixers),
        mixer_values=owns(mixed),
        post=results(block.post),
        state_out=owns(block.state_out),
        pre_backward=block.pre is not None and block.pre.needs_backward,
        post_backward=block.post is not None and block.post.needs_backward,
    )
    return shape, {short_name: name for name, short_name in short.items()}


class _Lifetimes:
    """Which attentions still need which key chunk."""

    def __init__(
        self, shape: BlockShape, tables: Sequence[TileTable], num_chunks: int
    ) -> None:
        self.waiting = [[set() for _ in range(num_chunks)] for _ in shape.attentions]
        for a, table in enumerate(tables):
            for i in range(num_chunks):
                for j in table.keys_of(i):
                    self.waiting[a][j].add(i)

    def done(self, attention: int, query: int, keys: Sequence[int]) -> None:
        for j in keys:
            self.waiting[attention][j].discard(query)

    def free(self, attention: int, key: int) -> bool:
        return not self.waiting[attention][key]


def forward_schedule(
    shape: BlockShape,
    num_chunks: int,
    tables: Sequence[TileTable],
    *,
    train: bool,
    save_attention: bool,
) -> tuple[Instruction, ...]:
    """A block's forward. ``train`` keeps state_in for the backward; else it is dropped."""
    out: list[Instruction] = []
    lives = _Lifetimes(shape, tables, num_chunks)
    ready: set[int] = set()
    kept = {*shape.state_in, *shape.state_out}

    def prepare(chunk: int) -> None:
        if chunk in ready:
            return
        ready.add(chunk)
        if shape.pre is not None:
            out.append(Run("pre", chunk))

    def prefetch(chunk: int) -> None:
        if chunk < num_chunks and chunk not in ready:
            out.extend(Prefetch(name, chunk) for name in shape.state_in)

    if shape.num_mixers:
        for i in range(num_chunks):
            prefetch(i + 1)
            prepare(i)
        out.extend(Mix(m) for m in range(shape.num_mixers))
    dropped: set[tuple[str, int]] = set()

    def drop(name: str, chunk: int) -> None:
        if name not in kept and (name, chunk) not in dropped:
            dropped.add((name, chunk))
            out.append(Drop(name, chunk))

    for i in range(num_chunks):
        needed = sorted({i}.union(*(table.keys_of(i) for table in tables)))
        for j in needed:
            prepare(j)
        prefetch(i + 1)
        for a, table in enumerate(tables):
            keys = table.keys_of(i)
            out.extend(Attend(a, i, j, table.kinds[i][j]) for j in keys)
            out.append(Finish(a, i))
            lives.done(a, i, keys)
        for _, _, q, _, _ in shape.attentions:
            if not is_key_or_value(shape, q):
                drop(q, i)
        for j in range(num_chunks):
            for _, _, _, k, v in shape.attentions:
                if (
                    j in ready
                    and j <= i
                    and all(
                        lives.free(b, j)
                        for b, other in enumerate(shape.attentions)
                        if {k, v} & {*other[3:]}
                    )
                ):
                    drop(k, j)
                    drop(v, j)
        if shape.post is not None:
            out.append(Run("post", i))
        for name in shape.state_out:
            if name not in shape.state_in:
                out.append(Save(name, i))
        for name, lse, _, _, _ in shape.attentions:
            if train and save_attention:
                if name not in shape.state_out:
                    out.append(Save(name, i))
                out.append(Save(lse, i))
            else:
                drop(name, i)
                drop(lse, i)
        for name in shape.mixer_values:
            drop(name, i)
        if not train:
            for name in shape.state_in:
                if name not in shape.state_out and (name, i) not in dropped:
                    dropped.add((name, i))
                    out.append(Drop(name, i))
    return tuple(out)


def is_key_or_value(shape: BlockShape, name: str) -> bool:
    return any(name in (k, v) for _, _, _, k, v in shape.attentions)


def backward_schedule(
    shape: BlockShape,
    num_chunks: int,
    tables: Sequence[TileTable],
    *,
    save_attention: bool,
    keep: bool,
) -> tuple[Instruction, ...]:
    """A block's backward. ``keep``: the graph is retained, so saved values stay."""
    out: list[Instruction] = []
    lives = _Lifetimes(shape, tables, num_chunks)
    saved = {*shape.state_in, *shape.state_out}
    if save_attention:
        saved.update(n for a in shape.attentions for n in a[:2])
    dropped: set[tuple[str, int]] = set()

    def drop(name: str, chunk: int) -> None:
        if (name, chunk) in dropped or (keep and name in saved):
            return
        dropped.add((name, chunk))
        out.append(Drop(name, chunk))

    def prefetch(names: Sequence[str], chunk: int) -> None:
        if 0 <= chunk < num_chunks:
            out.extend(Prefetch(name, chunk) for name in names)

    recompute = shape.pre is not None and (shape.pre_backward or shape.attentions)
    if recompute or shape.num_mixers:
        for i in range(num_chunks):
            prefetch(shape.state_in, i + 1)
            if shape.pre is not None:
                out.append(Run("pre", i))
    if shape.num_mixers:
        out.extend(Mix(m) for m in range(shape.num_mixers))
    saved_names = [n for a in shape.attentions for n in a[:2]] if save_attention else []
    finished: set[int] = set()
    pre_done: set[int] = set()

    def post(i: int) -> None:
        prefetch([*saved_names, *shape.state_in], i - 1)
        if not save_attention:
            for a, table in enumerate(tables):
                out.extend(Attend(a, i, j, table.kinds[i][j]) for j in table.keys_of(i))
                out.append(Finish(a, i))
        if shape.post_backward:
            out.append(RunBackward("post", i))

    def tiles(i: int) -> None:
        for a, table in enumerate(tables):
            keys = table.keys_of(i)
            out.extend(AttendBackward(a, i, j, table.kinds[i][j]) for j in keys)
            lives.done(a, i, keys)
        for name, lse, _, _, _ in shape.attentions:
            if name not in shape.state_in:
                drop(name, i)
            drop(lse, i)
        finished.add(i)

    def pre(i: int) -> None:
        pre_done.add(i)
        if shape.pre_backward:
            out.append(RunBackward("pre", i))
        for name in (*(shape.pre or ()), *shape.mixer_values):
            if name not in shape.state_in:
                drop(name, i)
        for name in shape.state_in:
            if name not in shape.held:
                drop(name, i)

    order = list(reversed(range(num_chunks)))
    if shape.num_mixers:
        for i in order:
            post(i)
            tiles(i)
        out.extend(MixBackward(m) for m in range(shape.num_mixers))
    for i in order:
        if not shape.num_mixers:
            post(i)
            tiles(i)
        for c in order:
            complete = c in finished and all(
                lives.free(a, c) for a in range(len(shape.attentions))
            )
            if complete and c not in pre_done:
                pre(c)
    return tuple(out)
