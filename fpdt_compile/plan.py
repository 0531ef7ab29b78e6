"""The plan: every choice the runtime must not make again.

A :class:`ChunkPlan` is made by ``passes/plan_chunks`` from the configuration and the cost model, is
the same on every rank, and can be written to JSON and compared by digest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """Lengths are in tokens per rank.

    ``chunk_len``: pre, attention and post; ``head_len``: pieces of the head, at most ``chunk_len``;
    ``tier``: where saved values wait; ``save``: "attention" keeps each attention's output and
    logsumexp for the backward, "hidden" recomputes them; ``stored_bytes_per_token``: what a
    training step keeps for one token of every batch row, over all blocks.
    """

    chunk_len: int
    head_len: int
    tier: str
    save: str
    seq_parallel: int
    num_blocks: int
    stored_bytes_per_token: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ChunkPlan:
        return cls(**json.loads(text))

    @property
    def digest(self) -> str:
        """Equal for equal plans; compared across ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]
