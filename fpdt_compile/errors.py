"""Errors and the record of why something was not rewritten.

A user's mistake raises ``ValueError`` where the option is read (``config.py``). What the
compiler cannot do raises :class:`CantChunk`, which is caught in one place (``passes/manager.py``)
and becomes a :class:`Rejection` in the report, unless ``strict=True``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Why a part of the model runs whole.

    ``op`` is the ATen operator, ``source`` the user's ``file:line`` (or ``"unknown"``), ``reason``
    what could not be proved, ``change`` what the user can do about it.
    """

    op: str
    source: str
    reason: str
    change: str

    def __str__(self) -> str:
        return f"{self.op} at {self.source}: {self.reason}; {self.change}"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


class FpdtError(RuntimeError):
    """Base of the errors this library raises on its own account."""


class CantChunk(FpdtError):
    """A part of the graph cannot be run in chunks; carries the :class:`Rejection`."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(str(rejection))
        self.rejection = rejection


class InvariantError(FpdtError):
    """A named invariant of the intermediate representation does not hold: a bug here."""


class RankMismatch(FpdtError, ValueError):
    """Ranks that share a sequence were given different models, plans or batches."""


class OutputNotMaterialized(FpdtError):
    """A model output that training does not need was touched; see ``outputs="all"``."""


class StoreError(FpdtError, OSError):
    """Offloaded values cannot be kept: a disk is full, read-only or gone."""
