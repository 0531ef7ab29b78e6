"""Autocast states as data: what an operator ran under, and running it under the same.

A captured graph shows no casts: each of its nodes keeps the state in force where the user's code
called it (``node.meta["autocast"]``), and whoever computes the node, or its fake value, does so
under that state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

# By device type: (enabled, dtype); a dtype of None is the device's own choice.
AutocastState = Mapping[str, tuple[bool, torch.dtype | None]]


def current_autocast() -> dict[str, tuple[bool, torch.dtype]]:
    """The state in force."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return {d: state_of(d) for d in devices}


def state_of(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@contextlib.contextmanager
def autocast_as(state: AutocastState | None) -> Iterator[None]:
    """Run under a state (None: as it is), keeping no casts of parameters.

    Unlike ``torch.autocast`` it leaves nothing in a graph that is being recorded.
    """
    cache, before = torch.is_autocast_cache_enabled(), {}
    try:
        torch.set_autocast_cache_enabled(False)
        for device, (enabled, dtype) in (state or {}).items():
            before[device] = state_of(device)
            set_state(device, enabled, dtype)
        yield
    finally:
        for device, have in before.items():
            set_state(device, *have)
        torch.set_autocast_cache_enabled(cache)


def without_autocast(state: AutocastState | None) -> AutocastState:
    """The same devices, switched off."""
    return {device: (False, dtype) for device, (_, dtype) in (state or {}).items()}


def set_state(device: str, enabled: bool, dtype: torch.dtype | None) -> None:
    torch.set_autocast_enabled(device, enabled)
    if dtype is not None:
        torch.set_autocast_dtype(device, dtype)
