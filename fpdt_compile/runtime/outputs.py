"""A stand-in for an output that was not materialized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_private import plain_tensor_access
from ..errors import OutputNotMaterialized


class UnmaterializedOutput(Tensor):
    """Has the shape and dtype of the output it stands for, and no data: any use raises.

    Training needs the loss; logits of [B, S, V] would take more memory than everything else.
    """

    @staticmethod
    def __new__(
        cls: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> UnmaterializedOutput:
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=False
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "size", "dim", "numel", "stride", "is_floating_point"):
            with plain_tensor_access():
                return func(*args, **(kwargs or {}))
        raise not_materialized(name)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise not_materialized(str(func))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"UnmaterializedOutput(shape={tuple(self.shape)}, dtype={self.dtype})"


def not_materialized(name: str) -> OutputNotMaterialized:
    return OutputNotMaterialized(
        f"{name}: this output (logits or a cache) is not materialized in a training step, because "
        'the loss does not need it whole; pass outputs="all" to fpdt_compile.optimize (or in the '
        "backend's options) to get it, or call the model under torch.no_grad()"
    )
