"""Models that offload to disk, and steps of them."""

from __future__ import annotations

from fpdt_compile.testing import compare_gradients

EAGER = dict(codegen="eager", chunk_len=8, head_len=4, strict=True)
DISK = dict(offload="disk", **EAGER)


def train(model, inputs):
    model.zero_grad(set_to_none=True)
    loss = model(inputs["input_ids"], inputs["labels"])
    loss.backward()
    return loss.detach()


def check_equal(model, reference, inputs, tolerance=1e-9):
    expected = train(reference, inputs)
    compare_gradients(model, reference, train(model, inputs), expected).check(tolerance)
