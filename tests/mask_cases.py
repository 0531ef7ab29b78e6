"""What the mask tests share: masks captured or traced, and the checks against the dense mask.

A :class:`Case` is a mask with its leaves' values and the dense mask, which is the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from fpdt_compile.passes.analyze_masks import find_mask_graph
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fpdt_compile.graph import MaskGraph, TileKind, TokenAxis, size_expr
from fpdt_compile.runtime.masks import MaskEvaluator

E, F, C, P = TileKind.EMPTY, TileKind.FULL, TileKind.CAUSAL, TileKind.PARTIAL
MIN = torch.finfo(torch.float32).min
Range = tuple[int, int]


class Recorder(Interpreter):
    """Runs a captured graph on real inputs and keeps every node's value."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


@dataclass(frozen=True)
class Case:
    """A mask found in a graph, with its values on real inputs."""

    mask: MaskGraph
    evaluator: MaskEvaluator
    dense: Tensor


def axes_of(module: GraphModule, symbol: Any) -> dict[Node, tuple[TokenAxis, ...]]:
    axes = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            axes[node] = tuple(
                TokenAxis(dim=dim, symbol=symbol)
                for dim, size in enumerate(value.shape)
                if size_expr(size) == symbol
            )
    return axes


def make_case(
    module: GraphModule, mask: Node, symbol: Any, inputs: Sequence[Any], size: int
) -> Case:
    graph = find_mask_graph(mask, axes_of(module, symbol))
    recorder = Recorder(module)
    recorder.run(*inputs)
    values = {leaf.name: recorder.values[leaf.name] for leaf in graph.leaves}
    evaluator = MaskEvaluator(graph, values, size, size, {symbol: size})
    dense = recorder.values[mask.name]
    dense = dense.expand(torch.broadcast_shapes(dense.shape, (size, size)))
    return Case(mask=graph, evaluator=evaluator, dense=dense)


def trace(fn: Callable[..., Tensor], *inputs: Tensor) -> tuple[GraphModule, Node, Any]:
    """``fn``'s graph, the node it returns and the symbol of ``inputs[0]``'s last size."""
    module = make_fx(fn, tracing_mode="symbolic", pre_dispatch=True)(*inputs)
    placeholder = next(iter(module.graph.nodes))
    symbol = size_expr(placeholder.meta["val"].shape[-1])
    return module, module.graph.output_node().args[0], symbol


def retrace(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[GraphModule, tuple[Any, ...]]:
    """Dynamo's graph of ``fn`` as an ATen graph, and its flat inputs."""
    found: list[tuple[GraphModule, tuple[Any, ...]]] = []

    def backend(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        fakes = [
            n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"
        ]
        mode = next(x.fake_mode for x in fakes if isinstance(x, Tensor))
        with mode, fx_traceback.preserve_node_meta():
            module = make_fx(lambda *a: Interpreter(gm).run(*a), pre_dispatch=True)(
                *fakes
            )

        def run(*real: Any) -> Any:
            found.append((module, real))
            return gm.forward(*real)

        return run

    torch.compile(fn, backend=backend)(*args, **kwargs)
    return found[0]


def dynamo_mask(
    fn: Callable[..., Tensor], positions: Tensor
) -> tuple[GraphModule, Node, Any, tuple[Any, ...]]:
    """The graph of a mask made from ``positions`` [s], as Dynamo captures it."""
    torch._dynamo.mark_dynamic(positions, 0)
    module, real = retrace(fn, positions)
    mask = module.graph.output_node().args[0][0]
    return module, mask, size_expr(mask.meta["val"].shape[-1]), real


def case_of(fn: Callable[..., Tensor], *inputs: Tensor) -> Case:
    module, mask, symbol = trace(fn, *inputs)
    return make_case(module, mask, symbol, inputs, inputs[0].shape[-1])


def cuts(size: int, *edges: int) -> list[Range]:
    return list(itertools.pairwise([0, *edges, size]))


def every(size: int, length: int) -> list[Range]:
    return cuts(size, *range(length, size, length))


def kinds(case: Case, bounds: Sequence[Range]) -> list[list[TileKind]]:
    return [list(row) for row in case.evaluator.table(bounds, bounds).kinds]


def check(case: Case, q_bounds: Sequence[Range], k_bounds: Sequence[Range]) -> None:
    """Tiles are exact; EMPTY, FULL and CAUSAL tiles are what they say."""
    table = case.evaluator.table(q_bounds, k_bounds)
    for (i, q), (j, k) in itertools.product(enumerate(q_bounds), enumerate(k_bounds)):
        want = case.dense[..., slice(*q), slice(*k)]
        tile = case.evaluator.tile(q, k)
        assert tile.shape[-2:] == want.shape[-2:] and tile.dtype == want.dtype
        torch.testing.assert_close(
            tile.expand_as(want), want, rtol=0, atol=0, equal_nan=True
        )
        kind = table.kinds[i][j]
        if case.mask.is_bool:
            visible, hidden = want, ~want
        else:
            visible, hidden = want == 0, want <= MIN / 2
        if kind is E:
            assert hidden.all()
            seen = (case.dense[..., slice(*q), :] > MIN / 4).any(-1).all()
            assert case.mask.is_bool or seen or (want == -torch.inf).all()
        elif kind is F:
            assert visible.all()
        elif kind is C:
            lower = torch.ones(want.shape[-2:], dtype=torch.bool).tril()
            assert q == k and torch.where(lower, visible, hidden).all()


def check_tight(case: Case, bounds: Sequence[Range]) -> None:
    """No PARTIAL tile of a bool mask is all visible, all hidden or causal."""
    table = case.evaluator.table(bounds, bounds)
    for (i, q), (j, k) in itertools.product(enumerate(bounds), repeat=2):
        if table.kinds[i][j] is P:
            want = case.dense[..., slice(*q), slice(*k)]
            lower = torch.ones(want.shape[-2:], dtype=torch.bool).tril()
            assert want.any() and not want.all()
            assert i != j or not (want == lower).all()


def causal(p: Tensor) -> Tensor:
    return p[None, :] <= p[:, None]


def capture_hf(name: str, inputs: dict[str, Tensor], **config: Any) -> Case:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        pad_token_id=0,
        head_dim=8,
    )
    sizes.update(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    module, real = retrace(model, **inputs)
    attention = next(
        n for n in module.graph.nodes if "scaled_dot_product" in str(n.target)
    )
    symbol = size_expr(attention.meta["val"].shape[-2])
    return make_case(
        module, attention.args[3], symbol, real, inputs["input_ids"].shape[1]
    )
