"""How many bytes a traced graph holds at once when it runs as it is, from its sizes alone.

In: the graph of a region body (fake results on its nodes) and the value of every size symbol. Out:
the largest sum of storages of its own that are alive together: inputs are the caller's, views share
the storage they look at, and what is not read again is freed. Inductor fuses and reuses buffers,
so for compiled bodies the number is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..runtime.program import LiveBytes

Storage = int  # the identity of a fake storage


def number(size: Any, sizes: Mapping[sympy.Symbol, int]) -> int:
    return int(size.node.expr.subs(sizes)) if isinstance(size, torch.SymInt) else size


def storages(node: Node) -> Iterator[tuple[Storage, Any]]:
    """The storages of a node's results, and their (symbolic) sizes in bytes."""
    value = node.meta.get("val")
    for x in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            yield storage._cdata, storage.nbytes()


def live_bytes(module: GraphModule, sizes: Mapping[sympy.Symbol, int]) -> LiveBytes:
    """See the module's docstring."""
    nodes = list(module.graph.nodes)
    last_use: dict[Storage, int] = {}
    for index, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            for storage, _ in storages(used):
                last_use[storage] = index
    given = {s for n in nodes if n.op == "placeholder" for s, _ in storages(n)}
    ends: dict[int, list[Storage]] = {}
    for storage, index in last_use.items():
        ends.setdefault(index, []).append(storage)
    held: dict[Storage, int] = {}
    now = peak = 0
    for index, node in enumerate(nodes):
        if node.op == "output":
            break
        for storage, size in storages(node):
            if storage not in given and storage not in held:
                held[storage] = number(size, sizes)
                now += held[storage]
        peak = max(peak, now)
        for storage in ends.get(index, ()):
            now -= held.get(storage, 0)
    return LiveBytes(peak=peak, results=now, copies=copied(nodes[-1], sizes))


def copied(output: Node, sizes: Mapping[sympy.Symbol, int]) -> int:
    """Bytes of the results that are views of larger storages: the store copies those."""
    total = 0
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        num_bytes = number(value.numel(), sizes) * value.dtype.itemsize
        if num_bytes < number(value.untyped_storage().nbytes(), sizes):
            total += num_bytes
    return total
