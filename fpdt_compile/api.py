"""``optimize``: compile a module in place so that it trains in chunks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ._torch_private import logging_skipped, own_errors, traceable_torch
from .backend import FpdtBackend, optimized_backend
from .config import FpdtConfig
from .groups import make_ranks
from .passes.compile_bodies import CompileStats
from .recorded_outputs import install_recording_hooks, recorder_restored
from .runtime.forecast import ForecastDone
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
        if is_fsdp_module(model):
            return call_between_hooks(model, run_forward, args, kwargs)
        return run(compiled, *args, **kwargs)

    def run(code: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        marker.mark(args, kwargs)
        install_recording_hooks(model, kwargs)
        with own_errors(), logging_skipped(), traceable_torch(), recorder_restored():
            return code(*args, **kwargs)

    run_forward = functools.partial(run, torch.compile(model.forward, backend=backend))

    call.fpdt_backend = backend
    model._compiled_call_impl = call
    return model


def is_fsdp_module(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to this module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def call_between_hooks(
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a module whose hooks run as they are and whose forward is ``forward``: FSDP2's hooks
    gather and free the weights around it, and hand it other tensors than the caller's."""
    model.forward = forward
    try:
        return model._call_impl(*args, **kwargs)
    finally:
        del model.forward


def compile_stats(model: nn.Module) -> CompileStats:
    """Counters of an optimized model's compilations. Raises ValueError for any other model."""
    return backend_of(model).stats


def forecast_memory(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, int]:
    """What a training step of an optimized model with these inputs will hold, in bytes.

    The model is compiled if it has not been; the step is not run. ``memory`` is the most that the
    compute device will hold above parameters and inputs, gradients of parameters included (on a CPU
    with the "host" tier); ``device``, ``host`` and ``disk`` are the most that stored values take
    there. Intermediates of bodies that Inductor compiled are an upper bound, what its kernels and
    the compiler itself allocate is not counted.

    Raises ValueError for a model that is not optimized, or of which nothing runs in chunks.
    """
    backend = backend_of(model)
    backend.only_forecast = True
    try:
        model(*args, **kwargs)
    except ForecastDone as done:
        return done.peaks
    finally:
        backend.only_forecast = False
    raise ValueError(
        f"model={type(model).__name__}: allowed are models of which something runs in chunks"
    )


def backend_of(model: nn.Module) -> FpdtBackend:
    """The backend of an optimized model: its configuration, analyses and compiled bodies."""
    backend = optimized_backend(model)
    if backend is None:
        raise ValueError(f"model={type(model).__name__}: allowed is an optimized model")
    return backend
