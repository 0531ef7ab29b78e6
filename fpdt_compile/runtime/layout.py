"""Who holds what: tokens and heads of a sequence shared by P ranks.

Tokens, outside of attention: of chunk i (P times the chunk length) rank r holds a contiguous part,
in rank order. With full chunks of P * c tokens that is ``[(i*P + r)*c, (i*P + r + 1)*c)``, so what
the ranks gather is contiguous, and causal work is balanced. A chunk that does not divide is shared
as evenly as parts of at least two tokens allow (compiled bodies are made for two rows and more);
some ranks may then hold none of it.

Heads, inside attention: every rank has all tokens of a chunk for a contiguous range of query heads,
and the key/value heads those read. With G >= P each rank has whole groups; with G < P the ranks are
shared out to the groups, and those of one group hold the same key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass

from .chunks import Bounds, chunk_bounds

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads and the key/value heads of one rank, as ranges."""

    queries: Range
    keys: Range

    @property
    def num_queries(self) -> int:
        return self.queries[1] - self.queries[0]

    @property
    def num_keys(self) -> int:
        return self.keys[1] - self.keys[0]


def even_parts(total: int, num_parts: int) -> list[Range]:
    """``total`` things in order for ``num_parts``; the first ones get one more."""
    size, more = divmod(total, num_parts)
    ends = [(i + 1) * size + min(i + 1, more) for i in range(num_parts)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def share_heads(num_heads: int, num_key_heads: int, size: int) -> list[HeadShare]:
    """Per rank; ``num_key_heads`` divides ``num_heads``."""
    per_group = num_heads // num_key_heads
    if num_key_heads >= size:
        return [
            HeadShare((a * per_group, b * per_group), (a, b))
            for a, b in even_parts(num_key_heads, size)
        ]
    shares = []
    for group, (first, last) in enumerate(even_parts(size, num_key_heads)):
        start = group * per_group
        for a, b in even_parts(per_group, last - first):
            keys = (group, group + 1) if b > a else (group, group)
            shares.append(HeadShare((start + a, start + b), keys))
    return shares


def share_tokens(start: int, stop: int, size: int, chunk_len: int) -> list[Range]:
    """The parts of one chunk, per rank, in global token numbers."""
    length = stop - start
    active = min(size, max(1, length // 2))
    if length == size * chunk_len:
        active = size
    parts = even_parts(length, active)
    parts += [(length, length)] * (size - active)
    return [(start + a, start + b) for a, b in parts]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """One sequence: ``chunks`` in global token numbers, and ``parts[chunk][rank]`` of them."""

    length: int
    chunks: Bounds
    parts: tuple[tuple[Range, ...], ...]

    @classmethod
    def of(cls, length: int, chunk_len: int, size: int) -> SequenceLayout:
        """``chunk_len`` is per rank."""
        chunks = chunk_bounds(length, chunk_len * size)
        parts = tuple(tuple(share_tokens(a, b, size, chunk_len)) for a, b in chunks)
        return cls(length, chunks, parts)

    def own(self, rank: int) -> Bounds:
        """A rank's part of every chunk."""
        return tuple(parts[rank] for parts in self.parts)

    def local(self, rank: int) -> Bounds:
        """The same in numbers of the rank's own tokens, laid one after the other."""
        found, start = [], 0
        for a, b in self.own(rank):
            found.append((start, start + b - a))
            start += b - a
        return tuple(found)

    def num_tokens(self, rank: int) -> int:
        return sum(b - a for a, b in self.own(rank))
