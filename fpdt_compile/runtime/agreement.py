"""What ranks compare before the first exchange of a step, so that a difference is an error.

In: the program and the inputs of a call. Out: the value of every size symbol, for the whole
sequence. All ranks gather one short row of numbers; where something differs every rank sees it, and
all of them gather the details and raise :class:`RankMismatch`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RankMismatch
from .program import ChunkProgram
from .ranks import Ranks

MAX_SEQUENCES = 8
PIECE = 1 << 20  # elements hashed at once


def agree_on_step(
    ranks: Ranks, program: ChunkProgram, inputs: Sequence[Any], sharded: bool
) -> dict[sympy.Symbol, int]:
    """The size symbols of this step. With ``sharded`` inputs each rank passes its own tokens, and a
    sequence's length is the sum over ranks; else everything must be equal.

    Raises RankMismatch on every rank.
    """
    symbols = program.symbols(inputs)
    tokens = program.token_symbols
    data = "" if sharded else hash_inputs(program, inputs)
    details = {
        "input sizes": str(input_shapes(program, inputs, sharded)),
        "the model or its plan": program.digest,
        "the values of the inputs": data,
    }
    if not ranks.weights_compared.get(program.digest):
        details["the model's weights"] = hash_weights(program, inputs)
        ranks.weights_compared[program.digest] = True
    row = [number(x) for x in details.values()]
    row += [0] * (4 - len(row))
    row += [symbols[s] for s in tokens] + [0] * (MAX_SEQUENCES - len(tokens))
    mine = torch.tensor(row, dtype=torch.int64, device=ranks.device)
    found = [
        x.tolist()
        for x in ranks.gather("comparing ranks", mine, [len(row)] * ranks.size)
    ]
    if any(x[:4] != row[:4] for x in found):
        raise RankMismatch(explain_difference(ranks, program, inputs, sharded, details))
    if sharded:
        for i, symbol in enumerate(tokens):
            symbols[symbol] = sum(x[4 + i] for x in found)
    return symbols


def number(value: Any) -> int:
    text = value if isinstance(value, bytes) else str(value).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")


def explain_difference(
    ranks: Ranks,
    program: ChunkProgram,
    inputs: Sequence[Any],
    sharded: bool,
    details: dict[str, Any],
) -> str:
    """What differs, from all ranks' details; the first difference counts."""
    shapes = input_shapes(program, inputs, sharded)
    mine = {**details, "shapes": shapes, "text": program.text}
    found: list[Any] = [None] * ranks.size
    ranks.guarded(
        "comparing ranks", dist.all_gather_object, found, mine, group=ranks.group
    )
    names = [n for n in details if len({str(x.get(n)) for x in found}) > 1]
    what = names[0] if names else "what they compare"
    lines = []
    if what == "the model or its plan":
        lines = first_difference([x["text"] for x in found])
    elif what == "input sizes":
        keys = {key for x in found for key in x["shapes"]}
        for key in sorted(keys):
            seen = [x["shapes"].get(key, "missing") for x in found]
            if len(set(seen)) > 1:
                lines.append(f"{key}: {by_rank(seen)}")
    change = {
        "the model or its plan": "build the same model with the same options on every rank",
        "the model's weights": "seed every rank alike before the model is made, or load one "
        "state_dict on all of them",
    }.get(
        what,
        'pass the same full batch on every rank, or each rank\'s own tokens with inputs="sharded"',
    )
    listed = f" ({'; '.join(lines[:4])})" if lines else ""
    return f"ranks that share a sequence differ in {what}{listed}; {change}"


def first_difference(texts: Sequence[str]) -> list[str]:
    for rows in zip(*(text.splitlines() for text in texts)):
        if len(set(rows)) > 1:
            return [by_rank(rows)]
    return [by_rank([f"{len(text.splitlines())} lines" for text in texts])]


def by_rank(values: Sequence[str]) -> str:
    return ", ".join(f"rank {r} has {value}" for r, value in enumerate(values))


def input_shapes(
    program: ChunkProgram, inputs: Sequence[Any], sharded: bool
) -> dict[str, str]:
    """Types and shapes of what is no parameter; with ``sharded`` inputs, tokens are not counted."""
    found = {}
    for name, value in zip(program.input_names, inputs, strict=True):
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            continue
        shape: list[Any] = list(value.shape)
        for dim, size in enumerate(program.specs[name].shape):
            if sharded and size.free_symbols & {*program.token_symbols}:
                shape[dim] = "tokens"
        label = program.input_labels.get(name, name)
        found[label] = f"{str(value.dtype).removeprefix('torch.')}{shape}"
    return found


def hash_inputs(program: ChunkProgram, inputs: Sequence[Any]) -> str:
    """Of everything a call passes that is no parameter."""
    found = []
    for name, value in zip(program.input_names, inputs, strict=True):
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            found.append(f"{name} {hash_tensor(value)}")
    return " ".join(found)


def hash_weights(program: ChunkProgram, inputs: Sequence[Any]) -> str:
    return " ".join(f"{hash_tensor(x)}" for x in inputs if isinstance(x, nn.Parameter))


@torch.no_grad()
def hash_tensor(value: Tensor) -> int:
    """Depends on every element and its place; equal on every device."""
    flat = value.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.is_floating_point():
        sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        flat = flat.view(sizes[flat.dtype.itemsize])
    total = 0
    for start in range(0, flat.numel(), PIECE):
        part = flat[start : start + PIECE].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=part.device)
        mixed = (part + 0x9E3779B9) * (2 * place + 1)
        mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B
        total = (total + int((mixed ^ (mixed >> 32)).sum())) & ((1 << 63) - 1)
    return total
