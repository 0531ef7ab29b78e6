"""The ``fpdt`` backend: Dynamo's graph in, a callable that runs the chunked program out.

    torch.compile(model, backend="fpdt", dynamic=True, options={"chunk_len": 4096})

A graph that cannot be chunked runs as Dynamo captured it; why is in the warning and in ``explain``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ._torch_private import is_flex_op, run_without_tracing, with_dynamic_results
from .capture import capture
from .config import FpdtConfig
from .errors import CantChunk, Rejection
from .groups import make_ranks
from .passes.compile_bodies import BodyCache, CompileStats
from .passes.lower import Lowering
from .passes.manager import Analysis, analyze
from .passes.trace_bodies import BodyInterpreter
from .passes.verify import verify_regions
from .runtime.autograd import StepRunner
from .runtime.outputs import unmaterialized
from .runtime.program import OutputSpec
from .runtime.ranks import Ranks
from .runtime.step import Step
from .runtime.stores import StoreCounters

log = logging.getLogger(__name__)


class FpdtBackend:
    """A Dynamo backend with its configuration and its cache of compiled bodies."""

    def __init__(self, config: FpdtConfig, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = Ranks() if ranks is None else ranks
        self.cache = BodyCache(config.codegen)
        self.analyses: list[Analysis] = []
        self.store_counters: StoreCounters | None = None  # of the last step
        self.only_forecast = False

    @property
    def stats(self) -> CompileStats:
        return self.cache.stats

    def __call__(
        self, module: GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        with run_without_tracing():
            return self.compile(module)

    def compile(self, module: GraphModule) -> Callable[..., Any]:
        self.cache.stats.captures += 1
        result = self.analyze(module)
        run = self.runner(module, result)
        if result.captured.graph_break is None:
            return run
        return with_dynamic_results(module, run)

    def runner(self, module: GraphModule, result: Analysis) -> Callable[..., Any]:
        self.analyses.append(result)
        warn(result.rejections, chunked=result.cut is not None)
        if result.cut is None or not result.attentions:
            self.check_shared(result)
        if result.cut is None or not (result.cut.blocks or result.cut.head):
            return run_whole(module, result)
        return self.lower(result)

    def check_shared(self, result: Analysis) -> None:
        """Ranks must not train the whole sequence each, unless another graph's part is shared."""
        if self.ranks.size == 1:
            return
        if self.config.inputs == "sharded":
            shared = False  # what runs whole here would see this rank's tokens only
        else:
            shared = result.captured.graph_break is not None or any(
                x.cut is not None and x.attentions for x in self.analyses
            )
        if not shared:
            raise CantChunk(
                Rejection(
                    op="graph",
                    source="model",
                    reason=f"seq_parallel={self.ranks.size}, but nothing in it can be shared by "
                    f"ranks: {'; '.join(map(str, result.rejections)) or 'no attention'}",
                    change="change what is named here, or use seq_parallel=1",
                )
            )

    def analyze(self, module: GraphModule) -> Analysis:
        captured = capture(module)
        return analyze(captured, self.config)

    def lower(self, result: Analysis) -> Callable[..., Any]:
        plan, cut, tokens = result.plan, result.cut, result.tokens
        assert plan is not None and cut is not None and tokens is not None
        lowering = Lowering(
            result.captured,
            tokens,
            cut,
            result.dropped,
            self.cache,
            plan=plan,
            ranks=self.ranks,
            sharded=self.config.inputs == "sharded",
        )
        program = lowering.lower()
        if self.config.verify:
            verify_regions(lowering.regions)
        log.info(
            "%d blocks, %d region bodies, plan %s",
            len(program.blocks),
            self.stats.bodies,
            plan,
        )

        def make_step(inputs: Sequence[Any]) -> Step:
            step = Step(
                program,
                inputs,
                plan,
                offload_dir=self.config.offload_dir,
                ranks=self.ranks,
                sharded=self.config.inputs == "sharded",
            )
            self.store_counters = step.store.counters
            return step

        return StepRunner(
            program, make_step, dropped_output, lambda: self.only_forecast
        )


def run_whole(module: GraphModule, result: Analysis) -> Callable[..., Any]:
    """Dynamo's graph as it is, but for flex_attention with gradients on a CPU: torch has no
    backward for it there, so what was captured runs (and what was not is an error)."""
    needs_grad = result.captured.grad_enabled and any(result.captured.requires_grad)
    if not needs_grad or not has_flex_on_cpu(module):
        return module.forward
    captured = capture(module)  # the analysis may have changed the one it was given
    if captured.refused is not None:
        raise CantChunk(captured.refused)
    return lambda *inputs: BodyInterpreter(captured.module).run(*inputs)


def has_flex_on_cpu(module: GraphModule) -> bool:
    return any(
        node.op == "call_function"
        and is_flex_op(node.target)
        and node.args[0].meta["example_value"].device.type == "cpu"
        for node in module.graph.nodes
    )


def optimized_backend(model: nn.Module) -> FpdtBackend | None:
    """The backend ``optimize`` put on a module, else None."""
    return getattr(getattr(model, "_compiled_call_impl", None), "fpdt_backend", None)


def dropped_output(spec: OutputSpec, step: Step) -> Tensor:
    device = next(x.device for x in step.inputs.values() if isinstance(x, Tensor))
    sizes = step.outside_symbols
    shape = [int(torch.sym_int(size.subs(sizes))) for size in spec.shape]
    return unmaterialized(
        shape, spec.dtype, device, step.program.needs_grad.get(spec.name, False)
    )


def warn(rejections: Sequence[Rejection], *, chunked: bool) -> None:
    """One warning for everything that runs whole."""
    if rejections:
        what = "a part of the model" if chunked else "the whole model, not in chunks,"
        listed = "\n  ".join(str(r) for r in rejections)
        warnings.warn(f"fpdt_compile: {what} runs whole:\n  {listed}", stacklevel=2)


def fpdt(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Entry point of ``torch.compile(backend="fpdt")``; see FpdtConfig for ``options``."""
    config = FpdtConfig.from_options(options)
    return FpdtBackend(config, make_ranks(config.seq_parallel))(module, inputs)


__all__ = ["CantChunk", "FpdtBackend", "fpdt"]
