"""``explain``: what would be done to a model, without compiling anything.

The report fits one screen: what was found, what runs in chunks, what is stored where, bytes before
and after, and what runs whole and why, with the user's file and line.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.fx import GraphModule, Node

from ._torch_private import (
    abort_capture,
    capture_only,
    run_without_gradients,
    traceable_torch,
    with_dynamic_results,
)
from .backend import FpdtBackend, optimized_backend
from .config import FpdtConfig, tiers_of
from .graph import Attention, NodeKind, is_tensor, size_expr, value_of
from .passes.manager import Analysis
from .passes.match_lm_head import after_head
from .recorded_outputs import install_recording_hooks, recorder_restored
from .token_dims import TokenMarker


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What ``explain`` found. Bytes are for the inputs that were passed."""

    model: str
    seq_len: int
    attentions: int
    attentions_chunked: int
    masks: dict[str, int]
    feed_forwards: dict[str, int]
    head: str
    blocks: int
    chunk_len: int
    num_chunks: int
    head_len: int
    save: str
    offload: str
    stored_bytes_before: int
    stored_bytes_after: int
    largest_tensor_before_bytes: int
    largest_tensor_after_bytes: int
    rejections: tuple[dict[str, str], ...]
    graphs: tuple[dict[str, Any], ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        buffer = io.StringIO()
        console = Console(file=buffer, width=88, color_system=None)
        console.print(self.table())
        if len(self.graphs) > 1:
            console.print(f"The forward breaks into {len(self.graphs)} graphs:")
            for number, item in enumerate(self.graphs, 1):
                ends = f"; ends at {item['ends_at']}: {item['reason']}"
                console.print(
                    f"  {number}: {item['attentions_chunked']} of {item['attentions']} attentions "
                    f"in chunks{ends if item['ends_at'] else ''}"
                )
        if self.rejections:
            console.print("Runs whole:")
            for item in self.rejections:
                console.print(
                    f"  {item['op']} at {item['source']}: {item['reason']}; {item['change']}"
                )
        return buffer.getvalue().rstrip()

    def table(self) -> Table:
        table = Table(
            title=f"fpdt_compile: {self.model}, S = {self.seq_len}", show_header=False
        )
        table.add_column(no_wrap=True)
        table.add_column()
        masks = ", ".join(f"{n} {kind}" for kind, n in self.masks.items()) or "none"
        forwards = (
            ", ".join(f"{n} {kind}" for kind, n in self.feed_forwards.items()) or "none"
        )
        table.add_row(
            "attention",
            f"{self.attentions_chunked} of {self.attentions} in chunks ({masks})",
        )
        table.add_row("feed-forward", forwards)
        table.add_row("LM head", self.head)
        if self.blocks:
            table.add_row(
                "chunks",
                f"{self.num_chunks} of {self.chunk_len} tokens through {self.blocks} blocks, "
                f"head in pieces of {self.head_len}",
            )
        table.add_row("saved for backward", f"{self.save}, {self.offload}")
        table.add_row(
            "activations stored",
            f"{gib(self.stored_bytes_before)} before, {gib(self.stored_bytes_after)} after",
        )
        table.add_row(
            "largest tensor",
            f"{gib(self.largest_tensor_before_bytes)} before, "
            f"{gib(self.largest_tensor_after_bytes)} after",
        )
        return table


def gib(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def explain(
    model: nn.Module,
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Analyze a call of ``model`` with these inputs; nothing is compiled.

    Nothing is computed either, but for a model whose capture breaks into several graphs: those
    before the last one are run without gradients, to see what comes after them. The report is then
    of the graph with the most attentions, and ``graphs`` says where and why each one ends.

    ``options`` are those of :class:`FpdtConfig`; None means those the model was optimized with,
    or the defaults.
    """
    config = FpdtConfig.from_options(options)
    optimized = optimized_backend(model)
    if options is None and optimized is not None:
        config = optimized.config
    backend = FpdtBackend(config)
    found: list[Analysis] = []

    def analyze_only(module: GraphModule, _: Any) -> Any:
        found.append(backend.analyze(module))
        if found[0].captured.graph_break is None:
            return abort_capture
        return with_dynamic_results(module, run_without_gradients(module))

    TokenMarker(model, config.token_dims).mark(inputs, kwargs)
    install_recording_hooks(model, kwargs)
    with traceable_torch(), recorder_restored():
        capture_only(model, analyze_only, inputs, kwargs)
    if not found:
        raise ValueError(
            f"model={type(model).__name__}: its call computes nothing that can be captured"
        )
    return report(model, found, config)


def report(model: nn.Module, found: Sequence[Analysis], config: FpdtConfig) -> Report:
    result = max(found, key=lambda x: x.num_found)
    graph = result.captured.module.graph
    tensors = [n for n in graph.nodes if is_tensor(n) and n.op == "call_function"]
    sizes = {n: num_bytes(n) for n in tensors}
    plan, cut = result.plan, result.cut
    seq_len = sequence_length(result)
    after = largest_after = 0
    if plan is not None and cut is not None:
        after = stored_after(result)
        largest_after = largest_chunk(result, seq_len)
    return Report(
        model=type(model).__name__,
        seq_len=seq_len,
        attentions=result.num_found,
        attentions_chunked=0 if cut is None else len(result.attentions),
        masks=dict(Counter(mask_label(a) for a in result.attentions)),
        feed_forwards=dict(Counter(f.kind for f in result.feed_forwards)),
        head="none"
        if cut is None or cut.head is None
        else f"{cut.head.vocab_size} columns",
        blocks=0 if cut is None else len(cut.blocks),
        chunk_len=0 if plan is None else plan.chunk_len,
        num_chunks=0
        if plan is None
        else -(-seq_len // (plan.chunk_len * plan.seq_parallel)),
        head_len=0 if plan is None else plan.head_len,
        save=config.save,
        offload=offload_label(config, graph),
        stored_bytes_before=sum(b for n, b in sizes.items() if saved_by_autograd(n)),
        stored_bytes_after=after,
        largest_tensor_before_bytes=max(sizes.values(), default=0),
        largest_tensor_after_bytes=largest_after,
        rejections=tuple(r.to_dict() for x in found for r in x.rejections),
        graphs=tuple(graph_entry(x) for x in found),
    )


def graph_entry(result: Analysis) -> dict[str, Any]:
    """One captured graph: its attentions, and where and why it ends before the model does."""
    place, reason = result.captured.graph_break or ("", "")
    return {
        "attentions": result.num_found,
        "attentions_chunked": 0 if result.cut is None else len(result.attentions),
        "ends_at": place,
        "reason": reason,
    }


def offload_label(config: FpdtConfig, graph: torch.fx.Graph) -> str:
    device = next(value_of(n).device.type for n in graph.nodes if is_tensor(n))
    tiers = tiers_of(config.offload)
    if "disk" not in tiers.values():
        unused = ""
        if config.offload_dir is not None:
            unused = '; offload_dir has no effect: no tier is "disk"'
        if device == "cpu" and config.offload != "none":
            return (
                f"offload={config.offload!r} has no effect on a CPU: main memory is the device"
                + unused
            )
        return f"offload={config.offload}{unused}"
    if config.offload == "disk":
        return f"offload=disk in {config.offload_dir or tempfile.gettempdir()}"
    listed = ", ".join(f"{kind}: {tier}" for kind, tier in tiers.items())
    return f"offload {listed}; disk in {config.offload_dir or tempfile.gettempdir()}"


def mask_label(attention: Attention) -> str:
    if attention.mask is not None:
        return "mask by tiles"
    return "causal" if attention.is_causal else "no mask"


def num_bytes(node: Node) -> int:
    """Bytes of a node's tensor at the captured sizes."""
    value = value_of(node)
    total = value.dtype.itemsize
    for size in value.shape:
        total *= int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
    return total


def saved_by_autograd(node: Node) -> bool:
    """An upper estimate of what eager training keeps: every float tensor that is not a view."""
    name = str(node.target)
    views = (
        "view",
        "reshape",
        "transpose",
        "permute",
        "slice",
        "expand",
        "unsqueeze",
        "select",
    )
    return value_of(node).is_floating_point() and not any(v in name for v in views)


def sequence_length(result: Analysis) -> int:
    symbols = result.captured.token_symbols
    for node in result.captured.module.graph.nodes:
        if node.op == "placeholder" and is_tensor(node):
            for size in value_of(node).shape:
                if isinstance(size, torch.SymInt) and size_expr(size) in symbols:
                    return int(size.node.hint)
    return 0


def stored_after(result: Analysis) -> int:
    cut = result.cut
    assert cut is not None and result.plan is not None
    states = dict.fromkeys(cut.entry)
    for block in cut.blocks:
        states.update(dict.fromkeys(block.state_out))
    total = sum(num_bytes(n) for n in states if n.op != "placeholder")
    plan, seq_len = result.plan, sequence_length(result)
    levels = plan.saves(-(-seq_len // plan.seq_parallel))
    for level, block in zip(levels, plan.blocks, strict=True):
        total += block.attention * seq_len if level != "hidden" else 0
        total += block.qkv * seq_len if level == "qkv" else 0
    return total


def largest_chunk(result: Analysis, seq_len: int) -> int:
    """The largest tensor of a region: its widest value at the chunk's (or head piece's) length."""
    assert (
        result.tokens is not None and result.plan is not None and result.cut is not None
    )
    plan, best = result.plan, 0
    head_nodes = after_head(result.cut.head)
    for node in result.captured.module.graph.nodes:
        if result.tokens.kinds[node] is NodeKind.TOKENWISE and is_tensor(node):
            length = min(
                seq_len, plan.head_len if node in head_nodes else plan.chunk_len
            )
            best = max(best, num_bytes(node) * length // max(1, seq_len))
    return best
