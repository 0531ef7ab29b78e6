"""Prove that a user's ``torch.autograd.Function`` may run in chunks.

In: a call of a :class:`CustomFunction`. Out: the token axes of its outputs, or the reason why not;
it is then part of the graph that runs whole, with its own backward.

What is proved, operator by operator with the token rules:

1. forward: row t of every output needs row t of the arguments only, and so does every saved tensor;
2. backward: row t of an argument's gradient needs row t of the output gradients and saved tensors;
   the gradient of an argument without tokens (a weight) is a sum over tokens, which chunks add up;
3. the backward is linear in the output gradients. Two regions may both compute the function and
   their gradients are added, and the LM head is differentiated before its incoming gradient is
   known: both need it.

Terms. A value of the backward is *fixed* (made of saved values only), *linear* in the gradients, or
*zero*. A linear value without tokens that sums over them is a *total*.

Limits: all outputs have the same token axis.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import TokenAxis, is_tensor, size_expr, value_of
from ..runtime.custom_function import CustomFunction
from .token_rules import NotTokenwise, RuleContext, arg, op_name, rule

MOVES = frozenset(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as transpose swapaxes "
    "swapdims t mT permute movedim expand expand_as broadcast_to to _to_copy type_as contiguous "
    "clone alias lift_fresh lift_fresh_copy detach sum neg negative".split()
)
PICKS = frozenset(
    "slice narrow select unbind chunk split split_with_sizes getitem repeat flip mean "
    "cumsum index_select".split()
)
# aten's own backward formulas: linear in their first argument.
FORMULAS = frozenset(
    "gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward "
    "leaky_relu_backward elu_backward hardtanh_backward softplus_backward".split()
)
PRODUCTS = frozenset("mul multiply matmul mm bmm linear einsum".split())
ZEROS = frozenset("zeros zeros_like new_zeros".split())


class Part(enum.Enum):
    """What a value of the backward is; see the module docstring."""

    FIXED = "fixed"
    LINEAR = "linear"
    ZERO = "zero"


@rule("custom_function")
def custom_function(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    function = node.target
    assert isinstance(function, CustomFunction)
    forward = _Walk(ctx, function.forward.graph)
    forward.run([ctx.of(x) for x in node.args])
    outputs, saved = forward.results()
    axes = forward.axes.get(outputs[0], ())
    if any(forward.axes.get(x, ()) != axes for x in outputs) or len(axes) != 1:
        raise NotTokenwise("its outputs have different token axes")
    backward = _Backward(ctx, function.backward.graph, len(outputs))
    backward.check(
        list(node.args),
        [axes] * len(outputs) + [forward.axes.get(x, ()) for x in saved],
    )
    return axes


class _Walk:
    """Token axes of every node of one graph of a Function; raises NotTokenwise."""

    def __init__(self, ctx: RuleContext, graph: Graph) -> None:
        self.graph = graph
        self.axes: dict[Node, tuple[TokenAxis, ...]] = {}
        self.ctx = RuleContext(ctx.symbols, self.axes)

    def run(self, given: Sequence[tuple[TokenAxis, ...]]) -> None:
        inputs = iter(given)
        needed = self.needed()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.axes[node] = next(inputs)
            elif node.op == "call_function" and node in needed and has_value(node):
                self.visit(node)

    def results(self) -> Any:
        (output,) = (n for n in self.graph.nodes if n.op == "output")
        return output.args[0]

    def needed(self) -> set[Node]:
        return set(self.graph.nodes)

    def visit(self, node: Node) -> None:
        self.axes[node] = self.tokenwise(node)

    def tokenwise(self, node: Node) -> tuple[TokenAxis, ...]:
        # Not at the top: find_token_axes registers this module's rule.
        from .find_token_axes import (
            has_token_size,
            is_random,
            run_rule,
            uses_length_as_value,
        )

        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise NotTokenwise(f"{op_name(node)} inside it writes into a tensor")
        if is_random(node):
            raise NotTokenwise(f"{op_name(node)} inside it draws random numbers")
        if uses_length_as_value(self.ctx, node):
            raise NotTokenwise("it computes with the sequence length")
        touched = any(self.ctx.of(x) for x in node.all_input_nodes)
        if not touched and not has_token_size(self.ctx, node):
            return ()
        axes = run_rule(self.ctx, node)
        if len(axes) > 1:
            raise NotTokenwise(f"{op_name(node)} inside it has two token axes")
        return axes


def has_value(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


class _Backward(_Walk):
    """The backward graph: which values are linear in the gradients, and which are totals."""

    def __init__(self, ctx: RuleContext, graph: Graph, num_grads: int) -> None:
        super().__init__(ctx, graph)
        self.num_grads = num_grads
        self.parts: dict[Node, Part] = {}
        self.totals: set[Node] = set()
        self.wanted: list[tuple[Node, Node]] = []

    def check(
        self, operands: list[Any], given: Sequence[tuple[TokenAxis, ...]]
    ) -> None:
        """Every gradient that an operand needs is right when chunks' gradients are put together."""
        self.wanted = [
            (operand, grad)
            for operand, grad in zip(operands, self.results(), strict=True)
            if isinstance(grad, Node)
            and isinstance(operand, Node)
            and operand.meta.get("needs_grad", False)
        ]
        for index, node in enumerate(
            n for n in self.graph.nodes if n.op == "placeholder"
        ):
            self.parts[node] = Part.LINEAR if index < self.num_grads else Part.FIXED
        self.run(given)
        for operand, grad in self.wanted:
            self.check_grad(operand, grad)

    def needed(self) -> set[Node]:
        found, pending = set(), [grad for _, grad in self.wanted]
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending.extend(node.all_input_nodes)
        return found

    def check_grad(self, operand: Node, grad: Node) -> None:
        part = self.part(grad)
        shapes = [[size_expr(s) for s in value_of(x).shape] for x in (operand, grad)]
        if part is Part.ZERO and shapes[0] == shapes[1]:
            return
        if part is not Part.LINEAR or shapes[0] != shapes[1]:
            raise NotTokenwise(
                f"its gradient of {operand.name} is not linear in the gradients it is given"
            )
        if has_tokens(operand, self.ctx):
            if not self.axes.get(grad) or grad in self.totals:
                raise NotTokenwise(f"its gradient of {operand.name} mixes tokens")
        elif grad not in self.totals:
            raise NotTokenwise(
                f"its gradient of {operand.name} is not a sum over tokens"
            )

    def part(self, x: Any) -> Part:
        if isinstance(x, Node):
            if x.op == "get_attr":
                constant = getattr(x.graph.owning_module, x.target)
                return Part.FIXED if constant.any() else Part.ZERO
            return self.parts.get(x, Part.FIXED)
        return Part.ZERO if x == 0 else Part.FIXED

    def visit(self, node: Node) -> None:
        sources = [x for x in node.all_input_nodes if has_value(x)]
        self.parts[node] = self.part_of(node, sources)
        if any(x in self.totals for x in sources):
            self.axes[node] = self.after_total(node, sources)
            self.totals.add(node)
            return
        try:
            self.axes[node] = self.tokenwise(node)
        except NotTokenwise:
            if self.parts[node] is not Part.LINEAR or not self.is_sum(node):
                raise
            self.axes[node] = ()
            self.totals.add(node)

    def part_of(self, node: Node, sources: list[Node]) -> Part:
        name = op_name(node)
        linear = [x for x in sources if self.part(x) is Part.LINEAR]
        if name in ZEROS or (name == "full" and node.args[1] == 0):
            return Part.ZERO
        if not linear:
            # A zero takes part in arithmetic as any other fixed value.
            same = len(sources) == 1 and name in MOVES and self.part(sources[0])
            return Part.ZERO if same is Part.ZERO else Part.FIXED
        if self.is_linear(node, name, linear):
            return Part.LINEAR
        raise NotTokenwise(f"its backward is not linear in the gradient ({name})")

    def is_linear(self, node: Node, name: str, linear: list[Node]) -> bool:
        args = list(node.args)
        if name in MOVES or name in PICKS or name in FORMULAS:
            return linear == [args[0]] and all(
                self.part(x) is Part.FIXED
                for x in node.all_input_nodes
                if x not in linear
            )
        if name in PRODUCTS:
            operands = list(args[1]) if name == "einsum" else args[:2]
            if name == "linear" and arg(node, 2, "bias") is not None:
                return False
            return sum(self.part(x) is Part.LINEAR for x in operands) == 1
        if name in ("div", "true_divide", "divide"):
            return linear == [args[0]] and not arg(node, 2, "rounding_mode")
        if name in ("add", "sub", "rsub", "subtract"):
            return all(self.part(x) is not Part.FIXED for x in args[:2])
        if name in ("cat", "stack", "concat"):
            return all(self.part(x) is not Part.FIXED for x in args[0])
        if name == "where":
            return self.part(args[0]) is Part.FIXED and all(
                self.part(x) is not Part.FIXED for x in args[1:3]
            )
        if name in ("masked_fill", "index_put"):
            return linear == [args[0]] and self.part(args[2]) is Part.ZERO
        return False

    def after_total(self, node: Node, sources: list[Node]) -> tuple[TokenAxis, ...]:
        """Linear arithmetic on totals, with nothing that has tokens."""
        name = op_name(node)
        if any(self.axes.get(x) for x in sources):
            raise NotTokenwise("its backward uses a sum over all tokens per token")
        if name in ("add", "sub", "cat", "stack", "concat", "where"):
            if any(
                self.part(x) is Part.LINEAR and x not in self.totals for x in sources
            ):
                raise NotTokenwise(
                    "its backward adds a sum over tokens to something else"
                )
        from .find_token_axes import has_token_size

        if has_token_size(self.ctx, node):
            raise NotTokenwise("its backward uses a sum over all tokens per token")
        return ()

    def is_sum(self, node: Node) -> bool:
        """A sum over exactly the tokens, or a product that contracts them."""
        name, args = op_name(node), node.args
        if not is_tensor(node) or has_tokens(node, self.ctx):
            return False
        if name == "sum":
            return len(self.axes.get(args[0], ())) == 1
        if name in ("mm", "matmul", "bmm"):
            return self.contracts(args[0], -1, args[1], -2)
        if name == "einsum":
            return self.einsum_contracts(args[0], list(args[1]))
        return False

    def contracts(self, a: Node, dim_a: int, b: Node, dim_b: int) -> bool:
        if min(value_of(a).dim(), value_of(b).dim()) < 2:
            return False
        found = []
        for x, dim in ((a, dim_a), (b, dim_b)):
            axes = self.axes.get(x, ())
            if len(axes) != 1 or axes[0].dim != dim % value_of(x).dim():
                return False
            found.append((axes[0].outer, axes[0].inner))
        return found[0] == found[1]

    def einsum_contracts(self, equation: str, operands: list[Node]) -> bool:
        equation = equation.replace(" ", "")
        if "->" not in equation or "." in equation:
            return False
        left, right = equation.split("->")
        found = {
            (term[axis.dim], axis.outer, axis.inner)
            for term, x in zip(left.split(","), operands, strict=True)
            for axis in self.axes.get(x, ())
        }
        return len(found) == 1 and next(iter(found))[0] not in right


def has_tokens(node: Node, ctx: RuleContext) -> bool:
    return is_tensor(node) and any(
        ctx.has_symbol(size_expr(s)) for s in value_of(node).shape
    )
