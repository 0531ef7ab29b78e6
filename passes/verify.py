"""Invariants of the captured graph, checked after every pass.

``verify_graph`` checks structure; ``verify_region`` (``verify=True``) runs a region whole and in
chunks on random data and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvariantError
from ..graph import CapturedGraph, value_of
from ..runtime.chunks import join_axis, split_axis
from ..runtime.program import Operand, OperandKind, RegionCall
from .extract_regions import Region
from .trace_bodies import BodyInterpreter, hint, hint_of, plain_modes

# Random rows per check, and the relative difference that reordering can explain.
VERIFY_TOKENS = 8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF_TOLERANCE = 5e-2


def verify_graph(captured: CapturedGraph, stage: str, *, pure: bool) -> None:
    """Every call has a fake value, and (``pure``) no operator writes into its inputs."""
    graph = captured.module.graph
    graph.lint()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if "val" not in node.meta:
            raise InvariantError(f"after {stage}: {node.name} has no value")
        target = node.target
        if (
            pure
            and isinstance(target, torch._ops.OpOverload)
            and target._schema.is_mutable
        ):
            raise InvariantError(f"after {stage}: {node.name} writes into its input")


def verify_regions(regions: Sequence[tuple[RegionCall, Region]]) -> None:
    """Run every region structure whole and in two chunks on random data; raise on a difference."""
    done: set[str] = set()
    for call, region in regions:
        if region.key in done:
            continue
        done.add(region.key)
        with torch.random.fork_rng(devices=[]), plain_modes():
            torch.manual_seed(0)
            verify_region(call, region)


def verify_region(call: RegionCall, region: Region) -> None:
    inputs = [
        random_operand(operand, source)
        for operand, source in zip(region.operands, region.sources, strict=True)
    ]
    whole = BodyInterpreter(region.module).run(*inputs)
    half = VERIFY_TOKENS // 2
    pieces = [
        BodyInterpreter(region.module).run(
            *(
                take(x, o, start, half)
                for x, o in zip(inputs, region.operands, strict=True)
            )
        )
        for start in (0, half)
    ]
    for i, result in enumerate(call.results):
        parts = [p[i] for p in pieces]
        if result.axis is None:
            joined = parts[0] + parts[1]
        else:
            split = [
                split_axis(p, result.axis, sizes(result.axis, region.outputs[i]))
                for p in parts
            ]
            joined = join_axis(
                torch.cat([x for x, _ in split], split[0][1]), result.axis
            )
        tolerance = TOLERANCE.get(whole[i].dtype, HALF_TOLERANCE)
        difference = (joined.double() - whole[i].double()).abs().max().item()
        if difference > tolerance * max(1.0, whole[i].double().abs().max().item()):
            raise InvariantError(
                f"verify: {result.name} in region {call.label} differs by {difference:.3g} "
                "between one run and two chunks"
            )


def sizes(axis: Any, node: torch.fx.Node) -> dict[Any, int]:
    symbols = axis.outer.free_symbols | axis.inner.free_symbols
    return {symbol: hint_of(symbol, node) for symbol in symbols}


def take(value: Any, operand: Operand, start: int, count: int) -> Any:
    if operand.axis is None or operand.kind is OperandKind.STATE:
        return value
    dim = operand.axis.dim if operand.axis.plain else operand.axis.dim + 1
    return value.narrow(dim, start, count)


def random_operand(operand: Operand, source: torch.fx.Node) -> Any:
    """Random values of the operand's shape with VERIFY_TOKENS tokens (integers: 0 or 1)."""
    if operand.kind is OperandKind.SYMBOL:
        return int(value_of(source).node.hint)
    value = value_of(source)
    shape: list[int] = []
    for dim, size in enumerate(value.shape):
        axis = (
            operand.axis
            if operand.axis is not None and operand.axis.dim == dim
            else None
        )
        if axis is None:
            shape.append(hint(size))
        elif axis.plain:
            shape.append(VERIFY_TOKENS)
        else:
            shape += [
                hint_of(axis.outer, source),
                VERIFY_TOKENS,
                hint_of(axis.inner, source),
            ]
    if value.is_floating_point():
        made: Tensor = torch.randn(shape, dtype=torch.float32, device=value.device)
        return made.to(value.dtype)
    return torch.randint(0, 2, shape, device=value.device).to(value.dtype)
