"""Ask transformers to install its recording hooks before Dynamo sees the model.

transformers records router logits and hidden states with forward hooks, which it installs at the
first call that asks for them, under a lock. Dynamo cannot trace the lock and would break the graph
there; with the hooks in place the model is one graph. Nothing is done for calls that ask for no
recorded output: transformers would install no hook either.

While Dynamo traces, the recorder is a global variable instead of a context variable. A call that
ends in an error between two graphs would leave it so, and later calls of any model record nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

RECORDING = "transformers.utils.output_capturing"


def install_recording_hooks(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Install the hooks that a call with ``kwargs`` would install; see the module docstring."""
    recording = sys.modules.get(RECORDING)
    registry = getattr(recording, "_CAN_RECORD_REGISTRY", None)
    install = getattr(recording, "maybe_install_capturing_hooks", None)
    if registry is None or install is None:
        return
    for module in model.modules():
        config = getattr(module, "config", None)
        names = [f"output_{key}" for key in registry.get(module)] if config else []
        if any(kwargs.get(name, getattr(config, name, False)) for name in names):
            install(module)


@contextlib.contextmanager
def recorder_restored() -> Iterator[None]:
    """Whatever happens in here leaves the recorder as it was before."""
    recorder = getattr(sys.modules.get(RECORDING), "_active_collector", None)
    before = {
        name: getattr(recorder, name)
        for name in ("compiling", "global_var")
        if hasattr(recorder, name)
    }
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(recorder, name, value)
