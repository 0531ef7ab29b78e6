"""Mark the token dimension of a call's inputs dynamic.

Every input with a token dimension must be marked, or Dynamo would tie the marked ones to the size
of the others and compile for that one number.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ._torch_private import mark_dynamic


def default_token_dims(value: Tensor) -> tuple[int, ...]:
    """Token dimensions by convention: ``[B, S]``, ``[B, S, d]``, ``[B, H, S, S]``, ``[3,
    B, S]``."""
    rank = value.dim()
    if rank == 2:
        # A bool or float mask may be [S, S] as well as [B, S]: both are kept symbolic.
        is_mask = value.is_floating_point() or value.dtype is torch.bool
        return (0, 1) if is_mask else (1,)
    if rank == 3:
        return (1,) if value.is_floating_point() else (2,)
    if rank == 4:
        return (2, 3)
    return ()


class TokenMarker:
    """Marks the inputs of one module's calls."""

    def __init__(
        self, model: nn.Module, token_dims: Mapping[str, int | Sequence[int]] | None
    ) -> None:
        self.signature = inspect.signature(model.forward)
        self.token_dims = token_dims
        if token_dims is not None:
            self.check_names(token_dims)

    def check_names(self, token_dims: Mapping[str, Any]) -> None:
        parameters = self.signature.parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        names = [p.name for p in parameters]
        for name in token_dims:
            if name not in names:
                raise ValueError(
                    f"token_dims={dict(token_dims)!r}: {name!r} is not an input of the model's "
                    f"forward; allowed are {', '.join(names)}"
                )

    def mark(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        named = list(zip(self.signature.parameters, args)) + list(kwargs.items())
        for name, value in named:
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor) and type(leaf) is not nn.Parameter:
                    for dim in self.dims(name, leaf):
                        mark_dynamic(leaf, dim)

    def dims(self, name: str, value: Tensor) -> tuple[int, ...]:
        if self.token_dims is None:
            return tuple(d for d in default_token_dims(value) if value.shape[d] > 1)
        given = self.token_dims.get(name, ())
        dims = (given,) if isinstance(given, int) else tuple(given)
        for dim in dims:
            if not -value.dim() <= dim < value.dim():
                raise ValueError(
                    f"token_dims: {name}={dim}: the input has {value.dim()} dimensions; allowed "
                    f"are {-value.dim()} to {value.dim() - 1}"
                )
        return tuple(d % value.dim() for d in dims)
