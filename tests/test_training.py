"""How people train: accumulation, repeated backward, no_grad, eval, scaling, failures mid-step."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, batch, decoder, pair, plain_pair

import fpdt_compile
from fpdt_compile.runtime.step import Step
from fpdt_compile.testing import compare_gradients, compare_training

EAGER = dict(codegen="eager", chunk_len=8, head_len=4)
EXACT = 1e-9


def plain_loss(output):
    return output


def plain_inputs(batch_size=2, length=21, seed=0):
    inputs = batch(batch_size, length, seed)
    return {"ids": inputs["input_ids"], "labels": inputs["labels"]}


def optimized_plain(**options):
    model, reference = plain_pair()
    fpdt_compile.optimize(model, **{**EAGER, **options})
    return model, reference


@pytest.mark.parametrize("save", ["attention", "hidden"])
def test_plain_transformer_is_exact(save):
    model, reference = optimized_plain(save=save, strict=True)
    for length in (1, 2, 3, 8, 9, 16, 17, 40, 61):
        inputs = plain_inputs(2, max(length, 2))
        compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)


def test_one_token():
    model, reference = pair("llama")
    fpdt_compile.optimize(model, **EAGER)
    for length in (1, 5, 1, 2):
        inputs = batch(2, length)
        with torch.no_grad():
            ours, theirs = model(inputs["input_ids"]), reference(inputs["input_ids"])
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_sizes(batch_size):
    model, reference = optimized_plain()
    inputs = plain_inputs(batch_size, 19)
    compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batch_size_equal_to_piece_lengths(size):
    model, reference = optimized_plain(chunk_len=size, head_len=size)
    inputs = plain_inputs(size, 17)
    compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)


def test_one_compile_serves_every_length():
    model, _ = optimized_plain()
    counts = []
    for length in (24, 33, 7, 100, 64):
        model(**plain_inputs(2, length)).backward()
        stats = fpdt_compile.compile_stats(model)
        counts.append((stats.captures, stats.bodies, stats.body_compiles))
    assert len(set(counts)) == 1 and counts[0][0] == 1


def test_bodies_do_not_grow_with_depth():
    counts = []
    for layers in (2, 6):
        model, _ = plain_pair(layers=layers)
        fpdt_compile.optimize(model, **EAGER)
        model(**plain_inputs()).backward()
        counts.append(fpdt_compile.compile_stats(model).bodies)
    assert counts[0] == counts[1]


def test_gradient_accumulation():
    model, reference = optimized_plain()
    for m in (model, reference):
        m.zero_grad(set_to_none=True)
        for seed in range(3):
            loss = m(**plain_inputs(2, 13 + seed, seed)) / 3
            loss.backward()
    compare_gradients(model, reference, loss.detach(), loss.detach()).check(EXACT)


def test_two_forwards_then_one_backward():
    model, reference = optimized_plain()
    losses = []
    for m in (model, reference):
        m.zero_grad(set_to_none=True)
        loss = m(**plain_inputs(2, 13, 1)) * 2 + m(**plain_inputs(2, 22, 2))
        loss.backward()
        losses.append(loss.detach())
    compare_gradients(model, reference, *losses).check(EXACT)


@pytest.mark.parametrize("save", ["attention", "hidden"])
def test_retain_graph(save):
    model, reference = optimized_plain(save=save)
    for m in (model, reference):
        m.zero_grad(set_to_none=True)
        loss = m(**plain_inputs())
        loss.backward(retain_graph=True)
        (loss * 0.5).backward(retain_graph=True)
        loss.backward()
    compare_gradients(model, reference, loss.detach(), loss.detach()).check(EXACT)
    with pytest.raises(RuntimeError, match="second time"):
        model_loss = model(**plain_inputs())
        model_loss.backward()
        model_loss.backward()


def test_scaled_loss_scales_every_gradient():
    model, reference = optimized_plain()
    scaled = lambda output: output * 0.37  # noqa: E731
    compare_training(model, reference, plain_inputs(), loss_of=scaled).check(EXACT)


def test_logits_as_output_and_loss_outside():
    model, reference = optimized_plain()
    inputs = plain_inputs()

    def outside(logits):
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        )

    compare_training(model, reference, {"ids": inputs["ids"]}, loss_of=outside).check(
        EXACT
    )


def test_outputs_auto_and_all():
    model, reference = pair("llama")
    fpdt_compile.optimize(model, **EAGER)
    inputs = batch(2, 21)
    output = model(**inputs)
    assert output.logits.shape == (2, 21, VOCAB)
    with pytest.raises(fpdt_compile.OutputNotMaterialized, match='outputs="all"'):
        output.logits.sum()
    with torch.no_grad():
        ours, theirs = model(**inputs), reference(**inputs)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
    everything = fpdt_compile.optimize(copy.deepcopy(reference), outputs="all", **EAGER)
    ours, theirs = everything(**inputs), reference(**inputs)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)

    def both(output):
        return output.loss + output.logits.square().mean()

    compare_training(everything, reference, inputs, loss_of=both).check(2e-6)


def test_hidden_states_output():
    model, reference = pair("llama")
    fpdt_compile.optimize(model, **EAGER)
    inputs = {**batch(2, 21), "output_hidden_states": True}

    def loss_of(output):
        return output.loss + sum(h.square().mean() for h in output.hidden_states)

    compare_training(model, reference, inputs, loss_of=loss_of).check(2e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    model, reference = optimized_plain()
    for m in (model, reference):
        m.eval()
    inputs = plain_inputs()
    with mode():
        ours, theirs = model(**inputs), reference(**inputs)
        logits, expected = model(ids=inputs["ids"]), reference(ids=inputs["ids"])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    model.train()
    reference.train()
    compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)


def test_input_embeddings_get_gradients():
    model, reference = pair("llama")
    fpdt_compile.optimize(model, strict=True, **EAGER)
    grads = []
    for m in (model, reference):
        torch.manual_seed(1)
        x = torch.randn(2, 21, 32, dtype=torch.float64, requires_grad=True)
        m(inputs_embeds=x, labels=batch(2, 21)["labels"]).loss.backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-9)


def test_double_backward_is_refused():
    model, _ = optimized_plain()
    loss = model(**plain_inputs())
    with pytest.raises(fpdt_compile.FpdtError, match="double backward"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_parameter_changed_between_forward_and_backward():
    model, _ = optimized_plain()
    loss = model(**plain_inputs())
    with torch.no_grad():
        model.blocks[0].out.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_partial_gradients():
    model, reference = optimized_plain()
    grads = []
    for m in (model, reference):
        loss = m(**plain_inputs())
        grads.append(
            torch.autograd.grad(loss, [m.blocks[1].up.weight, m.vocab_head.weight])
        )
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_ignored_labels():
    model, reference = optimized_plain()
    inputs = plain_inputs(2, 24)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][:, :9] = -100  # the first chunk has no target at all
    compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)
    with torch.no_grad():
        assert torch.isfinite(model(**inputs))
    inputs["labels"][:] = -100
    assert torch.isnan(model(**inputs)) and torch.isnan(reference(**inputs))


def test_extreme_logits_stay_finite():
    model, reference = plain_pair()
    for m in (model, reference):
        with torch.no_grad():
            m.vocab_head.weight.mul_(1e5)
    fpdt_compile.optimize(model, **EAGER)
    compare_training(model, reference, plain_inputs(), loss_of=plain_loss).check(EXACT)


def test_num_items_in_batch_and_shift_labels():
    model, reference = pair("llama")
    fpdt_compile.optimize(model, **EAGER)
    inputs = batch(2, 21)
    for extra in (
        {"num_items_in_batch": torch.tensor(17)},
        {"shift_labels": inputs["labels"].roll(-1, 1)},
    ):
        compare_training(model, reference, {**inputs, **extra}).check(2e-6)


def test_one_gradient_per_parameter_and_backward():
    model, _ = optimized_plain()
    calls: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: calls.__setitem__(name, calls.get(name, 0) + 1)
        )
    model(**plain_inputs()).backward()
    assert set(calls.values()) == {1} and len(calls) == len(list(model.parameters()))


def test_state_dict_save_copy_pickle(tmp_path):
    model, reference = pair("llama")
    fpdt_compile.optimize(model, **EAGER)
    inputs = batch(2, 21)
    model(**inputs).loss.backward()
    assert list(model.state_dict()) == list(reference.state_dict())
    assert type(model) is type(reference)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, reference.state_dict()[key])
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        compare_training(clone, reference, inputs).check(2e-6)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)


def test_hooks_still_run():
    model, _ = optimized_plain()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(**plain_inputs()).backward()
    assert seen == [torch.Size([])]


def test_error_in_the_middle_of_a_step(monkeypatch):
    model, reference = optimized_plain()
    inputs = plain_inputs(2, 40)
    compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)
    steps: list[weakref.ref[Step]] = []
    original = Step.put

    def failing(self, name, chunk, value):
        if not any(ref() is self for ref in steps):
            steps.append(weakref.ref(self))
        if chunk == 3:
            raise RuntimeError("out of memory, say")
        original(self, name, chunk, value)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "put", failing)
        with pytest.raises(RuntimeError, match="out of memory, say"):
            model(**inputs)
    gc.collect()
    assert steps and all(ref() is None for ref in steps)
    compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)


def test_error_in_backward(monkeypatch):
    model, reference = optimized_plain()
    inputs = plain_inputs(2, 40)
    loss = model(**inputs)
    from fpdt_compile.runtime import executor

    with monkeypatch.context() as patch:
        patch.setattr(
            executor, "hand_out", lambda *a: (_ for _ in ()).throw(OSError("no"))
        )
        with pytest.raises(OSError):
            loss.backward()
    compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)


def test_two_models_share_nothing():
    (a, ra), (b, rb) = optimized_plain(), optimized_plain(save="hidden", chunk_len=5)
    for m, r in ((a, ra), (b, rb), (a, ra)):
        compare_training(m, r, plain_inputs(), loss_of=plain_loss).check(EXACT)
    assert fpdt_compile.compile_stats(a) is not fpdt_compile.compile_stats(b)


def test_backend_entry_point():
    model, reference = plain_pair()
    compiled = torch.compile(
        model, backend="fpdt", dynamic=True, options=dict(codegen="eager", chunk_len=8)
    )
    for size, length in ((2, 21), (3, 34), (2, 50)):
        inputs = plain_inputs(size, length)
        for m in (model, reference):
            m.zero_grad(set_to_none=True)
        ours, theirs = compiled(**inputs), reference(**inputs)
        ours.backward()
        theirs.backward()
        compare_gradients(model, reference, ours.detach(), theirs.detach()).check(EXACT)


def test_varying_batch_size():
    model, reference = optimized_plain()
    for size, length in ((2, 21), (3, 34), (5, 12), (4, 12)):
        inputs = plain_inputs(size, length)
        compare_training(model, reference, inputs, loss_of=plain_loss).check(EXACT)


def test_bfloat16_weight_gradients_accumulate_in_fp32():
    """The error against float32 must not grow with the number of chunks."""
    errors = []
    reference = decoder("llama", torch.float32)
    half = copy.deepcopy(reference).to(torch.bfloat16)
    reference.load_state_dict({k: v.float() for k, v in half.state_dict().items()})
    inputs = batch(1, 256)
    reference(**inputs).loss.backward()
    for chunk_len in (256, 4):
        model = copy.deepcopy(half)
        fpdt_compile.optimize(
            model, codegen="eager", chunk_len=chunk_len, head_len=chunk_len
        )
        model(**inputs).loss.backward()
        pairs = zip(model.parameters(), reference.parameters())
        errors.append(
            max(
                ((p.grad.float() - q.grad).norm() / q.grad.norm()).item()
                for p, q in pairs
            )
        )
    assert errors[1] < 1.5 * errors[0] + 1e-3


def test_verify_option():
    model, reference = optimized_plain(verify=True)
    compare_training(model, reference, plain_inputs(), loss_of=plain_loss).check(EXACT)
