"""What a step will hold in each tier, found by walking its instructions with the values' sizes.

In: a step and its blocks' shapes. Out: the largest number of bytes its store holds at once, by
tier, and in all ``memory`` of the compute device above parameters and inputs: stored values,
vectors, gradients of parameters, and what each instruction needs besides while it runs. The walk
follows the instructions that the executor will run: entry, blocks forward, heads, blocks backward.

Copies are taken to be done when they are issued, so what is still being written behind the compute
is not counted; nor is what kernels allocate inside. For bodies that Inductor compiled,
intermediates are an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..graph import TileTable
from ..kernels.online_softmax import accumulator_dtype
from .block_schedule import block_schedule
from .block_shape import BlockShape
from .copies import Accesses, Key, is_sum, split_name
from .disk import padded
from .instruction_needs import BlockNeeds, Needs
from .instructions import Drop, Prefetch, Release, Save
from .program import AttentionCall, BlockProgram, OperandKind
from .step import Step, unit_grad
from .stores import StoreCounters


class ForecastDone(Exception):
    """Ends a step that only its forecast was asked of."""

    def __init__(self, peaks: dict[str, int]) -> None:
        super().__init__("only a forecast was asked for")
        self.peaks = peaks


class Walker:
    """Bytes per tier while instructions go by. ``copied`` are the tiers that need a copy."""

    def __init__(self, size_of: Callable[[Key], int], copied: Sequence[str]) -> None:
        self.size_of = size_of
        self.copied = copied
        self.held = StoreCounters()
        self.file_bytes = 0  # of the disk tier now, in whole pages
        self.file_peak = 0
        self.tier: dict[Key, str] = {}
        self.resident: set[Key] = set()
        # Buffers that values are read into, by size: in use and made. They are kept for reads to
        # come.
        self.read: set[Key] = set()
        self.in_use: Counter[int] = Counter()
        self.buffers: Counter[int] = Counter()

    @property
    def idle_bytes(self) -> int:
        """Bytes of buffers that no value is in."""
        return sum(size * (n - self.in_use[size]) for size, n in self.buffers.items())

    def make(self, key: Key) -> None:
        if key not in self.tier:
            self.tier[key] = "device"
            self.resident.add(key)
            self.held.hold("device", self.size_of(key))
        self.prefetch(key)

    def save(self, key: Key, tier: str) -> None:
        if key not in self.tier or tier == "device":
            return
        if self.tier[key] != tier:
            if tier not in self.copied:
                self.held.hold(self.tier[key], -self.size_of(key))
            self.held.hold(tier, self.size_of(key))
            self.tier[key] = tier
            if tier == "disk":
                self.file_bytes += padded(self.size_of(key))
                self.file_peak = max(self.file_peak, self.file_bytes)
        self.release(key)

    def prefetch(self, key: Key) -> None:
        if self.tier.get(key) in self.copied and key not in self.resident:
            self.resident.add(key)
            size = self.size_of(key)
            self.held.hold("device", size)
            self.read.add(key)
            self.in_use[size] += 1
            self.buffers[size] = max(self.buffers[size], self.in_use[size])

    def release(self, key: Key) -> None:
        if self.tier.get(key) in self.copied and key in self.resident:
            self.resident.discard(key)
            self.held.hold("device", -self.size_of(key))
            if key in self.read:
                self.read.discard(key)
                self.in_use[self.size_of(key)] -= 1

    def drop(self, key: Key) -> None:
        if key not in self.tier:
            return
        self.release(key)
        tier = self.tier.pop(key)
        self.held.hold(tier, -self.size_of(key))
        if tier == "disk":
            self.file_bytes -= padded(self.size_of(key))
        self.resident.discard(key)


class Forecast:
    """The walk over a whole step."""

    def __init__(
        self,
        step: Step,
        shapes: Sequence[tuple[BlockShape, dict[str, str]]],
        held: frozenset[str],
        train: bool,
        *,
        intermediates: bool = True,
    ) -> None:
        self.step = step
        self.shapes = shapes
        self.kept_by_head = held
        self.train = train
        self.attentions: dict[str, AttentionCall] = {}
        for block in step.program.blocks:
            for call in block.attentions:
                self.attentions[call.name] = self.attentions[call.lse] = call
        self.walker = Walker(self.num_bytes, step.placement.copied)
        self.needs = Needs(step, intermediates)
        self.memory = 0  # the most so far

    def note(self, more: int) -> None:
        """While something runs that needs ``more`` bytes besides what is held."""
        held = self.walker.held.held_bytes
        now = held["device"] + self.walker.idle_bytes + self.needs.kept_bytes + more
        if "host" not in self.walker.copied:
            now += held["host"]
        self.memory = max(self.memory, now)

    def peaks(self) -> dict[str, int]:
        """Bytes by tier, and ``memory``."""
        step, program, walker = self.step, self.step.program, self.walker
        hidden = step.placement.hidden
        for call in program.entries:
            for chunk in step.own_chunks(call.symbol):
                self.note(self.needs.of_region(call, "forward", chunk))
                for result in call.results:
                    walker.make((result.name, chunk))
                    walker.save((result.name, chunk), hidden)
        for index, block in enumerate(program.blocks):
            self.walk_block(index, block, train=self.train)
        self.walk_heads()
        if self.train:
            for index in reversed(range(len(program.blocks))):
                block = program.blocks[index]
                self.walk_block(index, block, keep=False, order=step.order)
                self.needs.end_stage()
            self.walk_entry_backward()
        return {**walker.held.peak_bytes, "memory": self.memory}

    def walk_block(self, index: int, block: BlockProgram, **choices: object) -> None:
        step, (shape, names) = self.step, self.shapes[index]
        counts = tuple(len(step.bounds[symbol]) for symbol in block.symbols)
        tables: tuple[TileTable, ...] = tuple(step.table(a) for a in block.attentions)
        save = step.saves[index]
        overlap = step.overlap if step.parallel else None
        schedule = block_schedule(
            shape, counts, tables, step.placement, overlap, save=save, **choices
        )
        accesses = Accesses(
            shape, counts, parallel=step.parallel, saved=save != "hidden"
        )
        walker, needs = self.walker, BlockNeeds(self.needs, block)

        def real(key: Key) -> Key:
            own, suffix = split_name(key[0])
            return names[own] + suffix, key[1]

        for x in schedule:
            match x:
                case Save(name, chunk, tier):
                    walker.save(real((name, chunk)), tier)
                case Prefetch(name, chunk):
                    for place in step.with_units(*real((name, chunk))):
                        walker.prefetch(place)
                case Release(name, chunk):
                    walker.release(real((name, chunk)))
                case Drop(name, chunk):
                    walker.drop(real((name, chunk)))
                case _:
                    touched = accesses.of(x)
                    for key in touched.read:
                        walker.prefetch(real(key))
                    self.note(needs.of(x))
                    for key in touched.changed:
                        if self.exists(real(key)):
                            walker.make(real(key))
                    for key in touched.taken:
                        for place in step.with_units(*real(key)):
                            walker.drop(place)

    def exists(self, key: Key) -> bool:
        """Whether such a value is ever there: not a gradient that nobody takes."""
        own, suffix = split_name(key[0])
        if suffix.endswith("'") or is_sum(key[0]):
            return self.step.program.needs_grad.get(own, False)
        return True

    def walk_heads(self) -> None:
        step, program, walker = self.step, self.step.program, self.walker
        for index, call in enumerate(program.heads):
            one_pass = program.one_pass[index] and self.train
            names = [o for o in call.operands if o.kind is OperandKind.TOKEN]
            for chunk in step.own_chunks(call.symbol):
                form = "forward_backward" if one_pass else "forward"
                piece = step.head_pieces(step.own[call.symbol][chunk])[0]
                more = self.needs.of_region(call, form, chunk, piece)
                if one_pass:
                    self.needs.note_gradients(call)
                for operand in names:
                    walker.prefetch((operand.name, chunk))
                    if operand.needs_grad and self.train:
                        key = (f"{operand.name}'", chunk)
                        if one_pass:
                            key = unit_grad(operand.name, chunk, index)
                        walker.make(key)
                        self.note(more)
                        walker.save(key, step.placement.hidden)
                    leaves = (one_pass or not self.train) and (
                        operand.name not in self.kept_by_head
                    )
                    (walker.drop if leaves else walker.release)((operand.name, chunk))
                self.note(more)

    def walk_entry_backward(self) -> None:
        step, walker = self.step, self.walker
        for call in step.program.entries:
            for chunk in step.own_chunks(call.symbol) if call.needs_backward else ():
                for result in call.results:
                    for key in step.with_units(f"{result.name}'", chunk):
                        walker.prefetch(key)
                more = self.needs.of_region(call, "backward", chunk)
                self.needs.note_gradients(call)
                self.note(more)
                for result in call.results:
                    for key in step.with_units(f"{result.name}'", chunk):
                        walker.drop(key)

    # sizes --------------------------------------------------------------------

    def num_bytes(self, key: Key) -> int:
        """Bytes of a chunk of a value, of its gradient, heads form or running gradient."""
        name, chunk = key
        own, suffix = split_name(name.rstrip("0123456789") if "'" in name else name)
        step, program = self.step, self.step.program
        which = suffix[2] if suffix.startswith(".d") else ""
        call = self.attentions.get(own)
        if which:
            assert call is not None
            own = {"q": call.q, "k": call.k, "v": call.v}[which]
        is_lse = call is not None and own == call.lse
        source = call.name if call is not None and is_lse else own
        spec, symbol = program.specs[source], program.axes[source].symbol
        heads_form = step.parallel and ("^" in suffix or bool(which) or is_lse)
        bounds = step.bounds if heads_form else step.own
        start, end = bounds[symbol][chunk]
        sizes = {**step.symbols, symbol: end - start}
        shape = [int(size.subs(sizes)) for size in spec.shape]
        if heads_form and call is not None:
            share = call.shares[step.ranks.rank]
            keys = which in ("k", "v")
            shape[1] = share.num_keys if keys else share.num_queries
        elif heads_form:
            shape[1] = self.heads_of(own)
        itemsize = spec.dtype.itemsize
        if which or is_lse:
            itemsize = accumulator_dtype(spec.dtype).itemsize
        if is_lse:
            shape = shape[:3]
        total = itemsize
        for size in shape:
            total *= size
        return total

    def heads_of(self, name: str) -> int:
        """Heads of q, k or v in heads form on this rank."""
        for call in self.attentions.values():
            share = call.shares[self.step.ranks.rank]
            if name == call.q:
                return share.num_queries
            if name in (call.k, call.v):
                return share.num_keys
        return 0
