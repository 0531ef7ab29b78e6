"""A user's ``torch.autograd.Function``: its own backward runs, in chunks where that is proved.

``CHUNKED`` run per chunk, ``WHOLE`` are parts that run whole. Both train as the unmodified model.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import PlainBlock
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

WIDTH, VOCAB = 32, 50
Function = torch.autograd.Function


class StraightThrough(Function):
    """Rounds; the gradient passes as if it had not, but for what was clipped."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * 4).round().clamp(-4, 4) / 4

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class ClippedInPlace(Function):
    """The tutorial's ReLU: writes zeros into a copy of the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        mine = grad.clone()
        mine[x < 0] = 0
        return mine


class ScaledGradient(Function):
    """The identity with a scaled gradient, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


class Reversed(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


class SetupContext(Function):
    """The newer form, and what is saved is neither argument nor output."""

    @staticmethod
    def forward(x):
        gate = torch.sigmoid(x)
        return x * gate, gate

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        x, gate = ctx.saved_tensors
        return grad * gate * (1 + x * (1 - gate))


class TwoOutputs(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.sum(-1, keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, other):
        (x,) = ctx.saved_tensors
        return grad * x.cos() + other.expand_as(x) * 0.5


class WeightedLinear(Function):
    """A gradient of a weight and a bias, which is not the derivative."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        rows = grad.flatten(0, 1)
        return grad @ w.t(), 2 * (x.flatten(0, 1).t() @ rows), rows.sum(0) / 3


class EinsumLinear(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return torch.einsum("bsd,df->bsf", x, w) + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        weight = torch.einsum("bsd,bsf->df", x, grad)
        return (
            torch.einsum("bsf,df->bsd", grad, w),
            weight,
            grad.sum((0, 1)) * b_scale(w),
        )


def b_scale(w: Tensor) -> Tensor:
    return w.abs().mean()


class NestedFunction(Function):
    """Calls another one in its forward, whose backward then never runs."""

    @staticmethod
    def forward(ctx, x):
        return Reversed.apply(x) * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class MixesInBackward(Function):
    """Tokenwise forward; the gradient is centred over the tokens."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(1, keepdim=True)


class MixesInForward(Function):
    @staticmethod
    def forward(ctx, x):
        return x.cumsum(1)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.1


class ClippedNorm(Function):
    """The gradient of every token is made at most 0.001 long: right once, not for its parts."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.5

    @staticmethod
    def backward(ctx, grad):
        return grad * (0.001 / grad.norm(dim=-1, keepdim=True)).clamp(max=1)


class AverageWeight(Function):
    """The weight's gradient is a mean over tokens: chunks' means do not add up."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        mean = (x.unsqueeze(-1) * grad.unsqueeze(-2)).mean((0, 1))
        return grad @ w.t(), mean, grad.sum((0, 1))


class DecayedWeight(Function):
    """The weight's gradient has a part that is no sum over tokens."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w + b

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        product = x.flatten(0, 1).t() @ grad.flatten(0, 1)
        return grad @ w.t(), product + 0.01 * w, grad.sum((0, 1))


class OffsetGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad + 1e-3


class Net(nn.Module):
    """The function before a block (its result is read twice) and before the head."""

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = PlainBlock(WIDTH, 4, 2)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.function, self.name = function, function.__name__

    def call(self, x: Tensor) -> Tensor:
        kind = self.name
        if kind in ("WeightedLinear", "EinsumLinear", "AverageWeight", "DecayedWeight"):
            return self.function.apply(x, F.softplus(self.weight), self.bias)
        if kind == "ScaledGradient":
            return self.function.apply(x, 0.25)
        result = self.function.apply(x)
        return result[0] * result[1] if isinstance(result, tuple) else result

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.call(self.block(self.call(self.embed(ids))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


CHUNKED = [
    StraightThrough,
    ClippedInPlace,
    ScaledGradient,
    Reversed,
    SetupContext,
    TwoOutputs,
    WeightedLinear,
    EinsumLinear,
    NestedFunction,
]
WHOLE = {
    MixesInBackward: "over the token axis",
    MixesInForward: "over the token axis",
    ClippedNorm: "not linear in the gradient",
    AverageWeight: "over the token axis",
    DecayedWeight: "not linear in the gradient",
    OffsetGradient: "not linear in the gradient",
}


def trained(function: type[Function], **options: object):
    torch.manual_seed(0)
    model = Net(function).double()
    reference = copy.deepcopy(model)
    ids, labels = torch.randint(0, VOCAB, (2, 2, 21))
    fpdt_compile.optimize(model, chunk_len=8, **options)
    comparison = compare_training(
        model, reference, {"ids": ids, "labels": labels}, loss_of=lambda loss: loss
    )
    return comparison, backend_of(model)


@pytest.mark.parametrize("function", CHUNKED, ids=lambda f: f.__name__)
def test_runs_in_chunks(function: type[Function]) -> None:
    comparison, backend = trained(function, codegen="eager", strict=True)
    comparison.check(1e-10)
    (analysis,) = backend.analyses
    assert not analysis.rejections and not analysis.mixers
    assert len(analysis.attentions) == 1


@pytest.mark.parametrize("function", WHOLE, ids=lambda f: f.__name__)
def test_runs_whole(function: type[Function]) -> None:
    with pytest.warns(UserWarning, match="runs whole"):
        comparison, backend = trained(function, codegen="eager")
    comparison.check(1e-10)
    (analysis,) = backend.analyses
    assert len(analysis.mixers) == 2 and len(analysis.attentions) == 1
    for rejection in analysis.rejections:
        assert WHOLE[function] in rejection.reason
        assert "test_custom_functions.py" in rejection.source


def test_compiled_bodies_are_shared_and_exact() -> None:
    comparison, backend = trained(WeightedLinear, strict=True)
    comparison.check(1e-10)


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock(WIDTH, 4, 2) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(StraightThrough.apply(x))
        return x.square().mean()


def test_bodies_do_not_grow_with_depth() -> None:
    bodies = []
    for layers in (3, 5):
        model = Layers(layers).double()
        fpdt_compile.optimize(model, chunk_len=8, codegen="eager", strict=True)
        model(torch.randint(0, VOCAB, (1, 19))).backward()
        bodies.append(fpdt_compile.api.compile_stats(model).bodies)
    assert bodies[0] == bodies[1]


def test_finite_differences_are_not_what_runs() -> None:
    """The reversed gradient reaches the embedding with its sign: the derivative is not taken."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.block = PlainBlock(WIDTH, 4, 2)

        def forward(self, ids: Tensor, reverse: bool) -> Tensor:
            x = self.embed(ids)
            x = self.block(Reversed.apply(x) if reverse else x)
            return x.square().mean()

    grads = []
    for reverse in (False, True):
        torch.manual_seed(0)
        model = Once().double()
        fpdt_compile.optimize(model, chunk_len=8, codegen="eager", strict=True)
        ids = torch.arange(20)[None] % VOCAB
        model(ids, reverse).backward()
        grads.append(model.embed.weight.grad)
    torch.testing.assert_close(grads[0], -grads[1], rtol=1e-10, atol=1e-12)


def test_what_is_dirty_is_refused() -> None:
    class Dirty(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            x.mul_(2)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.block = PlainBlock(WIDTH, 4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.block(Dirty.apply(self.embed(ids) + 0)).square().mean()

    torch.manual_seed(0)
    model = Model().double()
    reference = copy.deepcopy(model)
    fpdt_compile.optimize(model, chunk_len=8, codegen="eager")
    ids = torch.randint(0, VOCAB, (1, 19))
    with pytest.warns(UserWarning, match="mark_dirty"):
        comparison = compare_training(
            model, reference, {"ids": ids}, loss_of=lambda loss: loss
        )
    comparison.check(1e-10)
