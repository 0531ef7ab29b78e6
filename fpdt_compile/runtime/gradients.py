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
from .stores import Key, ValueStore

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


def grad_of(name: str) -> str:
    """The name of a value's gradient in the store."""
    return f"{name}'"


class ValueGradients:
    """Gradients of chunk values on their way back through the blocks; they are kept in the store,
    as ``(name', chunk)``."""

    def __init__(self, store: ValueStore) -> None:
        self.store = store
        self.owned: set[Key] = set()

    def add(self, key: Key, grad: Tensor, *, owned: bool) -> None:
        """Add a part; ``owned`` says that nobody else reads ``grad``'s memory."""
        store, place = self.store, (grad_of(key[0]), key[1])
        if place not in store:
            store.put(place, grad)
            if owned:
                self.owned.add(key)
        elif key in self.owned:
            store.update(place).add_(grad)
        else:
            store.put(place, store.get(place) + grad)
            self.owned.add(key)

    def __contains__(self, key: Key) -> bool:
        return (grad_of(key[0]), key[1]) in self.store

    def get(self, key: Key) -> Tensor:
        return self.store.get((grad_of(key[0]), key[1]))

    def take(self, key: Key) -> Tensor | None:
        self.owned.discard(key)
        return self.store.pop((grad_of(key[0]), key[1]))

    def drop(self, key: Key) -> None:
        """Forget a gradient, if there is one."""
        self.owned.discard(key)
        place = (grad_of(key[0]), key[1])
        if place in self.store:
            self.store.drop(place)
