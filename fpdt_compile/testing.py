"""Compare an optimized model with the unmodified one: loss and every parameter gradient.

For the library's own tests and for users who want to see it on their model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Relative differences. ``worst`` names the parameter with the largest gradient difference.

    A gradient's difference is relative to its own largest value, but never to less than 1e-3 of
    the largest gradient in the model: some gradients (a key bias) are zero but for rounding.
    """

    loss_error: float
    grad_error: float
    worst: str

    def check(self, tolerance: float) -> None:
        """Raise AssertionError if a difference is larger than ``tolerance``."""
        if not (self.loss_error <= tolerance and self.grad_error <= tolerance):
            raise AssertionError(
                f"loss differs by {self.loss_error:.3g}, gradients by up to {self.grad_error:.3g} "
                f"({self.worst}); allowed is {tolerance:.3g}"
            )


def train_once(
    model: nn.Module, inputs: Mapping[str, Any], loss_of: Callable[[Any], Tensor]
) -> Tensor:
    """Zero the gradients, run one forward and backward, return the detached loss."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach()


def compare_training(
    model: nn.Module,
    reference: nn.Module,
    inputs: Mapping[str, Any],
    *,
    loss_of: Callable[[Any], Tensor] = lambda output: output.loss,
) -> Comparison:
    """One training step of both; see :class:`Comparison`. Missing gradients must be
    missing in both."""
    expected = train_once(reference, inputs, loss_of)
    actual = train_once(model, inputs, loss_of)
    return compare_gradients(model, reference, actual, expected)


def compare_gradients(
    model: nn.Module, reference: nn.Module, actual: Tensor, expected: Tensor
) -> Comparison:
    """Compare losses and the gradients that both models hold now."""
    loss_error = relative(actual, expected, largest_of(expected))
    pairs = dict(reference.named_parameters())
    largest = max(
        (largest_of(p.grad) for p in pairs.values() if p.grad is not None),
        default=0.0,
    )
    worst, grad_error = "", 0.0
    for name, parameter in model.named_parameters():
        other = pairs[name]
        if (parameter.grad is None) != (other.grad is None):
            raise AssertionError(
                f"{name}: gradient is {'missing' if parameter.grad is None else 'unexpected'}"
            )
        if parameter.grad is None or other.grad is None:
            continue
        scale = max(largest_of(other.grad), 1e-3 * largest)
        error = relative(parameter.grad, other.grad, scale)
        if not error <= grad_error:
            worst, grad_error = name, error
    return Comparison(loss_error=loss_error, grad_error=grad_error, worst=worst)


def largest_of(value: Tensor) -> float:
    """The largest finite magnitude."""
    return value.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def relative(actual: Tensor, expected: Tensor, scale: float) -> float:
    """The largest difference over ``scale``; nan and inf must agree."""
    a, b = actual.double(), expected.double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    difference = torch.where(same, torch.zeros_like(a), (a - b).abs())
    return difference.max().item() / (scale if scale > 1e-30 else 1e-30)
