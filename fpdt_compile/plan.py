"""The plan: every choice the runtime must not make again.

A :class:`ChunkPlan` is made by ``passes/plan_chunks`` from the configuration and the cost model, is
the same on every rank, and can be written to JSON and compared by digest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

LEVELS = ("hidden", "attention", "qkv")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockBytes:
    """Bytes for one token of every batch row: ``attention``: outputs and logsumexps, ``qkv``: q, k
    and v; ``kv``: these with their running gradients."""

    attention: int
    qkv: int
    kv: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """Lengths are in tokens per rank.

    ``chunk_len``: pre, attention and post; ``head_len``: pieces of the head, at most ``chunk_len``;
    ``hidden``, ``attention``, ``kv``: the tiers of hidden states, of attention outputs and of q, k
    and v; ``save``, ``save_bytes``, ``order``, ``lookahead``, ``overlap``, ``reduce_gradients``,
    ``resident_bytes``: see FpdtConfig;
    ``stored_bytes_per_token``: what a training step keeps for one token of every batch row, over
    all blocks, if it saves as much as ``save`` says; ``blocks``: a block's bytes for one token.
    """

    chunk_len: int
    head_len: int
    hidden: str
    attention: str
    kv: str
    save: str
    save_bytes: int | None
    order: str
    lookahead: int
    overlap: bool
    reduce_gradients: bool
    resident_bytes: int
    seq_parallel: int
    num_blocks: int
    stored_bytes_per_token: int
    blocks: tuple[BlockBytes, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ChunkPlan:
        found = json.loads(text)
        found["blocks"] = tuple(BlockBytes(**block) for block in found["blocks"])
        return cls(**found)

    def saves(self, num_tokens: int) -> tuple[str, ...]:
        """What each block saves for the backward of so many tokens (a rank's): as much as ``save``
        says while it fits ``save_bytes``; attention outputs come before q, k and v."""
        if self.save_bytes is None:
            return (self.save,) * self.num_blocks
        found, left = ["hidden"] * self.num_blocks, self.save_bytes
        for level in LEVELS[1 : LEVELS.index(self.save) + 1]:
            for i, block in enumerate(self.blocks):
                needed = getattr(block, level) * num_tokens
                if found[i] == LEVELS[LEVELS.index(level) - 1] and needed <= left:
                    found[i], left = level, left - needed
        return tuple(found)

    def kv_tier(self, num_tokens: int) -> str:
        """Where q, k and v of so many tokens are: on the device if they fit."""
        needed = max((block.kv for block in self.blocks), default=0) * num_tokens
        return "device" if needed <= self.resident_bytes else self.kv

    @property
    def digest(self) -> str:
        """Equal for equal plans; compared across ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]
