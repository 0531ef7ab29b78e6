"""``flex_attention`` as attention with explicit scores.

In: the operands of the flex_attention higher-order op, in the middle of a retrace. Out: its
results, in the form that ``raise_attention`` gives every other attention:

    scores = attention_scores(q, k)                                 [B, H, q, k]
    logits = where(mask_mod(...), score_mod(scale * scores, ...), -inf)
    out    = attention_from_scores(q, k, v, logits)

The two mods are written for one pair of scalars; here they run once on the scores and on the index
tensors b [B,1,1,1], h [1,H,1,1], q [1,1,S,1] and k [1,1,1,S]. That is the same for pointwise
operators and for lookups, and nothing else is let through.

Only ``mask_mod`` says which pairs count; the block mask's lists of blocks are an index of it for
another kernel, and what makes them is not run at all (:func:`dead_code`).

Limits: the row maxima (``AuxRequest(max_scores=True)``) are refused; with ``return_lse`` the
logsumexp is taken over whole rows of scores, which is reported as a part that runs whole.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ._torch_private import is_flex_op, record_call, trace_part
from .errors import CantChunk, Rejection
from .graph import is_tensor, size_expr, source_of, value_of
from .kernels.reference import attention_from_scores, attention_scores
from .passes.mask_nodes import is_pointwise, op_name

aten = torch.ops.aten
CHANGE = "write score_mod and mask_mod with pointwise operators and lookups"
PAIR = 4  # dimensions of a value for every batch row, head, query and key
ALLOWED = ("index", "embedding", "ones_like", "zeros_like", "full_like")
FACTORIES = (
    "new_ones",
    "new_zeros",
    "new_full",
)  # take no more than a device from the pair
LOG2 = math.log(2)


def refuse(node: Node, reason: str, change: str = CHANGE) -> CantChunk:
    return CantChunk(
        Rejection(
            op="flex_attention", source=source_of(node), reason=reason, change=change
        )
    )


def run_flex_attention(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results (out, logsumexp / ln 2, None) of Dynamo's call ``node``."""
    q, k, v, score_mod, block_mask, scale, _, score_buffers, mask_buffers = args
    if output_of(node, 2) is not None:
        raise refuse(
            node, "returns the row maxima of its scores", "do not ask for them"
        )
    batch = q.shape[0]
    if k.shape[0] != batch:
        k, v = (x.expand(batch, *x.shape[1:]) for x in (k, v))
    scores = record_call(attention_scores, q, k)
    wide = torch.promote_types(scores.dtype, torch.float32)
    logits = scores.to(wide) * scale
    pair = [index_of(dim, size, q.device) for dim, size in enumerate(logits.shape)]
    logits = run_mod(node, score_mod, [logits, *pair], score_buffers)
    shown = run_mod(node, block_mask[-1], pair, mask_buffers)
    logits = torch.where(shown, logits, -torch.inf)
    out = record_call(attention_from_scores, q, k, v, logits, None, None, 0.0)
    lse = None
    if output_of(node, 1) is not None:
        lse = logits.logsumexp(-1) / LOG2
    return out, lse, None


def output_of(node: Node, index: int) -> Node | None:
    """The user that takes result ``index`` of a call, if it is read itself."""
    taken = (u for u in node.users if u.target is operator.getitem)
    return next((u for u in taken if u.args[1] == index and u.users), None)


def index_of(dim: int, size: Any, device: torch.device) -> Tensor:
    """0, 1, ... along dimension ``dim`` of four."""
    shape = [1] * PAIR
    shape[dim] = size
    return torch.arange(size, device=device).view(shape)


def run_mod(
    node: Node, mod: GraphModule, inputs: list[Tensor], buffers: tuple[Any, ...]
) -> Tensor:
    """One mod on all pairs; raises CantChunk for what is not the same on scalars."""
    # Scalars take part in type promotion like the pair's values.
    buffers = tuple(
        x.view([1] * PAIR) if isinstance(x, Tensor) and x.dim() == 0 else x
        for x in buffers
    )
    traced = trace_part(
        lambda *values: _Mod(mod, node, len(inputs)).run(*values), *inputs, *buffers
    )
    check_mod(node, traced, len(inputs))
    return Interpreter(traced).run(*inputs, *buffers)


def check_mod(flex: Node, traced: GraphModule, num_inputs: int) -> None:
    """Whatever depends on the pair must be pointwise, or a lookup by it."""
    dependent: set[Node] = set()
    for position, node in enumerate(traced.graph.nodes):
        if node.op == "placeholder" and position < num_inputs:
            dependent.add(node)
        elif node.op == "call_function" and any(
            x in dependent for x in node.all_input_nodes
        ):
            if node.target is aten.sym_size.int or op_name(node) in FACTORIES:
                continue
            dependent.add(node)
            known = is_pointwise(node) or op_name(node) in ALLOWED
            if not known or not is_tensor(node) or value_of(node).dim() != PAIR:
                raise refuse(flex, f"{op_name(node)} in a mod is not pointwise")
    (output,) = (n for n in traced.graph.nodes if n.op == "output")
    if not isinstance(output.args[0], Node):
        raise refuse(flex, "a mod returns no tensor")


class _Partial:
    """A table indexed by fewer numbers than it has dimensions, as ``table[h]`` in
    ``table[h][i]``."""

    def __init__(self, table: Tensor, taken: list[Any]) -> None:
        self.table = table
        self.taken = taken


class _Mod(Interpreter):
    """Runs a mod's graph on pairs: its lookups become tensor lookups."""

    def __init__(self, module: GraphModule, flex: Node, num_inputs: int) -> None:
        super().__init__(module)
        self.flex = flex
        self.num_inputs = num_inputs
        self.pair: list[Tensor] = []

    def run(self, *args: Any) -> Any:
        given = args[: self.num_inputs]
        self.pair = list(given[-PAIR:])
        return super().run(*args)

    def call_function(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if target is operator.getitem and isinstance(args[0], (Tensor, _Partial)):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return self.look_up(args[0], list(index))
        if any(isinstance(x, _Partial) for x in (*args, *kwargs.values())):
            raise refuse(self.flex, "a mod computes with a row of a table")
        return super().call_function(target, args, kwargs)

    def call_method(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if any(isinstance(x, _Partial) for x in (*args, *kwargs.values())):
            raise refuse(self.flex, "a mod computes with a row of a table")
        return super().call_method(target, args, kwargs)

    def look_up(self, table: Tensor | _Partial, index: list[Any]) -> Any:
        if isinstance(table, _Partial):
            table, index = table.table, [*table.taken, *index]
        if len(index) < table.dim():
            return _Partial(table, index)
        if any(x is None or x is Ellipsis for x in index) or len(index) > table.dim():
            raise refuse(self.flex, "a mod indexes a table with more than numbers")
        rows: list[Tensor] = []
        for x in index:
            if isinstance(x, (int, torch.SymInt)):
                table = table.select(len(rows), x)
            elif isinstance(x, Tensor) and x.dtype is not torch.bool:
                rows.append(x)
            else:
                raise refuse(self.flex, "a mod indexes a table with more than numbers")
        if not rows:
            return table.view([1] * PAIR)
        whole = self.whole_view(table, rows)
        return aten.index.Tensor(table, rows) if whole is None else whole

    def whole_view(self, table: Tensor, rows: list[Tensor]) -> Tensor | None:
        """``table[b, q]`` with every batch row and query: the table itself, as [B, 1, S, 1]."""
        roles = [
            next((r for r, x in enumerate(self.pair) if x is row), None) for row in rows
        ]
        if None in roles or len(set(roles)) < len(roles):
            return None
        sizes = [self.pair[role].shape[role] for role in roles]
        if any(
            size_expr(a) != size_expr(b)
            for a, b in zip(sizes, table.shape, strict=True)
        ):
            return None
        order = sorted(range(len(roles)), key=lambda i: roles[i])
        if order != list(range(len(roles))):
            table = table.permute(order)
        for role in range(PAIR):
            if role not in roles:
                table = table.unsqueeze(role)
        return table


def dead_code(module: GraphModule) -> set[Node]:
    """What only makes the lists of blocks of block masks: not to be run.

    Operators without a reader (writes, switches) count as read, but for those that
    ``torch.nn.attention.flex_attention`` itself makes, and the vmap levels around dead code.
    """
    nodes = list(module.graph.nodes)
    flex = [n for n in nodes if n.op == "call_function" and is_flex_op(n.target)]
    if not flex:
        return set()
    levels = vmap_levels(nodes)
    inside = {n for start, end in levels for n in nodes[start + 1 : end]}
    live: set[Node] = set()
    for node in reversed(nodes):
        read = any(user in live and reads(user, node) for user in node.users)
        effect = not node.users and node.op != "placeholder"
        if read or node.op == "output" or (effect and not is_block_code(node, inside)):
            live.add(node)
    for start, end in levels:
        if any(n in live for n in nodes[start + 1 : end]):
            live.update((nodes[start], nodes[end]))
    return {
        n for n in nodes if n not in live and n.op not in ("placeholder", "get_attr")
    }


def reads(user: Node, node: Node) -> bool:
    """Whether ``user`` needs the value of ``node``: a flex call needs no list of blocks."""
    if user.op != "call_function" or not is_flex_op(user.target):
        return True
    q, k, v, score_mod, block_mask, scale, _, *buffers = user.args
    needed: list[Node] = []
    torch.fx.map_arg(
        (q, k, v, score_mod, block_mask[-1], scale, buffers), needed.append
    )
    return node in needed


def is_block_code(node: Node, inside: set[Node]) -> bool:
    name = getattr(node.target, "__name__", "")
    if name.startswith(("_vmap_", "lazy_load_")) or node in inside:
        return True
    frames = (node.meta.get("stack_trace") or "").rstrip().splitlines()
    places = [line for line in frames if line.lstrip().startswith("File ")]
    return bool(places) and "torch/nn/attention/flex_attention.py" in places[-1]


def vmap_levels(nodes: list[Node]) -> list[tuple[int, int]]:
    """Where vmap levels begin and end in the graph."""
    found, opened = [], []
    for position, node in enumerate(nodes):
        name = getattr(node.target, "__name__", "")
        if name == "_vmap_increment_nesting":
            opened.append(position)
        elif name == "_vmap_decrement_nesting":
            found.append((opened.pop(), position))
    return found
