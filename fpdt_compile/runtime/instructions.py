"""The instructions of a schedule: what one step of the executor does.

Values are named as in their block's :class:`BlockShape`; chunks are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph import TileKind


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
