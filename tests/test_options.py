"""Options, explain and the report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tiny_models import batch, decoder, pair, plain_pair

import fpdt_compile

BAD = {
    "seq_parallel": [0, -1, 1.5, "two", True],
    "chunk_len": [0, -8, 2.0, "big", True],
    "head_len": [0, "x"],
    "offload": ["disk?", 3, None],
    "save": ["everything", None],
    "codegen": ["triton", ""],
    "outputs": ["some", None],
    "strict": ["yes", 1],
    "verify": [0, "no"],
    "token_dims": [1, {"ids": "one"}, [1], {1: 1}],
    "max_rewrites": [-1, "3"],
    "disable_passes": ["normalize"],
}


@pytest.mark.parametrize("name,value", [(n, v) for n, vs in BAD.items() for v in vs])
def test_bad_values_are_named(name, value):
    model, _ = plain_pair()
    with pytest.raises(ValueError, match="allowed") as error:
        fpdt_compile.optimize(model, **{name: value})
    assert f"{name}={value!r}" in str(error.value)


def test_unknown_option_is_named():
    model, _ = plain_pair()
    with pytest.raises(ValueError, match="chunk_length=4.*chunk_len"):
        fpdt_compile.optimize(model, chunk_length=4)
    with pytest.raises(ValueError, match="allowed is a torch.nn.Module"):
        fpdt_compile.optimize(lambda x: x)


def test_bad_backend_option():
    model, _ = plain_pair()
    compiled = torch.compile(model, backend="fpdt", options={"save": "nothing"})
    with pytest.raises(Exception, match="save='nothing'.*allowed"):
        compiled(batch(2, 9)["input_ids"])


def test_unknown_pass_name():
    model, _ = plain_pair()
    fpdt_compile.optimize(model, codegen="eager", disable_passes=("normalise",))
    with pytest.raises(Exception, match="disable_passes.*normalize"):
        model(batch(2, 9)["input_ids"])


def test_token_dims():
    model, reference = plain_pair()
    with pytest.raises(ValueError, match="'tokens' is not an input.*ids, labels"):
        fpdt_compile.optimize(model, token_dims={"tokens": 1})
    fpdt_compile.optimize(
        model, codegen="eager", chunk_len=8, token_dims={"ids": 1, "labels": 1}
    )
    inputs = batch(2, 21)
    loss = model(inputs["input_ids"], inputs["labels"])
    torch.testing.assert_close(loss, reference(inputs["input_ids"], inputs["labels"]))
    wrong, _ = plain_pair()
    fpdt_compile.optimize(wrong, codegen="eager", token_dims={"ids": 5})
    with pytest.raises(ValueError, match="ids=5.*2 dimensions"):
        wrong(inputs["input_ids"])


def test_seq_parallel_without_a_process_group():
    model, _ = plain_pair()
    with pytest.raises(ValueError, match="seq_parallel=2.*torchrun"):
        fpdt_compile.optimize(model, seq_parallel=2)


@pytest.mark.parametrize("chunk_len", [1, 2, 3, 64, 10**6])
def test_any_chunk_length(chunk_len):
    from fpdt_compile.testing import compare_training

    model, reference = plain_pair()
    fpdt_compile.optimize(
        model, codegen="eager", chunk_len=chunk_len, head_len=chunk_len
    )
    inputs = batch(2, 13)
    call = {"ids": inputs["input_ids"], "labels": inputs["labels"]}
    compare_training(model, reference, call, loss_of=lambda x: x).check(1e-9)


def test_default_lengths_are_picked():
    model, _ = plain_pair()
    fpdt_compile.optimize(model, codegen="eager")
    model(batch(2, 21)["input_ids"])
    plan = fpdt_compile.api.backend_of(model).analyses[0].plan
    assert plan.chunk_len >= 128 and 1 <= plan.head_len <= plan.chunk_len
    assert type(plan).from_json(plan.to_json()) == plan and len(plan.digest) == 16


def test_no_tensor_of_two_to_the_31_elements():
    from fpdt_compile.cost.memory import chunk_length, head_length

    for vocab in (32_000, 256_000, 4_000_000):
        for device in ("cpu", "cuda"):
            length = head_length(4 * vocab, vocab, device)
            assert length >= 1 and length * vocab < 2**31
    assert chunk_length(4 * 10**9, 10**9, "cpu") * 10**9 < 2**31


def test_explain_fits_a_screen_and_compiles_nothing():
    model = decoder("mistral_window", torch.float32)
    report = fpdt_compile.explain(model, **batch(2, 64))
    shown = str(report).splitlines()
    assert len(shown) <= 24 and max(map(len, shown)) <= 88
    assert report.attentions == report.attentions_chunked == 2
    assert report.feed_forwards == {"gated": 2} and report.blocks == 2
    assert report.seq_len == 64 and report.rejections == ()
    assert report.stored_bytes_after < report.stored_bytes_before
    assert "no effect on a CPU" in report.offload
    assert json.loads(report.to_json())["blocks"] == 2
    assert not any(p.grad is not None for p in model.parameters())
    assert model._compiled_call_impl is None


def test_explain_shows_rejections():
    model, _ = plain_pair()
    model.blocks[0].up.register_forward_hook(lambda m, a, out: out + out.cumsum(1))
    report = fpdt_compile.explain(model, batch(2, 16)["input_ids"])
    assert "cumsum" in str(report) and "test_options.py" in str(report)


def test_explain_of_an_optimized_model():
    model, _ = pair("llama")
    fpdt_compile.optimize(model, codegen="eager")
    assert fpdt_compile.explain(model, **batch(2, 16)).attentions == 2


def test_max_rewrites_and_disabled_passes_keep_the_numbers():
    from fpdt_compile.testing import compare_training

    for options in (
        {"max_rewrites": 0},
        {"max_rewrites": 5},
        {"disable_passes": ("fold_repeat_kv",)},
    ):
        model, reference = pair("llama")
        fpdt_compile.optimize(model, codegen="eager", chunk_len=8, **options)
        compare_training(model, reference, batch(2, 21)).check(2e-6)


def test_import_is_light():
    code = (
        "import sys, fpdt_compile; "
        "bad = [m for m in ('triton', 'transformers', 'matplotlib') if m in sys.modules]; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
