"""The instructions of a schedule: what one step of the executor does.

Values are named as in their block's :class:`BlockShape`; chunks are numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvariantError
from ..graph import TileKind


class Transfer(enum.Enum):
    """What ranks exchange. Values in heads form, ``name^``, are all tokens of a chunk for this
    rank's heads; in token form they are all heads of this rank's tokens."""

    QKV = "q, k, v to heads"
    OUT = "out to tokens"
    GRAD_OUT = "out and its gradient to heads"
    GRAD_QKV = "gradients of q, k, v to tokens"


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
class Send:
    """Issue the exchange ``what`` of a chunk of a sequence; see :class:`Transfer`."""

    what: Transfer
    sequence: int
    chunk: int

    def __str__(self) -> str:
        return f"send     {self.what.value} s{self.sequence}[{self.chunk}]"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for that exchange: what it carries are values (or gradients) from here on."""

    what: Transfer
    sequence: int
    chunk: int

    def __str__(self) -> str:
        return f"wait     {self.what.value} s{self.sequence}[{self.chunk}]"


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
    """Move a value to the tier where it waits; its device copy is given up."""

    name: str
    chunk: int
    tier: str

    def __str__(self) -> str:
        return f"save     {self.name}[{self.chunk}] to {self.tier}"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start to bring a saved value back."""

    name: str
    chunk: int

    def __str__(self) -> str:
        return f"prefetch {self.name}[{self.chunk}]"


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the device copy of a saved value that has not changed."""

    name: str
    chunk: int

    def __str__(self) -> str:
        return f"release  {self.name}[{self.chunk}]"


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
    | Send
    | Wait
    | Mix
    | MixBackward
    | Save
    | Prefetch
    | Release
    | Drop
)


def text(instructions: Sequence[Instruction]) -> str:
    """The schedule as text, one instruction a line."""
    return "\n".join(str(i) for i in instructions)


def check_exchanges(instructions: Sequence[Instruction]) -> None:
    """Every exchange that is sent is waited for, once and later. Raises InvariantError."""
    sent: set[tuple[Transfer, int, int]] = set()
    for x in instructions:
        if not isinstance(x, (Send, Wait)):
            continue
        key = (x.what, x.sequence, x.chunk)
        if isinstance(x, Send) == (key in sent):
            raise InvariantError(f"exchange out of order: {x}")
        (sent.add if isinstance(x, Send) else sent.remove)(key)
    if sent:
        raise InvariantError(f"exchanges nobody waits for: {sorted(map(str, sent))}")
