"""Sums of gradients: of parameters over chunks, and of values per chunk.

Parameter gradients of half types are summed in fp32, matrix products are added in place with
``addmm_`` and embedding rows with ``index_add_``, so no dense gradient per chunk is formed. Values'
gradients are summed under their (name, chunk) key; a gradient that shares memory with another
tensor is never written to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .program import GradForm, GradSlot

HALF = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


class ParameterGradients:
    """Running gradient sums of the parameters one stage uses, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(
        self, name: str, parameter: Tensor, slot: GradSlot, results: Sequence[Tensor]
    ) -> None:
        """Add one chunk's gradient, in the form ``slot`` says."""
        if slot.form is GradForm.NONE:
            return
        parts = [results[i] for i in slot.results]
        total = self.sums.get(name)
        dtype = sum_dtype(parameter.dtype)
        if slot.form is GradForm.PRODUCT:
            if total is None:
                self.sums[name] = torch.mm(*parts)
            elif total.dtype == parts[0].dtype:
                total.addmm_(*parts)
            else:
                total.add_(torch.mm(*parts))
        elif slot.form is GradForm.ROWS:
            if total is None:
                total = self.sums[name] = torch.zeros(
                    parameter.shape, dtype=dtype, device=parameter.device
                )
            rows, numbers = parts
            rows, numbers = rows.reshape(-1, rows.shape[-1]), numbers.reshape(-1)
            if slot.padding_row is not None:
                rows = rows.masked_fill((numbers == slot.padding_row).unsqueeze(-1), 0)
            total.index_add_(0, numbers, rows.to(dtype))
        elif total is None:
            self.sums[name] = parts[0].to(dtype, copy=True)
        else:
            total.add_(parts[0])

    def add_dense(self, name: str, parameter: Tensor, grad: Tensor) -> None:
        self.add(
            name,
            parameter,
            GradSlot(operand=0, form=GradForm.DENSE, results=(0,)),
            [grad],
        )

    def take(self, name: str, parameter: Tensor) -> Tensor | None:
        """The finished gradient in the parameter's type; the sum is given away."""
        total = self.sums.pop(name, None)
        return (
            None
            if total is None
            else total.to(parameter.dtype).reshape(parameter.shape)
        )


class ValueGradients:
    """Gradients of chunk values on their way back through the blocks."""

    def __init__(self) -> None:
        self.grads: dict[tuple[str, int], Tensor] = {}
        self.owned: set[tuple[str, int]] = set()

    def add(self, key: tuple[str, int], grad: Tensor, *, owned: bool) -> None:
        """Add a part; ``owned`` says that nobody else reads ``grad``'s memory."""
        have = self.grads.get(key)
        if have is None:
            self.grads[key] = grad
            if owned:
                self.owned.add(key)
        elif key in self.owned:
            have.add_(grad)
        else:
            self.grads[key] = have + grad
            self.owned.add(key)

    def take(self, key: tuple[str, int]) -> Tensor | None:
        self.owned.discard(key)
        return self.grads.pop(key, None)
