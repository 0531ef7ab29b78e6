"""What stands in for an output that was not materialized: all that a wrapper does to it works."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils.operations import convert_outputs_to_fp32
from tiny_models import VOCAB, batch, pair
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

import fpdt_compile
from fpdt_compile.runtime.outputs import UnmaterializedOutput, unmaterialized

EAGER = dict(codegen="eager", chunk_len=8, head_len=4, strict=True)
CPU = torch.device("cpu")


def logits(requires_grad: bool = True) -> UnmaterializedOutput:
    return unmaterialized((2, 5, 7), torch.bfloat16, CPU, requires_grad)


def test_it_describes_itself_as_the_real_tensor_does():
    real = torch.ones(2, 5, 7, dtype=torch.bfloat16, requires_grad=True).clone()
    x = logits()
    for ask in (
        lambda t: (t.shape, t.dtype, t.device, t.layout, t.stride(), t.numel(), len(t)),
        lambda t: (t.requires_grad, t.is_leaf, t.grad_fn is None, t.ndim, t.nbytes),
        lambda t: (t.is_contiguous(), t.is_floating_point(), t.is_cuda, t.size(1)),
    ):
        assert ask(x) == ask(real)
    assert "UnmaterializedOutput(shape=(2, 5, 7)" in repr(x) and f"{x}"
    assert not logits(requires_grad=False).requires_grad


PASSED_ON = {
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "float": lambda x: x.float(),
    "to": lambda x: x.to("cpu", torch.float64, non_blocking=True, copy=True),
    "another device": lambda x: x.to("meta"),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "slice": lambda x: x[:, :-1],
    "reshape": lambda x: x.reshape(-1, 7),
    "view": lambda x: x.view(10, 7),
    "flatten": lambda x: x.flatten(0, 1).unsqueeze(0),
    "split": lambda x: x.split(2, 1),
    "unbind": lambda x: list(x),
    "dict": lambda x: pytree.tree_map(lambda t: t.detach(), {"a": [x]})["a"],
    "requires_grad_": lambda x: x.detach().requires_grad_(),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_reads_no_number_gives_another(name):
    real = torch.ones(2, 5, 7, dtype=torch.bfloat16, requires_grad=True).clone()
    ours, theirs = (pytree.tree_leaves(PASSED_ON[name](x)) for x in (logits(), real))
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        assert type(x) is UnmaterializedOutput
        for what in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
            assert getattr(x, what) == getattr(y, what), what
        assert x.stride() == y.stride()


READS = {
    "sum": lambda x: x.sum(),
    "add": lambda x: x + 1,
    "index": lambda x: x[torch.tensor([0])],
    "argmax": lambda x: x.detach().argmax(-1),
    "compare": lambda x: torch.equal(x, x),
    "cat": lambda x: torch.cat([x, x]),
    "read by another": lambda x: torch.zeros(2, 5, 7).copy_(x.detach()),
    "written": lambda x: x.detach().zero_(),
    "item": lambda x: x.detach()[0, 0, 0].item(),
    "bool": lambda x: bool(x.detach()[0, 0, 0]),
    "tolist": lambda x: x.detach().tolist(),
    "numpy": lambda x: x.detach().float().numpy(),
    "data_ptr": lambda x: x.data_ptr(),
    "a loss": lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(10).long()),
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_a_number_raises(name):
    with pytest.raises(fpdt_compile.OutputNotMaterialized, match='outputs="all"'):
        READS[name](logits())


def test_new_tensors_of_its_shape_are_real():
    for made in (torch.zeros_like(logits()), logits().new_zeros(2, 5, 7)):
        assert type(made) is Tensor and made.dtype is torch.bfloat16 and not made.any()


@dataclasses.dataclass
class Holder:
    logits: Tensor


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, "pickled"])
def test_structures_that_hold_it_are_copied_and_pickled(copied):
    if copied == "pickled":
        copied = lambda x: pickle.loads(pickle.dumps(x))  # noqa: E731
    held = [Holder(logits()), (logits(), 1), CausalLMOutputWithPast(logits=logits())]
    for x in held:
        made = copied(x)
        found = made[0] if isinstance(made, tuple) else made.logits
        assert type(found) is UnmaterializedOutput and found.shape == (2, 5, 7)
        assert found.requires_grad


def test_outputs_of_a_step_are_converted_outside_of_it():
    """Accelerate's conversion around a compiled call."""
    model, reference = pair("llama", torch.bfloat16)
    fpdt_compile.optimize(model, **EAGER)
    call = convert_outputs_to_fp32(lambda **inputs: model(**inputs))
    ours, theirs = (f(**batch(2, 21)) for f in (call, reference))
    assert ours.logits.dtype is torch.float32
    assert ours.logits.shape == theirs.logits.shape == (2, 21, VOCAB)
    assert ours.logits.requires_grad
    ours.loss.backward()
    assert model.lm_head.weight.grad.dtype is torch.bfloat16
