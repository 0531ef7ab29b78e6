"""A stand-in for an output that was not materialized.

What wraps a model copies, moves, converts, detaches, slices and passes on its outputs without
reading them (DDP clones every one, Accelerate and FSDP2 convert them): all of that gives another
stand-in, of the shape, type and device that the real tensor would have. What would read a number
raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree

from .._torch_private import plain_tensor_access
from ..errors import OutputNotMaterialized

aten = torch.ops.aten

COPIES = (
    aten.clone.default,
    aten._to_copy.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
)
# They read no more of their argument than shape, type and device.
FILLED_LIKE = (
    aten.empty_like,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
)
# What reads memory without asking the dispatcher.
READS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage")


class UnmaterializedOutput(Tensor):
    """Has the shape, dtype, device and ``requires_grad`` of the output it stands for, and no data.

    Training needs the loss; logits of [B, S, V] would take more memory than everything else.
    """

    @staticmethod
    def __new__(
        cls: type,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None = None,
    ) -> UnmaterializedOutput:
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides=strides, dtype=dtype, device=device
        )

    def shadow(self) -> Tensor:
        """The same on the meta device, for the shapes and strides of what is made from it."""
        with plain_tensor_access():
            shape, strides = self.shape, self.stride()
        return torch.empty_strided(shape, strides, dtype=self.dtype, device="meta")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in READS:
            raise not_materialized(name)
        with plain_tensor_access():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        source = next(x for x in pytree.tree_leaves(args) if isinstance(x, cls))
        if func is aten.record_stream.default:
            return None
        if func.overloadpacket in FILLED_LIKE:
            kwargs["device"] = kwargs.get("device") or source.device
            return func(*shadows(args), **kwargs)
        if not (func in COPIES or is_view(func)):
            raise not_materialized(str(func))
        device = torch.device(kwargs.get("device") or source.device)
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
        results = func(*shadows(args), **kwargs)
        return pytree.tree_map_only(
            Tensor, lambda x: cls(x.shape, x.dtype, device, x.stride()), results
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle has what this has: the description, no numbers."""
        facts = (tuple(self.shape), self.dtype, self.device, self.requires_grad)
        return unmaterialized, facts

    def __deepcopy__(self, memo: dict[int, Any]) -> UnmaterializedOutput:
        make, facts = self.__reduce_ex__(None)
        return make(*facts)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"UnmaterializedOutput(shape={tuple(self.shape)}, dtype={self.dtype})"


class Computed(torch.autograd.Function):
    """Makes a stand-in that is no leaf, as an output of a model is none."""

    @staticmethod
    def forward(ctx: FunctionCtx, token: Tensor, *facts: Any) -> UnmaterializedOutput:
        return UnmaterializedOutput(*facts)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, ...]:
        return (None,) * 4


def unmaterialized(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
) -> UnmaterializedOutput:
    """A stand-in for a contiguous tensor, computed from something if it ``requires_grad``."""
    if not requires_grad:
        return UnmaterializedOutput(shape, dtype, device)
    with torch.enable_grad():
        token = torch.empty(0, requires_grad=True)
        return Computed.apply(token, shape, dtype, device)


def shadows(args: Any) -> Any:
    return pytree.tree_map_only(UnmaterializedOutput, lambda x: x.shadow(), args)


def is_view(func: Any) -> bool:
    """Whether an operator's results share memory with its argument, which it does not change."""
    schema = func._schema
    shares = any(result.alias_info is not None for result in schema.returns)
    return shares and not schema.is_mutable


def not_materialized(name: str) -> OutputNotMaterialized:
    return OutputNotMaterialized(
        f"{name}: this output (logits or a cache) is not materialized in a training step, because "
        'the loss does not need it whole; pass outputs="all" to fpdt_compile.optimize (or in the '
        "backend's options) to get it, or call the model under torch.no_grad()"
    )
