"""hypothesis: a plain transformer of any shape, chunked in any way, gives the same numbers."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, plain_pair

import fpdt_compile
from fpdt_compile.testing import compare_training


@settings(max_examples=8)
@given(
    batch_size=st.integers(1, 3),
    lengths=st.lists(st.integers(5, 70), min_size=1, max_size=3),
    groups=st.integers(1, 3),
    ratio=st.integers(1, 3),
    size=st.sampled_from([4, 8, 16]),
    layers=st.integers(1, 3),
    chunk_len=st.integers(1, 40),
    head_len=st.integers(1, 40),
    save=st.sampled_from(["attention", "hidden"]),
)
def test_any_shape(
    batch_size, lengths, groups, ratio, size, layers, chunk_len, head_len, save
):
    torch._dynamo.reset()
    heads = groups * ratio
    model, reference = plain_pair(
        width=heads * size, heads=heads, groups=groups, layers=layers
    )
    fpdt_compile.optimize(
        model,
        codegen="eager",
        chunk_len=chunk_len,
        head_len=head_len,
        save=save,
        strict=True,
    )
    for seed, length in enumerate(lengths):
        torch.manual_seed(seed)
        ids = torch.randint(0, VOCAB, (batch_size, length))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
        labels[:, -1] = ids[:, -1]
        compare_training(
            model, reference, {"ids": ids, "labels": labels}, loss_of=lambda x: x
        ).check(1e-9)
