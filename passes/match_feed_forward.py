"""Find feed-forwards for the report: plain ``down(act(up(x)))``, gated ``down(act(gate(x)) *
up(x))``, and mixtures of experts.

In: the analyzed graph. Out: :class:`FeedForward` records. Pure. Feed-forwards need no rewrite of
their own: they are tokenwise and run inside the blocks' post regions.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node

from ..graph import FeedForward, NodeKind, size_expr, value_of
from .find_token_axes import TokenAnalysis
from .token_rules import op_name
from .token_rules_routing import GROUPED

ACTIVATIONS = frozenset(
    "silu gelu relu relu6 leaky_relu elu selu celu mish tanh sigmoid hardswish softplus pow square "
    "erf mul add glu clamp".split()
)
VIEWS = frozenset(
    "reshape to slice split chunk getitem transpose permute dropout unsqueeze squeeze".split()
)
EXPERT_PRODUCTS = GROUPED | {"bmm", "matmul", "baddbmm"}
MAX_DEPTH = 12


def find_feed_forwards(graph: Graph, tokens: TokenAnalysis) -> list[FeedForward]:
    """Every product whose input is an activation of one or two wider products of the same input."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or tokens.kinds[node] is not NodeKind.TOKENWISE:
            continue
        is_product = is_linear if op_name(node) == "linear" else is_expert_product
        if not is_product(node, tokens):
            continue
        rows = next(x for x in operands(node) if tokens.axes.get(x))
        ups, activated = products_behind(rows, tokens, is_product)
        inputs = {x for up in ups for x in operands(up) if tokens.axes.get(x)}
        hidden, size = last_size(rows), last_size(node)
        if not activated or not ups:
            continue
        if is_product is is_expert_product:
            kind = "experts"
        elif len(inputs) == 1 and hidden > size:
            gated = len(ups) == 2 or last_size(ups[0]) == 2 * hidden
            kind = "gated" if gated else "plain"
        else:
            continue
        found.append(
            FeedForward(down=node, ups=tuple(ups), hidden_size=hidden, kind=kind)
        )
    return found


def is_linear(node: Node, tokens: TokenAnalysis) -> bool:
    return op_name(node) == "linear"


def is_expert_product(node: Node, tokens: TokenAnalysis) -> bool:
    """Rows times matrices of several experts: in groups, all of them, or one looked up per row."""
    if op_name(node) not in EXPERT_PRODUCTS:
        return False
    parts = operands(node)
    weights = [x for x in parts if value_of(x).dim() == 3 and is_matrices(x, tokens)]
    return len(weights) == 1 and any(
        tokens.axes.get(x) for x in parts if x is not weights[0]
    )


def is_matrices(node: Node, tokens: TokenAnalysis) -> bool:
    while node.op == "call_function" and op_name(node) in VIEWS | {"index"}:
        if tokens.kinds[node] is NodeKind.STATE:
            return True
        node = node.args[0]
    return tokens.kinds[node] is NodeKind.STATE


def operands(node: Node) -> list[Node]:
    first = 1 if op_name(node) == "baddbmm" else 0
    return [x for x in node.args[first : first + 2] if isinstance(x, Node)]


def last_size(node: Node) -> int:
    size = size_expr(value_of(node).shape[-1])
    return int(size) if size.is_Integer else 0


def products_behind(
    node: Node, tokens: TokenAnalysis, is_product: Callable[[Node, TokenAnalysis], bool]
) -> tuple[list[Node], bool]:
    """The products that ``node`` is a pointwise function of, and whether anything is activated."""
    ups: dict[Node, None] = {}
    activated = False
    pending, depth = [node], 0
    while pending:
        depth += 1
        current = pending.pop()
        if depth > MAX_DEPTH * 4 or current.op != "call_function":
            return [], False
        name = op_name(current)
        if is_product(current, tokens):
            ups.setdefault(current)
        elif name == "index" and tokens.kinds[current.args[0]] is NodeKind.STATE:
            continue  # a bias looked up per row
        elif name in ACTIVATIONS or name in VIEWS:
            activated = activated or (
                name in ACTIVATIONS and name not in ("mul", "add", "clamp")
            )
            pending.extend(
                x
                for x in current.all_input_nodes
                if tokens.kinds[x] is NodeKind.TOKENWISE and x not in tokens.light
            )
        else:
            return [], False
    return list(ups), activated
