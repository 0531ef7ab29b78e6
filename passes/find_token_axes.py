"""Where the token axes are, and what each node is to the chunked program.

In: the normalized graph and the symbols of its sequences' lengths. Out: :class:`TokenAnalysis`: the
token axes of every tensor node and its :class:`NodeKind`.

Contract: a node is TOKENWISE only if a rule proved that its row t needs its inputs' rows t only.
What no rule proves is a mixer, with the reason. Nodes computed from integer inputs alone ("light")
are never stored: small ones are computed whole once a call (VECTOR), two-axis ones are mask graphs
(MASK), float one-axis ones (rotary tables) are recomputed wherever they are needed (TOKENWISE).

Algorithm, one walk in graph order:
1. axes of placeholders from their shapes;
2. for each call: the operator's rule gives axes, or a reason;
3. sums over all tokens (losses) become totals, attention is told from batched products by where
   the token axis is;
4. totals that flow back into tokenwise work are mixers after all;
5. a sort of rows is taken for routing (``token_rules_rows``) until something it reaches cannot be
   proved; then the walk is repeated with that sort given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import Graph, Node

from ..graph import Axes, NodeKind, TokenAxis, is_tensor, size_expr, value_of
from ..kernels.reference import as_tokens
from . import prove_function, token_rules_math, token_rules_routing  # noqa: F401  (register rules)
from .find_totals import demote_used_totals, is_total
from .token_rules import RULES, NotTokenwise, RuleContext, arg, op_name, pointwise_rule
from .token_rules_rows import FACT_RULES, roots_of

# A product whose contracted dimension is shorter than this is as cheap as a pointwise op (rotary
# frequencies times positions contract over 1), so its result is recomputed, never stored.
HEAVY_CONTRACTION = 16
SCORE_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "attention_scores")
ENDS = {NodeKind.TOTAL, NodeKind.EPILOGUE}
ATTENTION_CALLS = ("scaled_dot_product_attention", "attention_from_scores")


@dataclass(kw_only=True, slots=True)
class TokenAnalysis:
    """``axes`` and ``kinds`` per node; ``reasons`` for every node no rule could prove.

    ``local`` values (rows sorted by expert) mean something inside one chunk only: a region computes
    them again, nothing stores them.
    """

    axes: Axes = field(default_factory=dict)
    kinds: dict[Node, NodeKind] = field(default_factory=dict)
    reasons: dict[Node, str] = field(default_factory=dict)
    light: set[Node] = field(default_factory=set)
    local: set[Node] = field(default_factory=set)

    def kind(self, node: Node) -> NodeKind:
        return self.kinds[node]


def dynamic_sizes(graph: Graph) -> set[sympy.Symbol]:
    """The symbols in the sizes of the graph's inputs."""
    inputs = [n for n in graph.nodes if n.op == "placeholder" and is_tensor(n)]
    sizes = [size_expr(size) for n in inputs for size in value_of(n).shape]
    return set().union(*(size.free_symbols for size in sizes))


def find_token_symbols(graph: Graph) -> tuple[sympy.Symbol, ...]:
    """The symbols that are query or key lengths of attention, else the only dynamic dimension.

    With a dynamic batch size there are several symbols; attention says which ones are sequences.
    """
    symbols = dynamic_sizes(graph)
    inner: set[sympy.Symbol] = set()  # of other dims than the first, which is the batch
    for node in graph.nodes:
        if node.op == "placeholder" and is_tensor(node):
            sizes = value_of(node).shape
            for size in sizes[1:] if len(sizes) > 1 else sizes:
                inner |= size_expr(size).free_symbols
    found: set[sympy.Symbol] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not is_tensor(node):
            continue
        if op_name(node) == "scaled_dot_product_attention":
            found |= {size_expr(value_of(x).shape[-2]) for x in node.args[:2]}
        elif op_name(node) in SCORE_PRODUCTS and value_of(node).dim() >= 3:
            sizes = {size_expr(s) for s in value_of(node).shape[-2:]}
            if sizes <= symbols:
                found |= sizes
    attends = bool(found)
    found &= symbols
    if not attends and len(inner) == 1:
        found = inner
    return tuple(sorted(found, key=str))


def find_token_axes(graph: Graph, symbols: tuple[sympy.Symbol, ...]) -> TokenAnalysis:
    """Analyze every node of ``graph``; see the module docstring."""
    given_up: dict[Node, str] = {}
    while True:
        analysis = TokenAnalysis()
        ctx = RuleContext(symbols, analysis.axes, given_up)
        walk(graph, ctx, analysis)
        escaped = escaping_roots(graph, ctx, analysis)
        if not escaped:
            break
        given_up.update(escaped)
    analysis.local = {n for n in graph.nodes if roots_of(ctx, n)}
    demote_used_totals(analysis, graph)
    return analysis


def escaping_roots(
    graph: Graph, ctx: RuleContext, analysis: TokenAnalysis
) -> dict[Node, str]:
    """Sorts (and counts) whose rows are read by something no rule proved, and why."""
    found: dict[Node, str] = {}
    for user in graph.nodes:
        if analysis.kinds[user] in (NodeKind.TOKENWISE, NodeKind.TOTAL):
            continue
        for node in user.all_input_nodes:
            why = analysis.reasons.get(user, "needs them all")
            what = "the output" if user.op == "output" else op_name(user)
            for root in roots_of(ctx, node):
                found.setdefault(root, f"{what} reads its rows and {why}")
    return found


def walk(graph: Graph, ctx: RuleContext, analysis: TokenAnalysis) -> None:
    for node in graph.nodes:
        if node.op == "placeholder":
            classify_input(ctx, analysis, node)
        elif node.op == "get_attr":
            analysis.kinds[node], analysis.axes[node] = NodeKind.STATE, ()
        elif node.op == "output":
            analysis.kinds[node] = NodeKind.OUTPUT
        elif is_tensor(node) or isinstance(node.meta.get("val"), (tuple, list)):
            classify_call(ctx, analysis, node)
        else:
            analysis.kinds[node] = NodeKind.SYMBOL


def classify_input(ctx: RuleContext, analysis: TokenAnalysis, node: Node) -> None:
    if not is_tensor(node):
        analysis.kinds[node] = NodeKind.SYMBOL
        return
    value = value_of(node)
    try:
        axes = ctx.axes_from_shape(ctx.shape(node))
    except NotTokenwise as error:
        analysis.reasons[node] = str(error)
        axes = ()
    analysis.axes[node] = axes
    small = not value.is_floating_point() and not value.is_complex()
    if len(axes) == 2:
        analysis.kinds[node] = NodeKind.MASK
        analysis.light.add(node)
    elif not axes:
        analysis.kinds[node] = NodeKind.STATE
        if small:
            analysis.light.add(node)
    elif (
        small or value.dim() <= 2
    ):  # [B, S] floats are padding masks or weights of a loss
        analysis.kinds[node] = NodeKind.VECTOR
        if not node.meta.get("requires_grad", False):
            analysis.light.add(node)
        else:
            analysis.kinds[node] = NodeKind.TOKENWISE
    else:
        analysis.kinds[node] = NodeKind.TOKENWISE


def is_heavy(ctx: RuleContext, node: Node) -> bool:
    name = op_name(node)
    if name == "embedding":
        return True
    if name == "linear":
        return ctx.shape(node.args[0])[-1] >= HEAVY_CONTRACTION
    if name in ("matmul", "bmm", "mm", "baddbmm", "addmm"):
        first = node.args[1] if name in ("baddbmm", "addmm") else node.args[0]
        size = ctx.shape(first)[-1]
        return ctx.has_symbol(size) or size >= HEAVY_CONTRACTION
    return False


def run_rule(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    name = op_name(node)
    counts_rows = any(x in ctx.facts for x in node.all_input_nodes)
    rule = (FACT_RULES if counts_rows else RULES).get(name)
    if rule is None and counts_rows:
        raise NotTokenwise("computes with row numbers of a sort")
    if rule is None:
        target = node.target
        tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
        if torch.Tag.pointwise not in tags:
            raise NotTokenwise("the operator is not known to be tokenwise")
        rule = pointwise_rule
    axes = rule(ctx, node)
    check_axes(ctx, node, axes)
    return axes


def check_axes(ctx: RuleContext, node: Node, axes: tuple[TokenAxis, ...]) -> None:
    """The rule's axes must be exactly the dims whose size depends on s."""
    if not is_tensor(node):
        return
    shape = ctx.shape(node)
    sizes = {a.dim: a.outer * a.symbol * a.inner for a in axes}
    for dim, size in enumerate(shape):
        expected = sizes.get(dim)
        if expected is None:
            if ctx.has_symbol(size):
                raise NotTokenwise(f"dimension {dim} has size {size}")
        elif sympy.expand(expected - size) != 0:
            raise NotTokenwise(f"dimension {dim} has size {size}, not {expected}")


def classify_call(ctx: RuleContext, analysis: TokenAnalysis, node: Node) -> None:
    kinds, sources = analysis.kinds, list(node.all_input_nodes)
    source_kinds = {kinds[x] for x in sources}
    light = all(
        x in analysis.light or kinds[x] is NodeKind.SYMBOL
        for x in sources
        if not is_plain_state(analysis, x)
    ) and not is_heavy(ctx, node)
    touched = has_token_size(ctx, node) or any(
        ctx.of(x) or x in ctx.facts for x in sources
    )
    if node.target is as_tokens:
        classify_tokens(ctx, analysis, node)
        return
    if not touched:
        analysis.axes[node] = ()
        if source_kinds & {NodeKind.TOTAL, NodeKind.EPILOGUE, NodeKind.MIXER}:
            kinds[node] = NodeKind.EPILOGUE
        elif is_random(node) or (light and any(x in analysis.light for x in sources)):
            kinds[node] = (
                NodeKind.VECTOR
            )  # a seed is drawn once a call, not once a chunk
            analysis.light.add(node)
        else:
            kinds[node] = NodeKind.STATE
        return
    try:
        axes = run_rule(ctx, node)
        proved = True
    except NotTokenwise as error:
        axes, proved = shape_axes(ctx, node), False
        ctx.facts.pop(node, None)
        analysis.reasons[node] = str(error)
    analysis.axes[node] = axes
    if proved and is_random(node):
        proved = False
        analysis.reasons[node] = (
            "draws random numbers, which a recomputation would not repeat"
        )
    if proved and uses_length_as_value(ctx, node):
        proved = light
        analysis.reasons[node] = "computes with the sequence length"
    if proved and is_local(ctx, node) and not source_kinds & ENDS:
        kinds[node] = NodeKind.TOKENWISE  # each chunk sorts and counts its own rows
    elif light and not any(roots_of(ctx, x) for x in sources):
        analysis.light.add(node)
        kinds[node] = light_kind(node, axes, proved)
        if any(isinstance(value_of(x), (tuple, list)) for x in sources):
            kinds[node] = kinds[sources[0]]  # a part of a list is what the list is
    elif op_name(node) in ATTENTION_CALLS and not proved:
        kinds[node] = NodeKind.ATTENTION
    elif not proved and is_total(ctx, node):
        kinds[node] = NodeKind.TOTAL
    elif not proved or len(axes) != 1 or source_kinds & ENDS:
        kinds[node] = NodeKind.MIXER
        if "not_attention" in node.meta:
            why = f"is not read as attention: {node.meta['not_attention']}"
        elif len(axes) == 2:
            why = "has two token axes"
        else:
            why = "uses a sum over all tokens"
        analysis.reasons.setdefault(node, why)
    else:
        kinds[node] = NodeKind.TOKENWISE


def is_local(ctx: RuleContext, node: Node) -> bool:
    """Sorted rows, or integers that count rows of a chunk."""
    return bool(roots_of(ctx, node)) and (node in ctx.facts or len(ctx.of(node)) == 1)


def classify_tokens(ctx: RuleContext, analysis: TokenAnalysis, node: Node) -> None:
    """Where a tower's tokens begin: what makes them (convolutions) runs whole, before chunks."""
    analysis.axes[node] = ctx.axes_from_shape(ctx.shape(node))
    if node.meta.get("needs_grad", False):
        analysis.kinds[node] = NodeKind.MIXER
        analysis.reasons[node] = "makes the tokens"
    else:
        two = len(analysis.axes[node]) > 1
        analysis.kinds[node] = NodeKind.MASK if two else NodeKind.VECTOR
        analysis.light.add(node)


def is_random(node: Node) -> bool:
    target = node.target
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    name = op_name(node)
    if name in ("dropout", "feature_dropout", "alpha_dropout"):
        return bool(arg(node, 2, "train")) and arg(node, 1, "p") != 0.0
    return torch.Tag.nondeterministic_seeded in tags and name not in ATTENTION_CALLS


def is_plain_state(analysis: TokenAnalysis, node: Node) -> bool:
    """A parameter or buffer (or what is made of them): does not make its user heavy."""
    return analysis.kinds[node] is NodeKind.STATE and not node.meta.get(
        "needs_grad", False
    )


def light_kind(node: Node, axes: tuple[TokenAxis, ...], proved: bool) -> NodeKind:
    if len(axes) == 2:
        return NodeKind.MASK
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        value = value[0]
    if (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and proved
        and axes
    ):
        return NodeKind.TOKENWISE
    return NodeKind.VECTOR


def has_token_size(ctx: RuleContext, node: Node) -> bool:
    values = value_of(node)
    values = values if isinstance(values, (tuple, list)) else [values]
    return any(
        ctx.has_symbol(size_expr(size))
        for value in values
        if isinstance(value, torch.Tensor)
        for size in value.shape
    )


def shape_axes(ctx: RuleContext, node: Node) -> tuple[TokenAxis, ...]:
    """Axes read off the shape, for ops that run whole: their rows are in token order there."""
    if not is_tensor(node):
        return ()
    return tuple(
        TokenAxis(dim=dim, symbol=size)
        for dim, size in enumerate(ctx.shape(node))
        if size in ctx.symbols
    )


# Operators whose SymInt arguments are sizes of the result, so a chunk may put its own length there.
SIZE_ARGUMENTS = frozenset(
    "view reshape _unsafe_view expand broadcast_to unflatten zeros ones full empty new_zeros "
    "new_ones new_full new_empty slice narrow repeat split_with_sizes arange "
    "custom_function".split()
)


# Of those, the ones that also take a value, and where.
FILL_VALUE = {"full": (1, "fill_value"), "new_full": (2, "fill_value")}


def uses_length_as_value(ctx: RuleContext, node: Node) -> bool:
    """Whether a number made from s enters the arithmetic, where the global one is meant."""
    name = op_name(node)
    sources = node.all_input_nodes
    if name in FILL_VALUE:
        value = arg(node, *FILL_VALUE[name])
        sources = [value] if isinstance(value, Node) else []
    elif name in SIZE_ARGUMENTS:
        sources = [
            x for x in sources if not isinstance(x.meta.get("val"), torch.SymInt)
        ]
    return any(is_length(ctx, x.meta.get("val")) for x in sources)


def is_length(ctx: RuleContext, value: object) -> bool:
    """A SymInt, SymFloat or SymBool that depends on s."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and (
        ctx.has_symbol(value.node.expr)
    )
