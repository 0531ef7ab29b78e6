"""Compile traced bodies, once per structure, with Inductor or as they are.

In: a region and how its chunks will be used. Out: a :class:`CompiledBody` (see
``runtime.program.Body``), taken from the :class:`BodyCache` when a region of the same structure was
compiled before: the number of bodies does not grow with the number of layers.

Contract: one compile serves every chunk length. Inductor's graph holds guards on the symbolic
length; a length that breaks one (a single row, for instance) runs the traced graph uncompiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._torch_private import inductor_compile
from ..runtime.program import GradSlot, LiveBytes
from .extract_regions import Region
from .live_bytes import live_bytes
from .trace_bodies import (
    TracedBody,
    trace_backward,
    trace_forward,
    trace_forward_backward,
)

aten = torch.ops.aten
log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class CompileStats:
    """Counters of one process' cache: region structures, and graphs compiled for them."""

    bodies: int = 0
    body_compiles: int = 0
    captures: int = 0


def allow_other_strides(module: GraphModule) -> None:
    """An operator's real result may have other strides than its fake one had, and a view that was
    traced then needs a copy when the graph runs as it is (seen with qwen3_next)."""
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    module.recompile()


class Executable:
    """One traced form, with its compiled code and the lengths that code is good for."""

    def __init__(self, traced: TracedBody, codegen: str) -> None:
        self.traced = traced
        self.module = traced.module
        self.symbols = symbol_positions(traced.inputs)
        self.compiled: Callable[..., Any] | None = None
        if codegen == "inductor" and num_kernels(traced.module) >= WORTH_COMPILING:
            self.compiled = inductor_compile(traced.module, traced.inputs, traced.mode)
            self.guards = [guard.expr for guard in traced.mode.shape_env.guards]
            self.ranges = dict(traced.mode.shape_env.var_to_range)
        self.allowed: dict[tuple[int, ...], bool] = {}
        allow_other_strides(self.module)

    def __call__(self, inputs: Sequence[Any]) -> list[Tensor]:
        if self.compiled is not None and self.fits(inputs):
            return list(self.compiled(*inputs))
        return list(self.module(*inputs))

    def live_bytes(self, inputs: Sequence[Any]) -> LiveBytes:
        values = {}
        for i, dim, expr in self.symbols:
            if expr.is_Symbol and i < len(inputs):
                values[expr] = inputs[i] if dim is None else inputs[i].shape[dim]
        return live_bytes(self.module, values)

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether the compiled code's assumptions on sizes hold for these inputs."""
        sizes = tuple(
            inputs[i] if dim is None else inputs[i].shape[dim]
            for i, dim, _ in self.symbols
        )
        known = self.allowed.get(sizes)
        if known is None:
            known = self.allowed[sizes] = self.check(sizes)
            if not known:
                log.info(
                    "sizes %s run uncompiled: outside the compiled graph's guards",
                    sizes,
                )
        return known

    def check(self, sizes: tuple[int, ...]) -> bool:
        values = {}
        for (_, _, expr), size in zip(self.symbols, sizes):
            if expr.is_Symbol:
                if values.setdefault(expr, size) != size:
                    return False
                bounds = self.ranges.get(expr)
                if bounds is not None and not (bounds.lower <= size <= bounds.upper):
                    return False
        for (_, _, expr), size in zip(self.symbols, sizes):
            if expr.subs(values) != size:
                return False
        return all(bool(guard.subs(values)) for guard in self.guards)


# A graph of one kernel (a lookup, a product) has nothing to fuse.
WORTH_COMPILING = 2


def num_kernels(module: torch.fx.GraphModule) -> int:
    """Operators that compute: not views, sizes or the like."""
    return sum(
        isinstance(node.target, torch._ops.OpOverload)
        and not any(r.alias_info is not None for r in node.target._schema.returns)
        and isinstance(node.meta.get("val"), torch.Tensor)
        for node in module.graph.nodes
    )


def symbol_positions(inputs: Sequence[Any]) -> list[tuple[int, int | None, Any]]:
    """Where a size symbol is read from: (input, dim or None, its expression)."""
    found = []
    for i, x in enumerate(inputs):
        if isinstance(x, torch.SymInt):
            found.append((i, None, x.node.expr))
        elif isinstance(x, torch.Tensor):
            for dim, size in enumerate(x.shape):
                if isinstance(size, torch.SymInt):
                    found.append((i, dim, size.node.expr))
    return found


class CompiledBody:
    """A region structure's code; forms are traced and compiled when they are asked for."""

    def __init__(
        self, region: Region, length: int, codegen: str, stats: CompileStats
    ) -> None:
        self.key = region.key
        self.region = region
        self.length = length
        self.codegen = codegen
        self.stats = stats
        self.forms: dict[str, Executable] = {}

    def prepare(self, form: str) -> Executable:
        """Trace and compile ``form`` now (at compile time, not in the middle of a step)."""
        if form not in self.forms:
            trace = {
                "forward": trace_forward,
                "backward": trace_backward,
                "forward_backward": trace_forward_backward,
            }[form]
            self.forms[form] = Executable(trace(self.region, self.length), self.codegen)
            self.stats.body_compiles += 1
        return self.forms[form]

    def slots(self, form: str) -> tuple[GradSlot, ...]:
        return self.forms[form].traced.grad_slots

    def forward(self, inputs: Sequence[Any]) -> list[Tensor]:
        return self.prepare("forward")(inputs)

    def backward(self, inputs: Sequence[Any], grads: Sequence[Tensor]) -> list[Tensor]:
        return self.prepare("backward")([*inputs, *grads])

    def live_bytes(self, form: str, inputs: Sequence[Any]) -> LiveBytes:
        return self.prepare(form).live_bytes(inputs)

    def forward_backward(self, inputs: Sequence[Any]) -> list[Tensor]:
        return self.prepare("forward_backward")(inputs)


class BodyCache:
    """Bodies by structure; belongs to one optimized model (or backend call), never the process."""

    def __init__(self, codegen: str) -> None:
        self.codegen = codegen
        self.bodies: dict[tuple[str, int], CompiledBody] = {}
        self.stats = CompileStats()

    def get(self, region: Region, length: int) -> CompiledBody:
        key = (region.key, length)
        if key not in self.bodies:
            self.bodies[key] = CompiledBody(region, length, self.codegen, self.stats)
            self.stats.bodies += 1
        return self.bodies[key]
