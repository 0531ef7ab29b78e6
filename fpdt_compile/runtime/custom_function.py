"""A user's ``torch.autograd.Function`` in a graph: forward and backward kept together.

A call of :class:`CustomFunction` is one node of the captured graph, so no pass can separate the
forward from its own backward, which need not be the derivative (a straight-through estimator, a
scaled gradient).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .._torch_private import autograd_function_apply


class CustomFunction:
    """Forward and backward as graphs of ATen operators.

    ``forward`` maps the arguments (tensors, sizes) to ``(outputs, saved)``; ``backward`` maps
    ``(*output gradients, *saved)`` to one gradient or None for each argument. The outputs numbered
    in ``non_differentiable`` have no gradient. Calling it returns the tuple of outputs; under
    autograd the outputs' gradients are those of ``backward``.
    """

    __name__ = "custom_function"

    def __init__(
        self,
        forward: GraphModule,
        backward: GraphModule,
        *,
        non_differentiable: Sequence[int],
        saved_for_backward: Sequence[int],
    ) -> None:
        self.forward = forward
        self.backward = backward
        self.non_differentiable = tuple(non_differentiable)
        self.saved_for_backward = tuple(saved_for_backward)
        parts = [
            structure_of(forward),
            structure_of(backward),
            str(self.non_differentiable),
        ]
        self.key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        return autograd_function_apply(
            self.forward,
            self.backward,
            *args,
            non_differentiable_idx=list(self.non_differentiable),
            saved_for_backward_idx=list(self.saved_for_backward),
        )

    def __repr__(self) -> str:
        """Equal for functions that compute the same: regions are compared by it."""
        return f"custom_function[{self.key}]"


def structure_of(module: GraphModule) -> str:
    """The graph as text without names; sizes come in through arguments, so lengths do not show."""
    number: dict[Node, int] = {}
    lines = []
    for node in module.graph.nodes:
        number[node] = len(number)
        args = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda x: _Place(number[x])
        )
        target: Any = node.target
        if node.op == "placeholder":
            target = ""
        elif node.op == "get_attr":
            constant = getattr(module, node.target)
            target = (constant.dtype, constant.tolist())
        lines.append(f"{node.op} {target} {args}")
    return "\n".join(lines)


class _Place(int):
    def __repr__(self) -> str:
        return f"%{int(self)}"
