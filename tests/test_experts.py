"""Mixtures of experts: routing is tokenwise as a whole where that is proved, and only there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from tiny_models import PlainTransformer, batch, pair
from torch import Tensor, nn

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

OPTIONS = dict(codegen="eager", chunk_len=8, head_len=4)
SIZES = dict(
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
)
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    head_dim=4,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
ARCHITECTURES = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": dict(head_dim=8),
    "olmoe": {},
    "granitemoe": {},
    "gpt_oss": dict(head_dim=8),
    "llama4_text": dict(head_dim=8, attention_chunk_size=6, intermediate_size_mlp=48),
    "deepseek_v3": LATENT,
}
CASTS = 2e-6  # transformers computes routers, norms and losses in float32


def expert_pair(name: str, **changes: object):
    """(model to optimize, untouched copy); torch's grouped product takes no float64, so the
    copy looks its matrices up per row."""
    model, reference = pair(name, **{**SIZES, **ARCHITECTURES[name], **changes})
    reference.config._experts_implementation = "batched_mm"
    return model, reference


def facts(model: nn.Module):
    (analysis,) = backend_of(model).analyses
    return analysis


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llama4_text", "deepseek_v3"])
def test_experts_run_in_chunks(name: str) -> None:
    model, reference = expert_pair(name)
    fpdt_compile.optimize(model, strict=True, **OPTIONS)
    for length in (27, 18):
        compare_training(model, reference, batch(2, length)).check(CASTS)
    found = facts(model)
    assert not found.rejections and len(found.cut.blocks) == 2
    labels = [f.kind for f in found.feed_forwards]
    dense_first = name == "deepseek_v3"
    assert labels.count("experts") == 2 - dense_first


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_every_way_to_run_experts(implementation: str) -> None:
    model, reference = expert_pair("mixtral")
    model.config._experts_implementation = implementation
    fpdt_compile.optimize(model, strict=True, **OPTIONS)
    compare_training(model, reference, batch(3, 27)).check(CASTS)


def test_experts_compiled_by_inductor() -> None:
    model, reference = expert_pair("mixtral")
    fpdt_compile.optimize(model, strict=True, chunk_len=8, head_len=4)
    compare_training(model, reference, batch(2, 27)).check(CASTS)


@pytest.mark.parametrize(
    "name, padded", [("mixtral", True), ("qwen3_moe", False), ("gpt_oss", True)]
)
def test_load_balancing_loss_is_chunked(name: str, padded: bool) -> None:
    """Means over all tokens, of tokens per expert and of router probabilities."""
    changes = dict(output_router_logits=True, router_aux_loss_coef=0.3)
    model, reference = expert_pair(name, **changes)
    fpdt_compile.optimize(model, strict=True, **OPTIONS)
    inputs = batch(2, 27)
    if padded:
        mask = torch.ones(2, 27, dtype=torch.long)
        mask[0, 20:] = mask[1, :5] = 0
        inputs["attention_mask"] = mask
    compare_training(model, reference, inputs).check(CASTS)
    assert facts(model).cut.head.vocab_size == 97


def test_router_logits_of_a_step_have_gradients() -> None:
    """A z-loss of the router, made outside of the model from what it returns."""
    changes = dict(output_router_logits=True, router_aux_loss_coef=0.3)
    model, reference = expert_pair("mixtral", **changes)
    fpdt_compile.optimize(model, strict=True, **OPTIONS)

    def with_router_loss(output: object) -> Tensor:
        scores = [s.logsumexp(-1).pow(2).mean() for s in output.router_logits]
        return 0.5 * output.loss + 0.01 * sum(scores)

    inputs = batch(2, 27)
    check = compare_training(model, reference, inputs, loss_of=with_router_loss)
    check.check(CASTS)
    only = compare_training(
        model,
        reference,
        inputs,
        loss_of=lambda out: out.router_logits[1].square().sum(),
    )
    only.check(CASTS)


class Experts(nn.Module):
    """A mixture of experts in plain torch; subclasses spell ``dispatch`` differently."""

    top_k, count = 2, 4

    def __init__(self, width: int = 32, hidden: int = 24) -> None:
        super().__init__()
        self.router = nn.Linear(width, self.count, bias=False)
        self.up = nn.Parameter(0.2 * torch.randn(self.count, width, hidden))
        self.down = nn.Parameter(0.2 * torch.randn(self.count, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(rows).softmax(-1).topk(self.top_k, dim=-1)
        return self.dispatch(rows, weights, ids).view_as(x)

    def grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        grouped = torch.ops.transformers.grouped_mm_fallback
        return grouped(F.silu(grouped(rows, self.up, ends)), self.down, ends)

    def ends(self, ids: Tensor) -> Tensor:
        counts = torch.histc(ids.flatten().float(), self.count, 0, self.count - 1)
        return counts.cumsum(0, dtype=torch.int32)

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class AddedBack(Experts):
    """Sorted by ``argsort``, and summed into the tokens by ``index_add``."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        token = order // self.top_k
        out = self.grouped(rows[token], self.ends(ids))
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token, out)


class Scattered(Experts):
    """Counts by ``one_hot``, token numbers counted, put back by ``scatter_add``."""

    def ends(self, ids: Tensor) -> Tensor:
        counts = F.one_hot(ids.flatten(), self.count).sum(0)
        return counts.cumsum(0).to(torch.int32)

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort()
        tokens = torch.arange(rows.shape[0]).repeat_interleave(self.top_k)[order]
        out = self.grouped(rows.index_select(0, tokens), self.ends(ids))
        out = out * weights.flatten()[order, None]
        result = torch.zeros(rows.shape, dtype=rows.dtype)
        return result.scatter_add(0, tokens[:, None].expand(-1, rows.shape[1]), out)


class PutBack(Experts):
    """Rows are written back by the permutation itself, then summed over the slots."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        _, order = ids.flatten().sort()
        out = self.grouped(rows[order // self.top_k], self.ends(ids))
        back = torch.empty_like(out)
        back[order] = out
        back = back.view(-1, self.top_k, rows.shape[1])
        return (back * weights.unsqueeze(-1)).sum(1)


class Dense(Experts):
    """Every expert for every token, weighted by the router."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        gates = torch.zeros(rows.shape[0], self.count, dtype=rows.dtype)
        gates = gates.scatter(1, ids, weights)
        out = torch.einsum("td,edh->teh", rows, self.up).relu()
        return torch.einsum("teh,ehd,te->td", out, self.down, gates)


class Capacity(AddedBack):
    """Drops what comes after the first ``capacity`` rows of an expert, in sequence order."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen = F.one_hot(ids.flatten(), self.count)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(ids)
        weights = weights * (place <= 5)
        return super().dispatch(rows, weights, ids)


class SortedCapacity(Experts):
    """The same, with ranks taken from the sorted order."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        ends = self.ends(ids)
        starts = F.pad(ends, (1, 0))[:-1]
        rank = torch.arange(order.shape[0]) - starts[ids.flatten()[order]]
        token = order // self.top_k
        out = self.grouped(rows[token], ends) * (rank < 5).unsqueeze(-1)
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token, out)


class ExpertChoice(Experts):
    """Every expert takes its best tokens."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        scores, token = self.router(rows).softmax(-1).t().topk(4, dim=-1)
        hidden = torch.einsum("etd,edh->eth", rows[token], self.up).relu()
        out = torch.einsum("eth,ehd->etd", hidden, self.down) * scores.unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token.flatten(), out.flatten(0, 1))


class Neighbours(Experts):
    """Mixes rows that are neighbours after the sort."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        token = order // self.top_k
        sorted_rows = rows[token]
        out = self.grouped(sorted_rows + 0.1 * sorted_rows.roll(1, 0), self.ends(ids))
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token, out)


class OrderAsValue(Experts):
    """Computes with row numbers: a chunk would count from its own start."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        token = order // self.top_k
        out = self.grouped(rows[token], self.ends(ids))
        out = out * (weights.flatten()[order] * (token % 3)).unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token, out)


class OtherGroups(Experts):
    """Groups that end where other rows' experts end: row j may get another expert's matrix."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        token = order // self.top_k
        out = self.grouped(rows[token], self.ends((ids + 1) % self.count))
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token, out)


class Descending(Experts):
    """Sorted the other way round, with groups in ascending order."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True, descending=True)
        token = order // self.top_k
        out = self.grouped(rows[token], self.ends(ids))
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token, out)


class WrongDivisor(Experts):
    """Row numbers over something else than the slots: rows of other tokens."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        out = self.grouped(rows[order // (self.top_k + 1)], self.ends(ids))
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, order // self.top_k, out)


class MaybeNegative(Experts):
    """Expert numbers that are not known to start at 0: such rows would shift every group."""

    def dispatch(self, rows: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        ids = torch.where(weights > 0.4, ids, ids - 1)
        order = ids.flatten().argsort(stable=True)
        token = order // self.top_k
        out = self.grouped(rows[token], self.ends(ids))
        out = out * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token, out)


class Model(PlainTransformer):
    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts() for _ in self.blocks)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x)
            x = x + experts(x)
        logits = self.vocab_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def plain_experts(experts: type[Experts], **options: object):
    torch.manual_seed(0)
    reference = Model(experts).double().train()
    model = copy.deepcopy(reference)
    return fpdt_compile.optimize(model, **{**OPTIONS, **options}), reference


def compare(model: nn.Module, reference: nn.Module, length: int):
    inputs = batch(2, length)
    return compare_training(
        model,
        reference,
        {"ids": inputs["input_ids"], "labels": inputs["labels"]},
        loss_of=lambda loss: loss,
    )


@pytest.mark.parametrize("experts", [AddedBack, Scattered, PutBack, Dense])
def test_spellings_that_are_proved(experts: type[Experts]) -> None:
    model, reference = plain_experts(experts, strict=True, verify=True)
    for length in (27, 18):
        compare(model, reference, length).check(1e-9)
    assert len(facts(model).cut.blocks) == 2


NEAR_MISSES = [
    Capacity,
    SortedCapacity,
    ExpertChoice,
    Neighbours,
    OrderAsValue,
    OtherGroups,
    Descending,
    WrongDivisor,
    MaybeNegative,
]


@pytest.mark.parametrize("experts", NEAR_MISSES)
def test_near_misses_run_whole_and_exact(experts: type[Experts]) -> None:
    """Routing that depends on other tokens is not cut; attention around it still is."""
    model, reference = plain_experts(experts)
    with pytest.warns(UserWarning, match="runs? whole"):
        compare(model, reference, 27).check(1e-9)
    found = facts(model)
    assert found.rejections and len(found.attentions) == 2
    swallowed = {n for mixer in found.mixers for n in mixer.nodes}
    sorts = [n for n in found.tokens.kinds if "sort" in str(n.target)]
    assert all(n in swallowed for n in sorts)
    assert not found.tokens.local


def test_a_report_names_why_routing_runs_whole() -> None:
    model, _ = plain_experts(Neighbours)
    inputs = batch(2, 27)
    report = fpdt_compile.explain(
        model, ids=inputs["input_ids"], labels=inputs["labels"]
    )
    reasons = " ".join(r["reason"] for r in report.rejections)
    assert "roll" in reasons and "sort" in reasons


def test_explain_labels_experts_and_shared_experts() -> None:
    model, _ = expert_pair("qwen2_moe", shared_expert_intermediate_size=48)
    report = fpdt_compile.explain(model, **batch(2, 27))
    assert report.feed_forwards == {"experts": 2, "gated": 2}


def test_frozen_experts_and_rows_no_expert_gets() -> None:
    """An expert without rows in a chunk (or at all) has a gradient of zeros, as in eager."""
    model, reference = plain_experts(AddedBack, strict=True)
    for which in (model, reference):
        with torch.no_grad():
            which.experts[0].router.weight[3] = -100 * torch.ones(32).double()
        which.experts[1].up.requires_grad_(False)
    compare(model, reference, 27).check(1e-9)
    assert model.experts[1].up.grad is None
