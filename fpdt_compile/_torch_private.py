"""The one place that imports torch's private modules, so that a torch upgrade is one file.

What is used and why:

- ``FakeTensorMode``, ``ShapeEnv``: to trace region bodies with a symbolic chunk length;
- ``make_fx`` with ``pre_dispatch``: to retrace Dynamo's graph;
- ``compile_fx``: to compile a traced region body with Inductor;
- ``get_keep_graph``: whether the running backward call retains the graph.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.compiler.config
import torch.distributed as dist
import torch.fx.traceback as fx_traceback
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.utils import reenter_make_fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.experimental.symbolic_shapes import _ShapeEnvGuardError as ShapeGuardError
from torch.utils import _pytree as pytree

from ._torch_sizes import (
    NewGuard,
    SymMax,
    SymMin,
    decided_by_hints,
    new_size,
    no_new_guards,
    specializations,
    statically_known_true,
    symbol_hint,
    write_size,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "NewGuard",
    "ShapeEnv",
    "ShapeGuardError",
    "SymMax",
    "SymMin",
    "autograd_function_apply",
    "decided_by_hints",
    "default_timeout",
    "fake_with_symbolic_dims",
    "get_keep_graph",
    "inductor_compile",
    "is_checkpoint_op",
    "is_flex_op",
    "is_function_op",
    "logging_skipped",
    "make_fx",
    "mark_dynamic",
    "new_fake_mode",
    "new_size",
    "no_new_guards",
    "outside_tracing",
    "preserve_node_meta",
    "record_call",
    "specializations",
    "statically_known_true",
    "structured_trace",
    "symbol_hint",
    "trace_part",
    "traceable_torch",
    "untraced",
    "write_size",
]

untraced = disable_proxy_modes_tracing
preserve_node_meta = fx_traceback.preserve_node_meta


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Ask Dynamo to keep ``tensor``'s ``dim`` symbolic; code that needs a number still gets one."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


LOGGING = (
    "debug info warning error critical exception log warning_once info_once".split()
)


@contextlib.contextmanager
def logging_skipped() -> Iterator[None]:
    """While Dynamo traces, a call of a logger is left out; it would end the graph there."""
    methods = {getattr(logging.Logger, name, None) for name in LOGGING} - {None}
    config = torch._dynamo.config
    with config.patch(
        ignore_logging_functions=config.ignore_logging_functions | methods
    ):
        yield


def default_timeout() -> timedelta:
    """How long the default process group waits for an answer."""
    group = distributed_c10d._get_default_group()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    return group._get_backend(device).options._timeout


def is_checkpoint_op(target: Any) -> bool:
    """Whether a call_function target is Dynamo's activation-checkpoint region."""
    return target in (
        torch.ops.higher_order.tag_activation_checkpoint,
        torch.ops.higher_order.wrap_activation_checkpoint,
    )


def is_function_op(target: Any) -> bool:
    """Whether a call_function target is Dynamo's ``torch.autograd.Function``."""
    return target is autograd_function_apply


def is_flex_op(target: Any) -> bool:
    """Whether a call_function target is ``flex_attention`` as Dynamo writes it."""
    return target is torch.ops.higher_order.flex_attention


BLOCK_MASK_LENGTHS = r".*\.seq_lengths\[\d\]"


@contextlib.contextmanager
def traceable_torch() -> Iterator[None]:
    """Let Dynamo trace torch's own attention in one piece, for the time of one call.

    - torch refuses ``flex_attention`` with gradients on a CPU because its own kernel has no
      backward there; what is traced in this context does not run torch's kernel.
    - A deprecation warning in ``create_block_mask`` would break the graph, and the lengths that a
      block mask carries are numbers to Dynamo unless they are named as dynamic.
    - ``nn.TransformerEncoder`` looks at a mask's values to find out whether it is causal, which
      breaks the graph too; it needs to know that only to choose a kernel.

    Code that is not traced runs torch's own functions.
    """
    from torch.nn.attention import flex_attention as flex
    from torch.nn.modules import transformer

    if flex._validate_device is _validate_eager_device:  # a call inside a call
        yield
        return
    kept = flex._validate_device, flex.warnings, transformer._detect_is_causal_mask
    _torch_checks.append((kept[0], kept[2]))
    flex._validate_device, flex.warnings = _validate_eager_device, _Silent
    transformer._detect_is_causal_mask = _is_causal_if_told
    sources = torch.compiler.config.dynamic_sources
    named = f"{sources},{BLOCK_MASK_LENGTHS}" if sources else BLOCK_MASK_LENGTHS
    try:
        with torch.compiler.config.patch(dynamic_sources=named):
            yield
    finally:
        flex._validate_device, flex.warnings = kept[:2]
        transformer._detect_is_causal_mask = kept[2]
        _torch_checks.pop()


# One object each, so that Dynamo's guards on them hold from call to call.
_torch_checks: list[tuple[Callable[..., None], Callable[..., bool]]] = []


def _validate_eager_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Stands in for torch's check of the device."""
    if not torch.compiler.is_dynamo_compiling():
        _torch_checks[-1][0](q, k, v)


def _is_causal_if_told(
    mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Stands in for torch's look at the mask."""
    if not torch.compiler.is_dynamo_compiling():
        return _torch_checks[-1][1](mask, is_causal, size)
    return is_causal is True


class _Silent:
    """Stands in for the module ``warnings``."""

    @staticmethod
    def warn(*args: Any, **kwargs: Any) -> None:
        """Say nothing."""


def trace_part(fn: Callable[..., Any], *args: Any) -> GraphModule:
    """Trace ``fn`` into a graph of its own, in the middle of a trace."""
    return reenter_make_fx(fn)(*args)


def record_call(target: Callable[..., Any], *args: Any) -> Any:
    """Call ``target`` in the middle of a trace as one node, whatever it is made of."""
    mode = get_proxy_mode()
    with disable_proxy_modes_tracing():
        result = target(*args)
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)
    made = mode.tracer.create_proxy("call_function", target, proxies, {})
    return track_tensor_tree(result, made, constant=None, tracer=mode.tracer)


def new_fake_mode() -> FakeTensorMode:
    """A fake mode with a shape environment of its own (constants in the graph are real)."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake_with_symbolic_dims(
    mode: FakeTensorMode, tensor: torch.Tensor, dynamic_dims: Sequence[int], name: str
) -> torch.Tensor:
    """A fake copy of the meta ``tensor`` in ``mode`` whose ``dynamic_dims`` are symbols.

    Dims of equal hint share a symbol (duck shaping), all others are static.
    """
    from torch._dynamo.source import LocalSource  # imports triton where it is installed

    context = StatelessSymbolicContext(
        dynamic_sizes=[
            DimDynamic.DUCK if d in dynamic_dims else DimDynamic.STATIC
            for d in range(tensor.dim())
        ]
    )
    return mode.from_tensor(
        tensor, symbolic_context=context, source=LocalSource(name), static_shapes=False
    )


@contextlib.contextmanager
def outside_tracing(mode: FakeTensorMode | None) -> Iterator[None]:
    """Leave Dynamo's tracing context for one of our own (or none)."""
    context = TracingContext(mode) if mode is not None else None
    with tracing(context):
        yield


def inductor_compile(
    module: GraphModule, inputs: Sequence[Any], mode: FakeTensorMode
) -> Callable[..., Any]:
    """Compile an inference graph (its backward is already part of it) with Inductor."""
    from torch._inductor.compile_fx import compile_fx

    with (
        outside_tracing(mode),
        torch.no_grad(),
        torch.amp.autocast("cpu", enabled=False),
    ):
        return compile_fx(module, list(inputs))


def get_keep_graph() -> bool:
    """Whether the backward call that is running was given ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def structured_trace(name: str, text: Callable[[], str]) -> None:
    """Hand a stage's text to ``TORCH_TRACE`` / tlparse."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
    )


@contextlib.contextmanager
def run_without_tracing() -> Iterator[None]:
    """Leave the fake mode and tracing context Dynamo calls backends in."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), tracing(None):
        yield


class _CaptureDone(BaseException):
    """Unwinds a call whose graph has been captured; never seen by the user."""


def abort_capture(*inputs: Any) -> Any:
    """What a backend returns so that the captured graph is not run."""
    raise _CaptureDone


def graph_break_of(module: GraphModule) -> tuple[str, str] | None:
    """(file and line, reason) why Dynamo's graph ends before the code does, or None."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = f"{frame.filename}:{frame.lineno}" if frame is not None else "unknown"
    lines = [line.strip() for line in reason.reason.splitlines()]
    # A break that is met inside a call is introduced by a line that ends with a colon.
    what = next((x for x in lines if x and not x.endswith(":")), "unknown")
    if what.startswith("generic_jump"):
        what = "branches on the value of a tensor"
    return place, what


def with_dynamic_results(
    module: GraphModule, run: Callable[..., Any]
) -> Callable[..., Any]:
    """``run``, for a graph that code follows: sizes that were symbols stay so in what is traced
    next, where Dynamo would take those of a tensor it has not seen for numbers."""
    (output,) = module.graph.find_nodes(op="output")
    values = [getattr(x, "meta", {}).get("example_value") for x in output.args[0]]
    dims = [
        [d for d, size in enumerate(x.shape) if isinstance(size, torch.SymInt)]
        if isinstance(x, torch.Tensor)
        else []
        for x in values
    ]

    def call(*inputs: Any) -> Any:
        results = run(*inputs)
        for x, mine in zip(results, dims, strict=True):
            for dim in mine:
                mark_dynamic(x, dim)
        return results

    return call


def run_without_gradients(module: GraphModule) -> Callable[..., Any]:
    """Dynamo's graph, run without saving anything; its results look as if they had gradients, so
    that what follows is traced as in training."""

    def run(*inputs: Any) -> Any:
        with torch.no_grad():
            results = module.forward(*inputs)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            for x in results:
                fresh = isinstance(x, torch.Tensor) and not any(x is y for y in tensors)
                if fresh and x.is_floating_point():
                    x.requires_grad_()
        return results

    return run


def capture_only(
    model: torch.nn.Module,
    backend: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> None:
    """Trace a call up to the first graph that ``backend`` answers with :func:`abort_capture`."""
    compiled = torch.compile(model.forward, backend=backend)
    # contextlib.suppress would be silent about everything else too
    try:
        compiled(*args, **kwargs)
    except _CaptureDone:
        return


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise an error of this library as itself, not wrapped in Dynamo's."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        if type(inner).__module__.startswith("fpdt_compile"):
            raise inner from None
        raise


def plain_tensor_access() -> Any:
    """A context in which a Tensor subclass's ``__torch_function__`` is not called."""
    return torch._C.DisableTorchFunctionSubclass()


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors, here or inside torch, share a tensor's storage (itself included)."""
    storage = tensor.untyped_storage()  # is one more user
    return torch._C._storage_Use_Count(storage._cdata) - 1
