"""Find feed-forwards for the report: plain ``down(act(up(x)))`` and gated ``down(act(gate(x)) *
up(x))``.

In: the analyzed graph. Out: :class:`FeedForward` records. Pure. Feed-forwards need no rewrite of
their own: they are tokenwise and run inside the blocks' post regions.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ..graph import FeedForward, NodeKind, size_expr, value_of
from .find_token_axes import TokenAnalysis
from .token_rules import op_name

ACTIVATIONS = frozenset(
    "silu gelu relu relu6 leaky_relu elu selu celu mish tanh sigmoid hardswish softplus pow square "
    "erf mul add glu".split()
)
VIEWS = frozenset(
    "reshape to slice split chunk getitem transpose permute dropout".split()
)
MAX_DEPTH = 12


def find_feed_forwards(graph: Graph, tokens: TokenAnalysis) -> list[FeedForward]:
    """Every linear whose input is an activation of one or two wider linears of the same input."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or op_name(node) != "linear":
            continue
        if tokens.kinds[node] is not NodeKind.TOKENWISE:
            continue
        ups, activated = linears_behind(node.args[0], tokens)
        inputs = {up.args[0] for up in ups}
        hidden, size = last_size(node.args[0]), last_size(node)
        if activated and ups and len(inputs) == 1 and hidden > size:
            gated = len(ups) == 2 or last_size(ups[0]) == 2 * hidden
            found.append(
                FeedForward(
                    down=node,
                    ups=tuple(ups),
                    hidden_size=hidden,
                    kind="gated" if gated else "plain",
                )
            )
    return found


def last_size(node: Node) -> int:
    size = size_expr(value_of(node).shape[-1])
    return int(size) if size.is_Integer else 0


def linears_behind(node: Node, tokens: TokenAnalysis) -> tuple[list[Node], bool]:
    """The linears that ``node`` is a pointwise function of, and whether anything is activated."""
    ups: dict[Node, None] = {}
    activated = False
    pending, depth = [node], 0
    while pending:
        depth += 1
        current = pending.pop()
        if depth > MAX_DEPTH * 4 or current.op != "call_function":
            return [], False
        name = op_name(current)
        if name == "linear":
            ups.setdefault(current)
        elif name in ACTIVATIONS or name in VIEWS:
            activated = activated or (
                name in ACTIVATIONS and name not in ("mul", "add")
            )
            pending.extend(
                x
                for x in current.all_input_nodes
                if tokens.kinds[x] is NodeKind.TOKENWISE and x not in tokens.light
            )
        else:
            return [], False
    return list(ups), activated
