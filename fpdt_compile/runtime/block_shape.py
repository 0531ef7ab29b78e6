"""What a block's schedule depends on: its values by short names, and who reads and makes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from .program import BlockProgram, OperandKind, RegionCall

Value = tuple[int, str]  # (sequence, name)


def key_region(sequence: int) -> str:
    """The region that makes keys and values of a sequence."""
    return f"keys{sequence}" if sequence else "pre"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What a block's schedule depends on; hashable, so equal blocks share a schedule.

    ``pre`` are the names that region computes; ``keys`` the same for sequences 1 and up (None: no
    such region). ``attentions`` are (name, lse, q, k, v), ``key_sequences`` where their keys are.
    ``held`` are values that the backward of an earlier block reads too, ``later`` those that a
    later block's forward reads.
    """

    state_in: tuple[str, ...]
    key_state: tuple[Value, ...]
    pre: tuple[str, ...] | None
    keys: tuple[tuple[str, ...] | None, ...]
    attentions: tuple[tuple[str, ...], ...]
    key_sequences: tuple[int, ...]
    num_mixers: int
    mixer_values: tuple[Value, ...]  # inputs and outputs of mixers that are per token
    post: tuple[str, ...] | None
    state_out: tuple[str, ...]
    pre_backward: bool
    keys_backward: tuple[bool, ...]
    post_backward: bool
    held: tuple[str, ...]
    later: tuple[str, ...]
    reads: tuple[tuple[str, tuple[str, ...]], ...]  # by region
    trained: tuple[tuple[str, tuple[str, ...]], ...]  # those that get a gradient


def block_shape(
    block: BlockProgram, *, earlier: Collection[str], later: Collection[str]
) -> tuple[BlockShape, dict[str, str]]:
    """A block's shape in names of its own (v0, v1, ...), and what each stands for.

    Blocks of equal structure have equal shapes, so a schedule is made once for all of them.
    ``earlier`` / ``later`` are the names that blocks before / after this one read.
    """
    short: dict[str, str] = {}
    sequence = {symbol: n for n, symbol in enumerate(block.symbols)}

    def own(name: str) -> str:
        return short.setdefault(name, f"v{len(short)}")

    def owns(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(own(name) for name in names)

    def results(call: RegionCall | None) -> tuple[str, ...] | None:
        return None if call is None else owns(r.name for r in call.results)

    def trains(call: RegionCall | None) -> bool:
        return call is not None and call.needs_backward

    regions = {"pre": block.pre, "post": block.post}
    regions.update((key_region(n), call) for n, call in enumerate(block.keys, 1))

    def operands(call: RegionCall | None, *, trained: bool) -> tuple[str, ...]:
        return owns(
            o.name
            for o in (() if call is None else call.operands)
            if o.kind is OperandKind.TOKEN and (o.needs_grad or not trained)
        )

    mixed: dict[str, int] = {}
    for mixer in block.mixers:
        for x in (*mixer.operands, *mixer.results):
            if getattr(x, "kind", OperandKind.TOKEN) is OperandKind.TOKEN:
                assert x.axis is not None
                mixed.setdefault(x.name, sequence[x.axis.symbol])
    read = (*block.state_in, *block.key_state)
    shape = BlockShape(
        state_in=owns(block.state_in),
        key_state=tuple(
            (sequence[block.key_symbols[name]], own(name)) for name in block.key_state
        ),
        pre=results(block.pre),
        keys=tuple(results(call) for call in block.keys),
        attentions=tuple(
            owns((a.name, a.lse, a.q, a.k, a.v)) for a in block.attentions
        ),
        key_sequences=tuple(sequence[a.key_symbol] for a in block.attentions),
        num_mixers=len(block.mixers),
        mixer_values=tuple((n, own(name)) for name, n in mixed.items()),
        post=results(block.post),
        state_out=owns(block.state_out),
        pre_backward=trains(block.pre),
        keys_backward=tuple(trains(call) for call in block.keys),
        post_backward=trains(block.post),
        held=owns(name for name in read if name in earlier),
        later=owns(name for name in read if name in later),
        reads=tuple((r, operands(x, trained=False)) for r, x in regions.items()),
        trained=tuple((r, operands(x, trained=True)) for r, x in regions.items()),
    )
    return shape, {short_name: name for name, short_name in short.items()}
