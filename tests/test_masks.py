"""Mask graphs: tiles equal the dense mask, and the table never claims what is not so.

Masks come from Hugging Face models captured by Dynamo, and from plain functions traced with a
symbolic length. Random masks are in ``test_masks_random.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fpdt_compile.passes.analyze_masks import find_mask_graph
from mask_cases import (
    MIN,
    C,
    E,
    F,
    P,
    axes_of,
    capture_hf,
    case_of,
    causal,
    check,
    check_tight,
    cuts,
    dynamo_mask,
    every,
    kinds,
    make_case,
    trace,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fpdt_compile.errors import CantChunk
from fpdt_compile.runtime.masks import MaskEvaluator

# Hugging Face


def padding(size: int, left: bool) -> Tensor:
    flags = torch.ones(2, size, dtype=torch.int64)
    flags[0, :9] = 0
    flags[1, :2] = 0
    return flags if left else flags.flip(1)


PACKED = torch.cat([torch.arange(n) for n in (11, 5, 14)])[None].repeat(2, 1)
IDS = torch.arange(60).reshape(2, 30) % 96 + 1
HF_CASES = {
    "plain": {},
    "left padding": {"attention_mask": padding(30, left=True)},
    "right padding": {"attention_mask": padding(30, left=False)},
    "packed": {"position_ids": PACKED},
}


@pytest.mark.parametrize("inputs", HF_CASES)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 4}),
        (
            "gemma3_text",
            {"sliding_window": 4, "layer_types": ["sliding_attention"]},
        ),
    ],
)
def test_hugging_face(name: str, config: dict[str, Any], inputs: str) -> None:
    case = capture_hf(
        name, {"input_ids": IDS.clone()} | dict(HF_CASES[inputs]), **config
    )
    assert case.mask.is_bool and case.dense.shape[-2:] == (30, 30)
    for bounds in (cuts(30, 7, 8, 20), every(30, 6), [(0, 30)], every(30, 1)):
        check(case, bounds, bounds)
    check(case, cuts(30, 11), cuts(30, 3, 17))
    if inputs in ("plain", "packed"):
        check_tight(case, cuts(30, 7, 8, 20))
    if (name, inputs) == ("llama", "plain"):
        assert kinds(case, cuts(30, 7, 20)) == [[C, E, E], [F, C, E], [F, F, C]]


# Plain functions


def test_packed_documents_are_causal_to_the_scheduler() -> None:
    """A later tile is EMPTY even where positions start again inside the chunks."""
    lengths = (500, 37, 300, 187)
    positions = torch.cat([torch.arange(n) for n in lengths])
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))

    def fn(p: Tensor, d: Tensor) -> Tensor:
        return (p[None, :] <= p[:, None]) & (d[None, :] == d[:, None])

    case = case_of(fn, positions, documents)
    check(case, every(1024, 128), every(1024, 128))
    check_tight(case, every(1024, 128))
    table = kinds(case, every(1024, 128))
    assert all(table[i][j] is E for i in range(8) for j in range(i + 1, 8))


def test_window_and_prefix_are_tight() -> None:
    p = torch.arange(100)
    for window in (1, 5, 16, 40):

        def near(p: Tensor, window: int) -> Tensor:
            return causal(p) & (p[:, None] - p[None, :] < window)

        case = case_of(functools.partial(near, window=window), p)
        check(case, every(100, 16), every(100, 16))
        check_tight(case, every(100, 16))
    both_ways = case_of(lambda p: (p[:, None] - p[None, :]).abs() < 20, p)
    check(both_ways, every(100, 16), every(100, 16))
    check_tight(both_ways, every(100, 16))
    prefix = case_of(lambda p: causal(p) | (p[None, :] < 32), p)
    assert kinds(prefix, every(100, 25))[0][:2] == [F, P]
    check(prefix, every(100, 16), every(100, 16))


def test_large_causal_tile_is_proved_in_pieces() -> None:
    case = case_of(causal, torch.arange(1100))
    assert kinds(case, [(0, 1100)]) == [[C]]
    assert kinds(case, [(0, 300), (300, 1100)]) == [[C, E], [F, C]]
    almost = torch.arange(1100)
    almost[900] = 1
    case = case_of(causal, almost)
    check(case, [(0, 1100)], [(0, 1100)])
    assert kinds(case, [(0, 1100)]) == [[P]]


@pytest.mark.parametrize("diagonal", [0, -1, 1, 4])
@pytest.mark.parametrize("name", ["tril", "triu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_triangles(name: str, diagonal: int, transposed: bool) -> None:
    def fn(p: Tensor) -> Tensor:
        s = p.shape[0]
        x = getattr(torch.ones(s, s, dtype=torch.bool), name)(diagonal)
        return (x.t() if transposed else x)[None, None].expand(2, 1, s, s)

    case = case_of(fn, torch.arange(23))
    assert not case.mask.leaves
    check(case, cuts(23, 4, 5, 14), cuts(23, 4, 5, 14))
    check(case, cuts(23, 9), cuts(23, 4, 5, 14))
    check_tight(case, cuts(23, 4, 5, 14))


@pytest.mark.parametrize("hidden", [-torch.inf, MIN])
def test_additive(hidden: float) -> None:
    def fn(p: Tensor) -> Tensor:
        s = p.shape[0]
        return torch.triu(torch.full((s, s), hidden), diagonal=1)[None, None]

    case = case_of(fn, torch.arange(24))
    assert not case.mask.is_bool
    assert kinds(case, every(24, 8)) == [[C, E, E], [F, C, E], [F, F, C]]
    check(case, cuts(24, 5, 6), cuts(24, 5, 6))


def masked_rows(hidden: float) -> Callable[[Tensor, Tensor], Tensor]:
    def fn(p: Tensor, keep: Tensor) -> Tensor:
        allowed = causal(p)[None] & keep[:, None, :]
        return torch.zeros((), dtype=torch.float32).masked_fill(~allowed, hidden)[
            :, None
        ]

    return fn


def test_finite_mask_with_fully_masked_rows_is_not_skipped() -> None:
    """Rows 0..5 of batch 0 see no key: they attend to all keys, later ones too."""
    keep = torch.ones(2, 24, dtype=torch.bool)
    keep[0, :6] = False
    p = torch.arange(24)
    finite = case_of(masked_rows(MIN), p, keep)
    assert kinds(finite, every(24, 8)) == [[P, P, P], [P, C, E], [P, F, C]]
    check(finite, every(24, 8), every(24, 8))
    infinite = case_of(masked_rows(-torch.inf), p, keep)
    assert kinds(infinite, every(24, 8)) == [[P, E, E], [P, C, E], [P, F, C]]
    check(infinite, every(24, 8), every(24, 8))
    keep[0, 0] = True  # every row sees key 0 now
    seen = case_of(masked_rows(MIN), p, keep)
    assert kinds(seen, every(24, 8))[0] == [P, E, E]


def test_finite_mask_with_a_whole_chunk_masked() -> None:
    keep = torch.ones(1, 24, dtype=torch.bool)
    keep[0, :9] = False
    case = case_of(masked_rows(MIN), torch.arange(24), keep)
    table = kinds(case, every(24, 8))
    assert table[0] == [P, P, P] and table[1] == [P, P, P] and table[2] == [E, P, C]
    check(case, every(24, 8), every(24, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_additive_dtypes(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).min
    case = case_of(
        lambda p: torch.where(
            causal(p), torch.zeros((), dtype=dtype), torch.full((), least, dtype=dtype)
        ),
        torch.arange(16),
    )
    assert kinds(case, every(16, 8)) == [[C, E], [F, C]]
    bias = case.evaluator.bias((0, 8), (8, 16), torch.float16)
    assert bias.isfinite().all() and bias.dtype is torch.float16


def test_bias_of_a_bool_mask() -> None:
    case = case_of(causal, torch.arange(16))
    bias = case.evaluator.bias((0, 8), (4, 10), torch.float64)
    want = torch.where(case.dense[:8, 4:10], 0.0, -torch.inf).double()
    assert torch.equal(bias, want)


def test_users_buffer() -> None:
    torch.manual_seed(0)
    p, buffer = torch.arange(30), torch.rand(1, 1, 30, 30) > 0.5
    buffer[..., :10, 10:20] = False
    buffer[..., 20:, :10] = True
    buffer[..., 10:20, 10:20] = torch.ones(10, 10).tril() > 0
    case = case_of(lambda p, b: b & (p[None, :] >= 0), p, buffer)
    table = kinds(case, every(30, 10))
    assert (table[0][1], table[2][0], table[1][1]) == (E, F, C)
    check(case, every(30, 10), every(30, 10))
    check(case, cuts(30, 13), cuts(30, 3, 4))
    swapped = case_of(lambda p, b: b.mT | (p[None, :] < 0), p, buffer)
    check(swapped, every(30, 10), every(30, 10))
    floats = case_of(lambda p, b: b * (p[None, :] >= 0), p, torch.randn(30, 30))
    check(floats, every(30, 10), every(30, 10))


def test_causal_buffer_is_looked_at_everywhere() -> None:
    """Pieces off the diagonal that no bound decides are looked at too."""
    p, buffer = torch.arange(600), torch.ones(600, 600, dtype=torch.bool).tril()
    for i, j in ((590, 5), (5, 590), (300, 40), (300, 301)):
        changed = buffer.clone()
        changed[i, j] = ~changed[i, j]
        case = case_of(lambda p, b: b & (p[None, :] >= 0), p, changed)
        assert kinds(case, [(0, 600)]) == [[P]]
    case = case_of(lambda p, b: b & (p[None, :] >= 0), p, buffer)
    assert kinds(case, [(0, 600)]) == [[C]]


def test_slice_of_a_long_buffer() -> None:
    """GPT-2's way: a [1, 1, max, max] buffer cut to the length is read in place."""
    buffer = torch.ones(1, 1, 64, 64).tril().bool()

    def fn(p: Tensor) -> Tensor:
        s = p.shape[0]
        return buffer[:, :, :s, :s] & (p[None, :] >= 0)

    module, mask, symbol, real = dynamo_mask(fn, torch.arange(24))
    case = make_case(module, mask, symbol, real, 24)
    assert kinds(case, every(24, 8)) == [[C, E, E], [F, C, E], [F, F, C]]
    check(case, cuts(24, 5, 6), cuts(24, 5, 6))


def test_same_vector_in_both_roles_through_a_transpose() -> None:
    def fn(p: Tensor) -> Tensor:
        s = p.shape[0]
        x = p.expand(s, s)
        return (x <= x.transpose(0, 1)).view(1, 1, s, s)

    case = case_of(fn, torch.arange(20))
    assert kinds(case, every(20, 10)) == [[C, E], [F, C]]
    check(case, cuts(20, 3), cuts(20, 11))


def test_length_in_the_arithmetic() -> None:
    case = case_of(
        lambda p: p[None, :] >= p.shape[0] - 1 - p[:, None], torch.arange(20)
    )
    check(case, cuts(20, 3), cuts(20, 11))
    graph, values = (
        case.mask,
        {leaf.name: torch.arange(20) for leaf in case.mask.leaves},
    )
    if any(n.op == "get_attr" for n in graph.module.graph.nodes):
        with pytest.raises(ValueError, match="symbols has no value"):
            MaskEvaluator(graph, values, 20, 20, {})


def test_padding_only_mask_has_one_axis() -> None:
    keep = torch.arange(20) < 13
    case = case_of(lambda k: k.to(torch.int64).bool()[None, None, None, :], keep)
    assert kinds(case, cuts(20, 13)) == [[F, E], [F, E]]
    check(case, cuts(20, 3), cuts(20, 11))


# Refusals


def refusal(fn: Callable[..., Tensor], *inputs: Tensor) -> CantChunk:
    module, mask, symbol = trace(fn, *inputs)
    with pytest.raises(CantChunk) as caught:
        find_mask_graph(mask, axes_of(module, symbol))
    return caught.value


def test_refusals_name_the_operator_and_the_line() -> None:
    def fn(p: Tensor) -> Tensor:
        return causal(p).cumsum(-1) > 3

    module, mask, symbol, _ = dynamo_mask(fn, torch.arange(12))
    with pytest.raises(CantChunk) as caught:
        find_mask_graph(mask, axes_of(module, symbol))
    refused = caught.value.rejection
    assert refused.op == "aten.cumsum.default"
    assert refused.source == f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    assert "tiles" in refused.reason and refused.change


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda p: causal(p) & causal(p).any(-1, keepdim=True), "aten.any.dim"),
        (lambda p: torch.bernoulli(causal(p).float()), "aten.bernoulli.default"),
        (lambda p: causal(p)[:, 1:].logical_not(), "aten.slice.Tensor"),
        (lambda p: causal(p).flip(0), "aten.flip.default"),
        (lambda p: causal(p).float().masked_fill_(p > 3, 1.0), "aten.masked_fill_"),
        (lambda p: causal(p)[None].repeat(1, 2, 1), "aten.repeat.default"),
        (lambda p: causal(p).to(torch.int32), "aten.to.dtype"),
    ],
)
def test_refused_operators(fn: Callable[[Tensor], Tensor], op: str) -> None:
    assert refusal(fn, torch.arange(12)).rejection.op.startswith(op)


def test_view_changed_in_place_is_refused() -> None:
    def fn(p: Tensor) -> Tensor:
        mask = causal(p).clone()
        mask[:, :2].fill_(True)
        return mask.logical_not()

    assert "in place" in refusal(fn, torch.arange(12)).rejection.reason


def test_token_axes_elsewhere_are_refused() -> None:
    assert "last two" in str(refusal(lambda p: causal(p)[..., None], torch.arange(12)))


def test_bad_ranges_and_leaves() -> None:
    case = case_of(causal, torch.arange(12))
    for bounds in ((3, 3), (0, 13), (-1, 4)):
        with pytest.raises(ValueError, match="range"):
            case.evaluator.tile(bounds, (0, 4))
    with pytest.raises(ValueError, match="give every leaf"):
        MaskEvaluator(case.mask, {}, 12, 12, {})
    wrong = {leaf.name: torch.zeros(1, 1) for leaf in case.mask.leaves}
    with pytest.raises(ValueError, match="must be 12"):
        MaskEvaluator(case.mask, wrong, 12, 12, {})


# Memory


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().size())
        return result


@pytest.mark.parametrize("hidden", [None, MIN])
def test_table_makes_no_dense_mask(hidden: float | None) -> None:
    size = 2048
    positions = torch.cat([torch.arange(1000), torch.arange(1048)])
    documents = (torch.arange(size) >= 1000).long()

    def fn(p: Tensor, d: Tensor) -> Tensor:
        mask = causal(p) & (d[None, :] == d[:, None])
        return mask if hidden is None else torch.where(mask, 0.0, hidden)

    case = case_of(fn, positions, documents)
    with LargestTensor() as largest:
        case.evaluator.table(every(size, 256), every(size, 256))
    assert largest.numel <= 256 * 256 * 8  # bytes, of int64 pieces
    check(case, every(size, 256), every(size, 256))
