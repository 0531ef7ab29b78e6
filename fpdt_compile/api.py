"""``optimize``: compile a module in place so that it trains in chunks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ._torch_private import logging_skipped, own_errors, traceable_torch
from .backend import FpdtBackend, optimized_backend
from .config import FpdtConfig
from .groups import make_ranks
from .passes.compile_bodies import CompileStats
from .recorded_outputs import install_recording_hooks
from .token_dims import TokenMarker


def optimize(
    model: nn.Module,
    *,
    seq_parallel: int | DeviceMesh = 1,
    chunk_len: int | None = None,
    offload: str = "host",
    save: str = "attention",
    codegen: str = "inductor",
    strict: bool = False,
    verify: bool = False,
    outputs: str = "auto",
    token_dims: Mapping[str, int] | None = None,
    **options: Any,
) -> nn.Module:
    """Make ``model`` compute its forward and backward in chunks of the sequence.

    The module is compiled in place and returned: class, state_dict keys, hooks and
    ``save_pretrained`` are unchanged. Compilation happens at the first call; the token dimension is
    marked dynamic, so one compile serves every sequence length.

    Args are those of :class:`FpdtConfig`. Raises ValueError for a bad option.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={type(model).__name__}: allowed is a torch.nn.Module")
    given = dict(
        seq_parallel=seq_parallel,
        chunk_len=chunk_len,
        offload=offload,
        save=save,
        codegen=codegen,
        strict=strict,
        verify=verify,
        outputs=outputs,
        token_dims=token_dims,
        **options,
    )
    config = FpdtConfig.from_options(given)
    backend = FpdtBackend(config, make_ranks(config.seq_parallel))
    model.compile(backend=backend)
    compiled = model._compiled_call_impl
    marker = TokenMarker(model, config.token_dims)

    @functools.wraps(model.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        marker.mark(args, kwargs)
        install_recording_hooks(model, kwargs)
        with own_errors(), logging_skipped(), traceable_torch():
            return compiled(*args, **kwargs)

    call.fpdt_backend = backend
    model._compiled_call_impl = call
    return model


def compile_stats(model: nn.Module) -> CompileStats:
    """Counters of an optimized model's compilations. Raises ValueError for any other model."""
    return backend_of(model).stats


def backend_of(model: nn.Module) -> FpdtBackend:
    """The backend of an optimized model: its configuration, analyses and compiled bodies."""
    backend = optimized_backend(model)
    if backend is None:
        raise ValueError(f"model={type(model).__name__}: allowed is an optimized model")
    return backend
