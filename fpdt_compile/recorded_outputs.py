"""Ask transformers to install its recording hooks before Dynamo sees the model.

transformers records router logits and hidden states with forward hooks, which it installs at the
first call that asks for them, under a lock. Dynamo cannot trace the lock and would break the graph
there; with the hooks in place the model is one graph. Nothing is done for calls that ask for no
recorded output: transformers would install no hook either.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

RECORDING = "transformers.utils.output_capturing"


def install_recording_hooks(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Install the hooks that a call with ``kwargs`` would install; see the module docstring."""
    recording = sys.modules.get(RECORDING)
    if recording is None or not asks_for_outputs(model, kwargs):
        return
    registry = getattr(recording, "_CAN_RECORD_REGISTRY", {})
    install = getattr(recording, "maybe_install_capturing_hooks", None)
    for module in model.modules():
        if install is not None and hasattr(module, "config") and registry.get(module):
            install(module)


def asks_for_outputs(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument, or the configuration, named ``output_...`` is set."""
    config = getattr(getattr(model, "config", None), "__dict__", {})
    settings = {**config, **kwargs}
    return any(
        name.lstrip("_").startswith("output_") and bool(value)
        for name, value in settings.items()
        if isinstance(value, (bool, int, list, tuple))
    )
