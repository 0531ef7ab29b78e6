"""Stage texts and counts for people who debug the compiler.

``TORCH_LOGS="+fpdt_compile.passes"`` shows each pass; ``TORCH_TRACE`` (tlparse) gets the graph
after each one.
"""

from __future__ import annotations

from collections import Counter

from torch.fx import GraphModule

from ._torch_private import structured_trace


def op_counts(module: GraphModule) -> Counter[str]:
    """Calls by operator."""
    return Counter(
        str(node.target) for node in module.graph.nodes if node.op == "call_function"
    )


def record_stage(name: str, module: GraphModule) -> None:
    """Hand a graph to the structured trace."""
    structured_trace(f"fpdt_{name}", lambda: module.print_readable(print_output=False))
