"""Score and mask arithmetic of a tile as a few lines of text, which a kernel can have inlined.

A program is straight-line code, one operator of ``OPERATORS`` a line, each with its dtype; the last
line is the result, the logits of the softmax in natural units (-inf hides a pair)::

    t0: int64 = sub(leaf0, leaf1)
    t1: bool = ge(t0, 0)
    t2: float32 = where(t1, score, -inf)

Names: ``score`` is the unscaled score q.k in the accumulator type; ``leaf<i>`` the i-th leaf, a
tensor broadcastable to [B, H, q, k]; ``row`` and ``column`` the indices in the tile; ``offset`` the
position of row 0 minus that of column 0. Text is what a custom operator can carry: it is compared,
hashed and cached like any other argument, and one text serves every tile and length.

Contract: :func:`evaluate` on whole tensors and the code of ``triton_programs`` agree;
:func:`derivative` is a program too, of d logits / d score.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Operand = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Line:
    """``name: dtype = op(*operands)``; an operand is a name or a number."""

    name: str
    dtype: torch.dtype
    op: str
    operands: tuple[Operand, ...]

    def __str__(self) -> str:
        short = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {short} = {self.op}({', '.join(map(str, self.operands))})"


def _true_div(a: Any, b: Any) -> Any:
    return torch.div(*_tensors(a, b))


def _tensors(*values: Any) -> list[Any]:
    """Numbers beside tensors stay numbers; where all are numbers, tensors of them."""
    if any(isinstance(x, Tensor) for x in values):
        return list(values)
    return [torch.tensor(x) for x in values]


def _of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: function(*_tensors(*values))


# What each operator means. ``cast`` changes the dtype only, to that of its line.
OPERATORS: dict[str, Callable[..., Any]] = {
    "add": _of(torch.add),
    "sub": _of(torch.sub),
    "mul": _of(torch.mul),
    "div": _true_div,
    "floor_div": _of(functools.partial(torch.div, rounding_mode="floor")),
    "remainder": _of(torch.remainder),
    "neg": _of(torch.neg),
    "abs": _of(torch.abs),
    "eq": _of(torch.eq),
    "ne": _of(torch.ne),
    "lt": _of(torch.lt),
    "le": _of(torch.le),
    "gt": _of(torch.gt),
    "ge": _of(torch.ge),
    "logical_and": _of(torch.logical_and),
    "logical_or": _of(torch.logical_or),
    "logical_xor": _of(torch.logical_xor),
    "logical_not": _of(torch.logical_not),
    "where": lambda c, a, b: torch.where(torch.as_tensor(c), a, b),
    "maximum": lambda a, b: torch.maximum(*map(torch.as_tensor, (a, b))),
    "minimum": lambda a, b: torch.minimum(*map(torch.as_tensor, (a, b))),
    "exp": _of(torch.exp),
    "log": _of(torch.log),
    "sqrt": _of(torch.sqrt),
    "tanh": _of(torch.tanh),
    "sigmoid": _of(torch.sigmoid),
    "floor": _of(torch.floor),
    "cast": lambda x: torch.as_tensor(x),
}
INPUTS = ("score", "row", "column", "offset")


def render(lines: Sequence[Line]) -> str:
    return "\n".join(map(str, lines))


@functools.lru_cache(maxsize=256)
def parse(text: str) -> tuple[Line, ...]:
    """The lines of a program. Raises ValueError for anything that is not one."""
    lines: list[Line] = []
    known: set[str] = set(INPUTS)
    for statement in ast.parse(text).body:
        match statement:
            case ast.AnnAssign(
                target=ast.Name(id=name),
                annotation=ast.Name(id=kind),
                value=ast.Call(func=ast.Name(id=op), args=args, keywords=[]),
            ) if op in OPERATORS and isinstance(getattr(torch, kind), torch.dtype):
                operands = tuple(_operand(x, known) for x in args)
                lines.append(Line(name, getattr(torch, kind), op, operands))
                known.add(name)
            case _:
                raise ValueError(
                    f"not a line of a tile program: {ast.unparse(statement)}; "
                    f"allowed are 'name: dtype = op(operands)' with op one of "
                    f"{', '.join(OPERATORS)}"
                )
    if not lines:
        raise ValueError("a tile program has at least one line")
    return tuple(lines)


def _operand(node: ast.expr, known: set[str]) -> Operand:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_operand(inner, known)  # type: ignore[operator]
        case ast.Name(id="inf" | "nan" as word):
            return float(word)
        case ast.Name(id=name) if name in known or name.startswith("leaf"):
            return name
    raise ValueError(f"not an operand of a tile program: {ast.unparse(node)}")


def evaluate(
    text: str, score: Tensor, leaves: Sequence[Tensor], *, rows: slice, offset: int
) -> Tensor:
    """The program on ``rows`` of a tile, by torch's own operators.

    ``score`` [B, H, rows, k] has those rows, the leaves have all.
    """
    row = torch.arange(rows.start, rows.stop, device=score.device)
    env: dict[str, Any] = {
        "score": score,
        "row": row.view(1, 1, -1, 1),
        "column": torch.arange(score.shape[3], device=score.device).view(1, 1, 1, -1),
        "offset": offset,
    }
    for i, leaf in enumerate(leaves):
        env[f"leaf{i}"] = leaf[:, :, rows] if leaf.shape[2] != 1 else leaf
    lines = parse(text)
    for line in lines:
        values = [env[x] if isinstance(x, str) else x for x in line.operands]
        env[line.name] = torch.as_tensor(OPERATORS[line.op](*values)).to(line.dtype)
    return env[lines[-1].name]


class Writer:
    """Writes a program line by line; a value is a name or a number.

    ``dtypes`` are those of the names that exist already (``score``, the leaves).
    """

    def __init__(self, prefix: str = "t", **dtypes: torch.dtype) -> None:
        self.prefix = prefix
        self.lines: list[Line] = []
        self.dtypes = {"row": torch.int64, "column": torch.int64, **dtypes}
        self.made: dict[tuple, str] = {}

    def line(
        self, op: str, *operands: Operand, dtype: torch.dtype | None = None
    ) -> Operand:
        """The value of ``op``: numbers are folded, a line that exists is used again.

        ``dtype`` None: what torch's promotion gives.
        """
        dtype = self.promoted(op, operands) if dtype is None else dtype
        if not any(isinstance(x, str) for x in operands):
            return torch.as_tensor(OPERATORS[op](*operands)).to(dtype).item()
        key = (op, dtype, tuple((type(x), x) for x in operands))
        if key not in self.made:
            name = f"{self.prefix}{len(self.lines)}"
            self.lines.append(Line(name, dtype, op, operands))
            self.dtypes[name] = dtype
            self.made[key] = name
        return self.made[key]

    def promoted(self, op: str, operands: Sequence[Operand]) -> torch.dtype:
        samples = [
            torch.ones(1, dtype=self.dtypes[x])
            if isinstance(x, str) and x != "offset"
            else 1
            if isinstance(x, str)
            else x
            for x in operands
        ]
        return torch.as_tensor(OPERATORS[op](*samples)).dtype

    def finish(self, result: Operand, dtype: torch.dtype) -> str:
        """The text whose last line is ``result``; lines that nothing reads are left out."""
        if not self.lines or result != self.lines[-1].name:
            name = f"{self.prefix}{len(self.lines)}"
            self.lines.append(Line(name, dtype, "cast", (result,)))
        needed = {self.lines[-1].name}
        kept = []
        for line in reversed(self.lines):
            if line.name in needed:
                kept.append(line)
                needed.update(x for x in line.operands if isinstance(x, str))
        return render(kept[::-1])


@functools.lru_cache(maxsize=256)
def derivative(text: str) -> str:
    """The program of d result / d score, by the chain rule along the lines.

    Raises NotImplementedError naming an operator that has no rule here.
    """
    writer = Writer("d")  # the value's own lines may be called t<i>
    tangents: dict[str, Operand] = {"score": 1.0}
    lines = parse(text)
    for line in lines:
        writer.lines.append(line)
        writer.dtypes[line.name] = line.dtype
        slopes = [
            tangents.get(x, 0.0) if isinstance(x, str) else 0.0 for x in line.operands
        ]
        if line.dtype.is_floating_point and any(x != 0.0 for x in slopes):
            if line.op not in SLOPES:
                raise NotImplementedError(
                    f"{line.op} has no derivative in a tile program"
                )
            tangents[line.name] = SLOPES[line.op](_Slope(writer, line), *slopes)
    dtype = lines[-1].dtype
    return writer.finish(tangents.get(lines[-1].name, 0.0), dtype)


@dataclass(frozen=True, slots=True)
class _Slope:
    """Arithmetic on slopes beside one line of the value."""

    writer: Writer
    of: Line

    def line(self, op: str, *operands: Operand) -> Operand:
        return self.writer.line(op, *operands, dtype=self.of.dtype)

    def mul(self, a: Operand, b: Operand) -> Operand:
        if 0.0 in (a, b):
            return 0.0
        if 1.0 in (a, b):
            return b if a == 1.0 else a
        return self.line("mul", a, b)

    def add(self, a: Operand, b: Operand) -> Operand:
        if a == 0.0 or b == 0.0:
            return b if a == 0.0 else a
        return self.line("add", a, b)

    def neg(self, a: Operand) -> Operand:
        return 0.0 if a == 0.0 else self.line("neg", a)

    def choose(self, op: str, da: Operand, db: Operand) -> Operand:
        """The slope of the operand that ``op`` finds; the mean of both where they are equal."""
        a, b = self.of.operands
        first = self.writer.line(op, a, b, dtype=torch.bool)
        equal = self.writer.line("eq", a, b, dtype=torch.bool)
        mean = self.mul(0.5, self.add(da, db))
        return self.line("where", equal, mean, self.line("where", first, da, db))


def _div(s: _Slope, da: Operand, db: Operand) -> Operand:
    a, b = s.of.operands
    top = s.add(da, s.neg(s.mul(s.of.name, db)))
    return 0.0 if top == 0.0 else s.line("div", top, b)


def _tanh(s: _Slope, da: Operand) -> Operand:
    square = s.line("mul", s.of.name, s.of.name)
    return s.mul(da, s.line("sub", 1.0, square))


def _sigmoid(s: _Slope, da: Operand) -> Operand:
    rest = s.line("sub", 1.0, s.of.name)
    return s.mul(da, s.line("mul", s.of.name, rest))


def _abs(s: _Slope, da: Operand) -> Operand:
    (a,) = s.of.operands
    below = s.writer.line("lt", a, 0.0, dtype=torch.bool)
    above = s.writer.line("gt", a, 0.0, dtype=torch.bool)
    rest = s.line("where", above, da, 0.0)
    return s.line("where", below, s.neg(da), rest)


SLOPES: dict[str, Callable[..., Operand]] = {
    "add": lambda s, da, db: s.add(da, db),
    "sub": lambda s, da, db: s.add(da, s.neg(db)),
    "mul": lambda s, da, db: s.add(
        s.mul(da, s.of.operands[1]), s.mul(s.of.operands[0], db)
    ),
    "div": _div,
    "neg": lambda s, da: s.neg(da),
    "abs": _abs,
    "where": lambda s, dc, da, db: s.line("where", s.of.operands[0], da, db),
    "maximum": lambda s, da, db: s.choose("gt", da, db),
    "minimum": lambda s, da, db: s.choose("lt", da, db),
    "exp": lambda s, da: s.mul(da, s.of.name),
    "log": lambda s, da: s.line("div", da, s.of.operands[0]),
    "sqrt": lambda s, da: s.line("div", s.mul(0.5, da), s.of.name),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "floor": lambda s, da: 0.0,
    "cast": lambda s, da: da,
}


def num_leaves(text: str) -> int:
    """How many leaves a program reads: one more than the largest index."""
    names = [x for line in parse(text) for x in line.operands if isinstance(x, str)]
    found = [int(x.removeprefix("leaf")) for x in names if x.startswith("leaf")]
    return max(found, default=-1) + 1
