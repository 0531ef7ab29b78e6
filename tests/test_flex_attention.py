"""``flex_attention`` with the mods people write, against dense attention with the same mods.

torch's own has no backward on a CPU, so the reference applies the mods with vmap to all pairs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import batch, pair
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import (
    AuxRequest,
    _vmap_for_bhqkv,
    and_masks,
    create_block_mask,
    flex_attention,
)

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

WIDTH, HEADS, GROUPS, SIZE, VOCAB, TABLE = 32, 4, 2, 8, 50, 64


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) of the mods applied to every pair."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    index = [torch.arange(size) for size in scores.shape]
    with TransformGetItemToIndex():
        if score_mod is not None:
            scores = _vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *index)
        if mask_mod is not None:
            shown = _vmap_for_bhqkv(mask_mod, prefix=())(*index)
            scores = torch.where(shown, scores, -torch.inf)
    return torch._safe_softmax(scores, -1) @ v, scores.logsumexp(-1)


class Net(nn.Module):
    """Two flex attentions; ``kind`` names the mods, ``reference`` takes dense math."""

    def __init__(self, kind: str, *, groups: int = HEADS, layers: int = 2) -> None:
        super().__init__()
        self.kind, self.groups, self.reference = kind, groups, False
        self.scale = 0.3 if kind == "scale" else None
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.ModuleList(
            nn.Linear(WIDTH, (HEADS + 2 * groups) * SIZE) for _ in range(layers)
        )
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.bias = nn.Parameter(torch.randn(HEADS, TABLE))
        self.slopes = nn.Parameter(torch.rand(HEADS))
        self.gate = nn.Parameter(torch.rand(()))

    def mods(self, docs: Tensor) -> tuple[Any, Any]:
        def causal(b, h, q, k):
            return k <= q

        def same_document(b, h, q, k):
            return docs[b, q] == docs[b, k]

        def window(b, h, q, k):
            return (q - k).abs() < 5

        def hidden_rows(b, h, q, k):
            return (k <= q) & (q % 3 != 1)

        def by_head(b, h, q, k):
            return (k <= q) & ((h % 2 == 0) | (q - k < 4))

        def prefix(b, h, q, k):
            return (k < 6) | (k <= q)

        def softcap(score, b, h, q, k):
            return 5 * torch.tanh(score / 5)

        def table(score, b, h, q, k):
            return score + self.bias[h, (q - k).abs()]

        def chained(score, b, h, q, k):
            if self.reference:  # torch's vmap has no gradient for a row of a table
                first = self.bias[torch.zeros_like(q), q]
                return score + self.bias[h, (q - k).abs()] * first
            return score + self.bias[h][(q - k).abs()] * self.bias[0, q]

        def alibi(score, b, h, q, k):
            return score - self.slopes[h] * (q - k) * self.gate

        def everything(score, b, h, q, k):
            capped = 5 * torch.tanh(score * self.gate / 5) + self.bias[h, (q - k).abs()]
            return torch.where(docs[b, q] == docs[b, k], capped, capped * 0.5)

        def positions(score, b, h, q, k):
            return score * torch.where(q >= k, 1.0, 0.5) + docs[b, k] * 0.1

        masks = {
            "causal": causal,
            "scale": causal,
            "documents": and_masks(causal, same_document),
            "window": window,
            "hidden_rows": hidden_rows,
            "by_head": by_head,
            "prefix": prefix,
            "everything": and_masks(causal, same_document),
            "alibi": causal,
            "inputs": causal,
        }
        scores = {
            "softcap": softcap,
            "table": table,
            "chained": chained,
            "alibi": alibi,
            "everything": everything,
            "positions": positions,
        }
        return scores.get(self.kind), masks.get(self.kind)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, docs: Tensor) -> Tensor:
        score_mod, mask_mod = self.mods(docs)
        if self.reference:
            return dense(q, k, v, score_mod, mask_mod, self.scale)[0]
        block_mask, length = None, q.shape[2]
        if mask_mod is not None:
            block_mask = create_block_mask(
                mask_mod, q.shape[0], None, length, length, device=q.device
            )
        return flex_attention(
            *(q, k, v),
            score_mod=score_mod,
            block_mask=block_mask,
            scale=self.scale,
            enable_gqa=self.groups != HEADS,
        )

    def forward(self, ids: Tensor, docs: Tensor) -> Tensor:
        x = self.embed(ids)
        rows, length, _ = x.shape
        for qkv, out in zip(self.qkv, self.out, strict=True):
            heads = qkv(x).view(rows, length, -1, SIZE).transpose(1, 2)
            q, k, v = heads.split([HEADS, self.groups, self.groups], 1)
            a = self.attend(q, k, v, docs)
            x = x + out(a.transpose(1, 2).reshape(rows, length, WIDTH))
        return x.square().mean()


def both(model: Net, length: int = 21, **options: Any) -> Any:
    """Trains ``model`` and its dense reference; returns (comparison, analyses)."""
    model = model.double()
    reference = copy.deepcopy(model)
    reference.reference = True
    ids = torch.randint(0, VOCAB, (2, length))
    docs = torch.randint(0, 4, (2, length)).sort(1).values
    fpdt_compile.optimize(model, **{"chunk_len": 8, "codegen": "eager", **options})
    comparison = compare_training(
        model, reference, {"ids": ids, "docs": docs}, loss_of=lambda loss: loss
    )
    return comparison, backend_of(model).analyses


@pytest.mark.parametrize(
    "kind",
    [
        "none",
        "causal",
        "scale",
        "documents",
        "window",
        "hidden_rows",
        "by_head",
        "prefix",
        "softcap",
        "table",
        "chained",
        "alibi",
        "everything",
        "positions",
    ],
)
def test_trains_in_chunks(kind: str) -> None:
    torch.manual_seed(0)
    comparison, (analysis,) = both(Net(kind, layers=1), strict=True)
    comparison.check(1e-9)
    assert len(analysis.attentions) == 1 and not analysis.mixers


def test_grouped_heads_layers_and_compiled_bodies() -> None:
    torch.manual_seed(0)
    comparison, (analysis,) = both(
        Net("everything", groups=GROUPS), strict=True, codegen="inductor"
    )
    comparison.check(1e-9)
    first, second = analysis.attentions
    assert first.k.meta["val"].shape[1] == GROUPS
    assert first.mask is not None and first.mask.is_bool


def test_no_pairs_are_materialized() -> None:
    """What is left of the block mask: nothing; two token axes only where tiles are made."""
    torch.manual_seed(0)
    _, (analysis,) = both(Net("everything", layers=1), strict=True)
    kinds = analysis.tokens.kinds
    wide = [
        n
        for n, axes in analysis.tokens.axes.items()
        if len(axes) > 1 and kinds[n].value not in ("mask", "score")
    ]
    assert not wide
    names = [str(n.target) for n in analysis.captured.module.graph.nodes]
    assert not any("argsort" in name or "pad" in name for name in names)


def test_one_compile_serves_other_lengths() -> None:
    torch.manual_seed(0)
    model = Net("documents", layers=1).double()
    reference = copy.deepcopy(model)
    reference.reference = True
    fpdt_compile.optimize(model, chunk_len=8, codegen="eager", strict=True)
    for length in (21, 9, 33):
        ids = torch.randint(0, VOCAB, (2, length))
        docs = torch.randint(0, 3, (2, length)).sort(1).values
        inputs = {"ids": ids, "docs": docs}
        compare_training(model, reference, inputs, loss_of=lambda x: x).check(1e-9)
    assert fpdt_compile.api.compile_stats(model).captures == 1


class BlockMaskGiven(Net):
    """The block mask is made by the caller, outside of what is compiled."""

    def forward(self, ids: Tensor, docs: Tensor, block_mask: Any) -> Tensor:
        x = self.embed(ids)
        heads = self.qkv[0](x).view(*x.shape[:2], -1, SIZE).transpose(1, 2)
        q, k, v = heads.split([HEADS, HEADS, HEADS], 1)
        if self.reference:
            a, _ = dense(q, k, v, None, self.mods(docs)[1], None)
        else:
            a = flex_attention(q, k, v, block_mask=block_mask)
        return self.out[0](a.transpose(1, 2).flatten(2)).square().mean()


def test_block_mask_from_outside() -> None:
    torch.manual_seed(0)
    model = BlockMaskGiven("documents", layers=1).double()
    reference = copy.deepcopy(model)
    reference.reference = True
    fpdt_compile.optimize(model, chunk_len=8, codegen="eager", strict=True)
    for length in (21, 33):
        ids = torch.randint(0, VOCAB, (2, length))
        docs = torch.randint(0, 3, (2, length)).sort(1).values
        mask_mod = model.mods(docs)[1]
        block_mask = create_block_mask(mask_mod, 2, None, length, length, device="cpu")
        inputs = {"ids": ids, "docs": docs, "block_mask": block_mask}
        compare_training(model, reference, inputs, loss_of=lambda x: x).check(1e-9)
    assert fpdt_compile.api.compile_stats(model).captures == 1


class WithAux(Net):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, docs: Tensor) -> Tensor:
        def causal(score, b, h, i, j):
            return torch.where(j <= i, score, -torch.inf)

        if self.reference:
            out, lse = dense(q, k, v, causal, None, None)
        else:
            aux = AuxRequest(lse=True)
            out, found = flex_attention(q, k, v, score_mod=causal, return_aux=aux)
            lse = found.lse
        return out * torch.sigmoid(lse)[..., None]


def test_logsumexp_is_exact_and_reported() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="has two token axes"):
        comparison, (analysis,) = both(WithAux("lse", layers=1))
    comparison.check(1e-9)


class NotPointwise(Net):
    def mods(self, docs: Tensor) -> tuple[Any, Any]:
        def reduced(score, b, h, q, k):
            return score - score.sum()

        def row_of_table(score, b, h, q, k):
            return score + (self.bias[h] * self.bias[0]).sum()

        return {"reduced": reduced, "row": row_of_table}[self.kind], None


@pytest.mark.parametrize("kind", ["reduced", "row"])
def test_what_is_no_pointwise_mod_is_an_error(kind: str) -> None:
    with pytest.raises(fpdt_compile.errors.CantChunk, match="mod"):
        model = fpdt_compile.optimize(NotPointwise(kind, layers=1), codegen="eager")
        ids = torch.randint(0, VOCAB, (2, 21))
        model(ids, ids)


def test_eager_checks_of_torch_are_back_after_a_call() -> None:
    both(Net("causal", layers=1), strict=True)
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(q, q, q)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("mistral_window", {}),
        ("gemma2", {"head_dim": 8, "attn_logit_softcapping": 3.0}),
    ],
)
def test_hugging_face(name: str, changes: dict[str, Any]) -> None:
    model, reference = pair(name, **changes)
    model.set_attn_implementation("flex_attention")
    reference.set_attn_implementation("eager")
    inputs = batch(2, 21)
    lengths = [torch.arange(8), torch.arange(13)]  # two documents a row
    inputs["position_ids"] = torch.cat(lengths)[None].expand(2, -1)
    fpdt_compile.optimize(model, chunk_len=8, codegen="eager", strict=True)
    compare_training(model, reference, inputs).check(2e-6)
    (analysis,) = backend_of(model).analyses
    assert len(analysis.attentions) == 2
