"""Group what cannot be chunked into mixers that run whole, one group at a time.

In: the analysis, with nodes of kind MIXER. Out: :class:`Mixer` groups whose inputs and outputs have
one token axis each, so that they can be gathered before and cut after.

A group is a set of mixer nodes connected through values that are not per token (two token axes, or
none), made convex: a node on a path between two members belongs to the group too, else the group
would need its own output.

Limits: a group in the middle whose result is not per token raises CantChunk (the graph then runs
as it is).
"""

from __future__ import annotations

import networkx as nx
from torch.fx import Graph, Node

from ..errors import Rejection
from ..graph import Mixer, NodeKind, is_tensor
from ..kernels.reference import as_tokens
from .base import refuse, source_of, target_name
from .find_token_axes import TokenAnalysis

CHANGE = "write it with operators that work token by token, or leave it: it runs whole"
WIDE = (
    NodeKind.TOKENWISE,
    NodeKind.ATTENTION,
    NodeKind.MIXER,
    NodeKind.TOTAL,
    NodeKind.EPILOGUE,
)


def find_mixers(
    graph: Graph, analysis: TokenAnalysis
) -> tuple[list[Mixer], list[Mixer]]:
    """(mixers, tails). A tail only feeds the end (a loss we have no sum for): it runs whole after
    the program, on inputs that leave the chunks whole; its nodes become part of the epilogue."""
    kinds = analysis.kinds
    flow = nx.DiGraph()
    for node in graph.nodes:
        if kinds[node] in WIDE:
            flow.add_node(node)
            for x in node.all_input_nodes:
                if kinds[x] in WIDE:
                    flow.add_edge(x, node)
    seeds = [n for n in graph.nodes if kinds[n] is NodeKind.MIXER]
    together = nx.Graph()
    together.add_nodes_from(seeds)
    for node in seeds:
        if not is_tensor(node) or len(analysis.axes.get(node, ())) != 1:
            together.add_edges_from(
                (node, user) for user in node.users if kinds.get(user) in WIDE
            )
    groups = [convex(flow, set(group)) for group in nx.connected_components(together)]
    groups = merge_overlaps(flow, groups)
    order = {n: i for i, n in enumerate(graph.nodes)}
    groups.sort(key=lambda group: min(order[n] for n in group))
    mixers, tails = [], []
    for group in groups:
        if feeds_only_end(group, analysis):
            tails.append(make_mixer(group, order, analysis))
            analysis.kinds.update(dict.fromkeys(group, NodeKind.EPILOGUE))
        else:
            mixers.append(make_mixer(group, order, analysis))
            check_outputs(mixers[-1], analysis)
    return mixers, tails


def feeds_only_end(group: set[Node], analysis: TokenAnalysis) -> bool:
    """Whether what follows the group is scalars and outputs only."""
    pending, seen = list(group), set(group)
    while pending:
        for user in pending.pop().users:
            if user in seen or user.op == "output":
                continue
            if analysis.kinds[user] is not NodeKind.EPILOGUE:
                return False
            seen.add(user)
            pending.append(user)
    return not any(
        len(analysis.axes.get(n, ())) > 0
        for n in group
        if any(user.op == "output" for user in n.users)
    )


def convex(flow: nx.DiGraph, group: set[Node]) -> set[Node]:
    """Add every node on a path from one member to another."""
    after = set().union(*(nx.descendants(flow, n) for n in group))
    before = set().union(*(nx.ancestors(flow, n) for n in group))
    return group | (after & before)


def merge_overlaps(flow: nx.DiGraph, groups: list[set[Node]]) -> list[set[Node]]:
    merged: list[set[Node]] = []
    for group in groups:
        while hit := next((g for g in merged if g & group), None):
            merged.remove(hit)
            group = convex(flow, group | hit)
        merged.append(group)
    return merged


def make_mixer(
    group: set[Node], order: dict[Node, int], analysis: TokenAnalysis
) -> Mixer:
    members = sorted(group, key=order.__getitem__)
    reasons = [n for n in members if n in analysis.reasons]
    first = next((n for n in reasons if n.target is not as_tokens), None)
    for node in members:
        analysis.kinds[node] = NodeKind.MIXER
    outputs = [n for n in members if any(user not in group for user in n.users)]
    inputs: dict[Node, None] = {}
    for node in members:
        for x in node.all_input_nodes:
            for source in origins(x) if made_again(x, analysis) else [x]:
                if source not in group:
                    inputs.setdefault(source)
    return Mixer(
        name=(first or members[0]).name,
        nodes=tuple(members),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        rejection=None
        if first is None
        else Rejection(
            op=target_name(first),
            source=source_of(first),
            reason=analysis.reasons[first],
            change=CHANGE,
        ),
    )


def made_again(node: Node, analysis: TokenAnalysis) -> bool:
    """Whether a mixer computes an input itself: a size, or what is made of parameters, so that
    they get their gradient."""
    kind = analysis.kinds[node]
    derived = kind is NodeKind.STATE and node.op == "call_function"
    return kind is NodeKind.SYMBOL or (derived and node.meta.get("needs_grad", False))


def origins(node: Node) -> list[Node]:
    """The graph inputs and constants a value is computed from."""
    found: dict[Node, None] = {}
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op in ("placeholder", "get_attr"):
            found.setdefault(node)
        pending.extend(node.all_input_nodes)
    return list(found)


def check_outputs(mixer: Mixer, analysis: TokenAnalysis) -> None:
    """What leaves a mixer for the blocks must be one row a token, to be cut into chunks."""
    for node in mixer.outputs:
        axes = analysis.axes.get(node, ())
        if not is_tensor(node) or len(axes) != 1:
            why = mixer.rejection.reason if mixer.rejection else "makes tokens"
            raise refuse(
                mixer.nodes[0], f"{why}, and its result is not one row a token", CHANGE
            )
