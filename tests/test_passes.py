"""Passes one by one: what matches, near-misses that must not, idempotence, untouched graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fpdt_compile.passes.base import PassContext
from fpdt_compile.passes.counter_dropout import CounterDropout
from fpdt_compile.passes.find_token_axes import find_token_axes
from fpdt_compile.passes.fold_repeat_kv import FoldRepeatKV
from fpdt_compile.passes.manager import analyze
from fpdt_compile.passes.normalize import Normalize
from fpdt_compile.passes.pad_shifted_losses import PadShiftedLosses
from fpdt_compile.passes.verify import verify_graph
from tiny_models import VOCAB, batch, decoder
from torch import nn

from fpdt_compile.capture import capture
from fpdt_compile.config import FpdtConfig
from fpdt_compile.debug import op_counts
from fpdt_compile.errors import CantChunk, InvariantError
from fpdt_compile.graph import NodeKind, is_tensor


def captured_of(fn, *inputs, dims=None):
    """Capture a function of tensors whose dimension 1 (or ``dims``) is the sequence."""
    made = []

    def backend(module, _):
        made.append(capture(module))
        return module.forward

    for i, x in enumerate(inputs):
        dim = 1 if dims is None else dims[i]
        if dim is not None:
            torch._dynamo.mark_dynamic(x, dim)
    torch.compile(fn, backend=backend)(*inputs)
    return made[0]


def heads(repeat):
    """Attention whose keys and values are made H heads wide by ``repeat``."""

    def fn(q, k):
        q = q.unflatten(-1, (4, 8)).transpose(1, 2)
        k = repeat(k.unflatten(-1, (2, 8)).transpose(1, 2))
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    return captured_of(fn, torch.randn(3, 17, 32), torch.randn(3, 17, 16))


def repeat_kv(x):
    b, g, s, d = x.shape
    return x[:, :, None].expand(b, g, 2, s, d).reshape(b, g * 2, s, d)


def tiled(x):
    """[g0, g1, g0, g1]: query head h would read head h % G."""
    b, g, s, d = x.shape
    return x[:, None].expand(b, 2, g, s, d).reshape(b, g * 2, s, d)


@pytest.mark.parametrize(
    "repeat",
    [repeat_kv, lambda x: x.repeat_interleave(2, dim=1)],
    ids=["expand", "interleave"],
)
def test_repeat_kv_is_folded(repeat):
    captured = heads(repeat)
    graph = captured.module.graph
    assert FoldRepeatKV().run(captured, PassContext()) == 1
    (attention,) = [n for n in graph.nodes if "scaled_dot" in str(n.target)]
    assert (
        attention.args[1].meta["val"].shape[1] == 2 and attention.kwargs["enable_gqa"]
    )
    assert FoldRepeatKV().run(captured, PassContext()) == 0
    verify_graph(captured, "test", pure=True)


@pytest.mark.parametrize(
    "repeat",
    [
        tiled,
        lambda x: x.repeat(1, 2, 1, 1),
        lambda x: torch.cat([x, x], 1),
        lambda x: repeat_kv(x) * 2,
        lambda x: repeat_kv(x.transpose(-1, -2)).transpose(-1, -2),
    ],
    ids=["tiled", "repeat", "cat", "scaled after", "transposed"],
)
def test_repeat_kv_near_misses(repeat):
    captured = heads(repeat)
    before = op_counts(captured.module)
    assert FoldRepeatKV().run(captured, PassContext()) == 0
    assert op_counts(captured.module) == before


def loss_graph(fn):
    def call(x, weight, labels):
        return fn(F.linear(x, weight), labels)

    labels = torch.randint(0, VOCAB, (2, 17))
    return captured_of(
        call, torch.randn(2, 17, 8), torch.randn(VOCAB, 8), labels, dims=(1, None, 1)
    )


def shifted(logits, labels):
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def test_shifted_loss_is_padded():
    captured = loss_graph(shifted)
    assert PadShiftedLosses().run(captured, PassContext()) == 1
    assert PadShiftedLosses().run(captured, PassContext()) == 0
    (loss,) = [
        n for n in captured.module.graph.nodes if "cross_entropy" in str(n.target)
    ]
    (s,) = captured.token_symbols
    assert loss.args[0].meta["val"].shape[0].node.expr == 2 * s
    x, w = torch.randn(2, 9, 8), torch.randn(VOCAB, 8)
    labels = torch.randint(0, VOCAB, (2, 9))
    flat = [n.name for n in captured.module.graph.nodes if n.op == "placeholder"]
    values = [
        9 if n.meta["val"].__class__ is torch.SymInt else None
        for n in captured.module.graph.nodes
        if n.op == "placeholder"
    ]
    tensors = iter([x, w, labels])
    inputs = [v if v is not None else next(tensors) for v in values]
    assert len(flat) == len(inputs)
    (got,) = torch.fx.Interpreter(captured.module).run(*inputs)
    torch.testing.assert_close(got, shifted(F.linear(x, w), labels))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: F.cross_entropy(
            x[:, :-1].reshape(-1, VOCAB), y[:, 1:].reshape(-1), reduction="none"
        ),
        lambda x, y: F.cross_entropy(
            x[:, :-1].softmax(1).reshape(-1, VOCAB), y[:, 1:].reshape(-1)
        ),
        lambda x, y: F.cross_entropy(
            x[:, :-1].cumsum(1).reshape(-1, VOCAB), y[:, 1:].reshape(-1)
        ),
        lambda x, y: F.cross_entropy(x.reshape(-1, VOCAB), y.reshape(-1)),
        lambda x, y: F.cross_entropy(
            x[:, ::2].reshape(-1, VOCAB), y[:, ::2].reshape(-1)
        ),
        lambda x, y: F.cross_entropy(
            (x[:, :-1] + x[:, 1:]).reshape(-1, VOCAB), y[:, 1:].reshape(-1)
        ),
    ],
    ids=[
        "none",
        "softmax over tokens",
        "cumsum",
        "not shifted",
        "step",
        "two slices",
    ],
)
def test_shifted_loss_near_misses(fn):
    captured = loss_graph(fn)
    before = op_counts(captured.module)
    assert PadShiftedLosses().run(captured, PassContext()) == 0
    assert op_counts(captured.module) == before


def test_normalize_is_idempotent_and_leaves_other_graphs_alone():
    captured = loss_graph(
        lambda x, y: F.cross_entropy(x.reshape(-1, VOCAB), y.reshape(-1))
    )
    assert Normalize().run(captured, PassContext()) > 0
    assert Normalize().run(captured, PassContext()) == 0
    quiet = captured_of(lambda x: x.sin() * x.cos(), torch.randn(2, 17))
    before = str(quiet.module.graph)
    for graph_pass in (
        PadShiftedLosses(),
        Normalize(),
        CounterDropout(),
        FoldRepeatKV(),
    ):
        assert graph_pass.run(quiet, PassContext()) == 0
    assert str(quiet.module.graph) == before


def test_fuel_stops_rewriting():
    captured = loss_graph(shifted)
    ctx = PassContext(fuel=0)
    assert PadShiftedLosses().run(captured, ctx) == 0
    ctx = PassContext(fuel=1)
    assert PadShiftedLosses().run(captured, ctx) == 1 and ctx.fuel == 0


def test_normalize_writes_out_of_place():
    def fn(x):
        y = x * 2
        y.add_(1)
        z = y.clone()
        z.mul_(3)
        return y + z

    captured = captured_of(fn, torch.randn(2, 17))
    Normalize().run(captured, PassContext())
    verify_graph(captured, "normalize", pure=True)
    (got,) = torch.fx.Interpreter(captured.module).run(17, torch.ones(2, 17))
    torch.testing.assert_close(got, torch.full((2, 17), 12.0))


def test_normalize_lets_a_view_see_a_later_write():
    def fn(x):
        y = x * 2
        view = y[:, :3]
        y.add_(1)
        return y.sum() + view.sum()

    x = torch.randn(2, 17)
    captured = captured_of(fn, x)
    Normalize().run(captured, PassContext())
    verify_graph(captured, "normalize", pure=True)
    inputs = captured.module.graph.find_nodes(op="placeholder")
    values = [x if is_tensor(n) else 17 for n in inputs]
    (got,) = torch.fx.Interpreter(captured.module).run(*values)
    torch.testing.assert_close(got, fn(x))


def test_normalize_refuses_a_write_through_a_view_that_has_no_scatter():
    def fn(x):
        y = x * 2
        y.unfold(1, 4, 4).add_(1)
        return y.sum()

    captured = captured_of(fn, torch.randn(2, 17))
    with pytest.raises(CantChunk, match="through a unfold") as error:
        Normalize().run(captured, PassContext())
    assert "test_passes.py" in error.value.rejection.source


def test_verify_catches_a_mutation_and_a_missing_value():
    captured = captured_of(lambda x: (x * 2).add_(1), torch.randn(2, 17))
    with pytest.raises(InvariantError, match="writes into its input"):
        verify_graph(captured, "test", pure=True)
    verify_graph(captured, "test", pure=False)
    for node in captured.module.graph.nodes:
        if node.op == "call_function":
            del node.meta["val"]
            break
    with pytest.raises(InvariantError, match="has no value"):
        verify_graph(captured, "test", pure=False)


def kinds_of(fn, *inputs, dims=None):
    captured = captured_of(fn, *inputs, dims=dims)
    tokens = find_token_axes(captured.module.graph, captured.token_symbols)
    return {
        str(n.target).split(".")[1]: (tokens.kinds[n], tokens.axes.get(n))
        for n in captured.module.graph.nodes
        if n.op == "call_function"
    }


def test_axes_follow_views():
    found = kinds_of(
        lambda x: (
            x.reshape(-1, 6).tanh().reshape(2, -1, 2, 3).permute(2, 1, 0, 3).exp()
        ),
        torch.randn(2, 17, 6),
    )
    flat = found["tanh"][1][0]
    assert (flat.dim, flat.outer, flat.inner) == (0, 2, 1)
    assert found["exp"][1][0].dim == 1 and found["exp"][1][0].plain


def test_kinds():
    def fn(ids, x, w):
        positions = ids.cumsum(1)
        table = positions[..., None].float() * torch.ones(4)
        h = F.linear(x, w) + table.cos()
        mask = positions[:, :, None] >= positions[:, None, :]
        return (h.sigmoid(), h.sum(), mask)

    found = kinds_of(
        fn,
        torch.ones(2, 17, dtype=torch.long),
        torch.randn(2, 17, 8),
        torch.randn(4, 8),
        dims=(1, 1, None),
    )
    assert found["cumsum"][0] is NodeKind.VECTOR
    assert found["cos"][0] is NodeKind.TOKENWISE
    assert found["ge"][0] is NodeKind.MASK
    assert found["sum"][0] is NodeKind.TOTAL
    assert found["sigmoid"][0] is NodeKind.TOKENWISE


def cut_of(name, **changes):
    model = decoder(name, **changes)
    inputs = batch(2, 24)
    captured = []

    def backend(module, _):
        captured.append(capture(module))
        return module.forward

    torch._dynamo.mark_dynamic(inputs["input_ids"], 1)
    torch.compile(model, backend=backend)(**inputs)
    return analyze(captured[0], FpdtConfig())


def test_the_state_of_a_decoder_is_the_residual_stream():
    for name in ("llama", "gpt_neox", "falcon", "cohere"):
        result = cut_of(name)
        states = [result.cut.entry, *(b.state_out for b in result.cut.blocks)]
        assert [len(s) for s in states] == [1, 1, 1], name
        assert all(n.meta["val"].shape[-1] == 32 for s in states for n in s)


def test_only_g_heads_are_stored():
    (attention, _) = cut_of("llama").attentions
    assert (
        attention.k.meta["val"].shape[1] == 2 and attention.q.meta["val"].shape[1] == 4
    )


def test_head_is_found_by_what_it_feeds():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Embedding(VOCAB, 8)
            self.zzz = nn.Linear(8, VOCAB)

        def forward(self, ids, labels):
            x = self.a(ids)
            q = x[:, None]
            x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
            return F.cross_entropy(
                self.zzz(x).flatten(0, 1).float() * 0.5, labels.flatten()
            )

    ids = torch.randint(0, VOCAB, (2, 17))
    captured = captured_of(Odd(), ids, ids.clone())
    result = analyze(captured, FpdtConfig())
    assert result.cut.head.vocab_size == VOCAB


def test_no_node_with_two_token_axes_reaches_a_region():
    """No S x S tensor: masks stay graphs, whatever the model materialized."""
    result = cut_of("mistral_window")
    tokens = result.tokens
    wide = [
        n
        for n in result.captured.module.graph.nodes
        if len(tokens.axes.get(n, ())) == 2
    ]
    assert wide and all(tokens.kinds[n] is NodeKind.MASK for n in wide)
    assert all(a.mask is not None for a in result.attentions)
