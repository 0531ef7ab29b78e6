"""Parts of the captured graph that run whole: mixers, and what is before or after the chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from .trace_bodies import BodyInterpreter


def whole_graph(
    root: GraphModule, outputs: Sequence[Node], inputs: Sequence[Node]
) -> GraphModule:
    """The part of the captured graph between ``inputs`` and ``outputs``, as it is."""
    members: set[Node] = set()
    pending = [n for n in outputs if n not in inputs]
    while pending:
        node = pending.pop()
        if node not in members and node not in inputs:
            members.add(node)
            pending.extend(node.all_input_nodes)
    part, copies = Graph(), {}
    for node in inputs:
        copies[node] = part.placeholder(node.name)
    for node in root.graph.nodes:
        if node in members:
            copies[node] = part.node_copy(node, lambda x: copies[x])
    part.output([copies[n] for n in outputs])
    return GraphModule(root, part)


def by_name(
    root: GraphModule, outputs: Sequence[Node], given: Iterable[Node]
) -> Callable[[dict[str, Any]], list[Any]]:
    """``outputs`` from graph inputs and ``given`` values, called with a dict of names."""
    placeholders = [n for n in root.graph.nodes if n.op == "placeholder"]
    inputs = list(dict.fromkeys([*placeholders, *given]))
    module = whole_graph(root, outputs, inputs)
    used = [n for n in module.graph.nodes if n.op == "placeholder" and n.users]
    names = {n.name for n in used} | {n.name for n in outputs if n in set(inputs)}
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and node.name not in names:
            module.graph.erase_node(node)
    module.recompile()
    order = [n.target for n in module.graph.nodes if n.op == "placeholder"]
    return lambda values: list(
        BodyInterpreter(module).run(*(values[name] for name in order))
    )
