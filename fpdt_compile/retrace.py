"""Running Dynamo's graph under a tracer, with its higher-order ops unfolded.

In: Dynamo's graph and fake inputs, under ``make_fx``. Out: the values, while the tracer writes the
captured graph.

1. Activation-checkpoint regions are inlined: what is recomputed is the planner's choice.
2. A ``torch.autograd.Function`` becomes one node that calls a :class:`CustomFunction`, with its
   forward and backward traced into graphs of their own. Inside another Function only the forward of
   a Function matters: gradients do not pass through it.
3. ``flex_attention`` becomes attention with explicit scores, see ``flex_attention``.
4. Each node runs under the autocast state of its notes, so that values have the dtypes they have in
   the model; the casts themselves do not show, nor do the calls that enter and leave a state.

Limits: a Function that writes into its inputs (``mark_dirty``), and code under ``torch.vmap``, are
refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from ._torch_private import (
    is_checkpoint_op,
    is_flex_op,
    is_function_op,
    record_call,
    trace_part,
    untraced,
)
from .autocast import autocast_as
from .errors import CantChunk, Rejection
from .flex_attention import dead_code, run_flex_attention
from .graph import source_of
from .passes.functionalize import is_mutation, write_out_of_place
from .runtime.custom_function import CustomFunction

CUSTOM_KEY = "fpdt_compile"  # of what capture notes about a node
AUTOCAST_CALLS = ("_enter_autocast", "_exit_autocast")


class Retracer(Interpreter):
    """Runs one graph; ``differentiable`` is False inside a Function's own forward or backward."""

    def __init__(self, module: GraphModule, *, differentiable: bool = True) -> None:
        super().__init__(module)
        self.differentiable = differentiable
        self.node: Node | None = None
        self.dead = dead_code(module)

    def run_node(self, node: Node) -> Any:
        """One node's value, see the module docstring; a module's float attribute (an epsilon) that
        dynamic=True made symbolic is a number."""
        if node in self.dead:
            return None
        self.node = node
        value = node.meta.get("example_value")
        if node.op == "call_method" and node.target == "item":
            if isinstance(value, torch.SymFloat):
                return float(value)
        if getattr(node.target, "__name__", "") in AUTOCAST_CALLS:
            return None  # each node has the state in its notes
        notes = node.meta.get("custom", {}).get(CUSTOM_KEY, {})
        with autocast_as(notes.get("autocast")):
            return super().run_node(node)

    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if is_checkpoint_op(target):
            region, operands = args[0], args[1:]
            return self.inside(region).run(*operands)
        if is_function_op(target):
            return self.call_custom(args, kwargs)
        if getattr(target, "__name__", "") == "_vmap_increment_nesting":
            raise self.refuse("is vmapped", "write the batch dimension out")
        if is_flex_op(target):
            return run_flex_attention(self.node, args)
        return super().call_function(target, args, kwargs)

    def inside(self, region: GraphModule) -> Retracer:
        return Retracer(region, differentiable=self.differentiable)

    def call_custom(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward, backward, *operands = args
        if kwargs.get("dirty_idx"):
            raise self.refuse(
                "a torch.autograd.Function writes into its input (mark_dirty)",
                "return a new tensor from its forward",
            )
        if not self.differentiable:
            outputs, _ = self.inside(forward).run(*operands)
            return outputs
        return record_call(
            custom_function(forward, backward, operands, kwargs), *operands
        )

    def refuse(self, reason: str, change: str) -> CantChunk:
        assert self.node is not None
        name = str(self.node.target)
        return CantChunk(
            Rejection(
                op=name, source=source_of(self.node), reason=reason, change=change
            )
        )


def custom_function(
    forward: GraphModule,
    backward: GraphModule,
    operands: list[Any],
    options: dict[str, Any],
) -> CustomFunction:
    """Both graphs of a Function as ATen operators."""

    def run(part: GraphModule) -> Any:
        return lambda *values: Retracer(part, differentiable=False).run(*values)

    traced_forward = trace_part(run(forward), *operands)
    with untraced():
        outputs, saved = Interpreter(traced_forward).run(*operands)
        grads = [torch.empty_like(x) for x in outputs]
    traced_backward = trace_part(run(backward), *grads, *saved)
    for part in (traced_forward, traced_backward):
        clean(part)
    return CustomFunction(
        traced_forward,
        traced_backward,
        non_differentiable=options["non_differentiable_idx"],
        saved_for_backward=options["saved_for_backward_idx"],
    )


def clean(module: GraphModule) -> None:
    """Drop grad modes (autograd runs a Function's own code without gradients anyway), and write
    what is changed in place out of place where that is the same."""
    for node in list(module.graph.nodes):
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            module.graph.erase_node(node)
        elif node.op == "call_function" and is_mutation(node):
            # What stays in place makes the function run whole.
            with contextlib.suppress(CantChunk):
                write_out_of_place(node)
    module.graph.eliminate_dead_code()
    module.recompile()
