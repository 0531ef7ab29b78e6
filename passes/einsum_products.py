"""A two-operand einsum over sequences as a matrix product, which attention is recognized by.

In: ``einsum("bqhd,bkhd->bhqk", q, k)``. Out: permutations and one ``matmul``. With m and n the
letters that only the first and only the second operand has, and k the summed one, the product is
``[batch, m, k] @ [batch, k, n]``. Every other letter is a batch dimension, of size 1 in an operand
that lacks it. The operands are swapped where that puts the sequence into the rows, or the first
sequence of the result first.

Limits: one summed letter; no letter twice in a term; no ellipsis.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from ..graph import size_expr, value_of
from .base import insert_from
from .token_rules import op_name

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """``out[batch, rows, columns] = left[batch, rows, summed] @ right[batch, summed, columns]``."""

    left: Node
    right: Node
    left_term: str
    right_term: str
    out: str
    batch: str
    rows: str
    columns: str
    summed: str


def match_product(node: Node, symbols: frozenset[sympy.Symbol]) -> Product | None:
    """How to write an einsum of two tensors that both have tokens as a matrix product, or None."""
    if op_name(node) != "einsum" or len(node.args[1]) != 2:
        return None
    equation = node.args[0].replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    terms, out = equation.split("->")
    left, right = terms.split(",")
    a, b = node.args[1]
    sizes = {
        letter: size_expr(size)
        for term, x in ((left, a), (right, b))
        for letter, size in zip(term, value_of(x).shape, strict=True)
    }
    tokens = {letter for letter, size in sizes.items() if size in symbols}
    if not tokens & set(left) or not tokens & set(right):
        return None
    if any(len(set(term)) < len(term) for term in (left, right, out)):
        return None
    summed = [x for x in left if x in right and x not in out]
    if len(summed) != 1 or any(x not in out for x in {*left, *right} - {*summed}):
        return None
    rows, columns = (
        pick([x for x in mine if x not in other], tokens)
        for mine, other in ((left, right), (right, left))
    )
    if not rows or not columns:
        return None
    swap = out.index(columns) < out.index(rows)
    if (rows in tokens) != (columns in tokens):
        swap = columns in tokens
    if swap:
        left, right, a, b, rows, columns = right, left, b, a, columns, rows
    batch = "".join(x for x in out if x not in (rows, columns))
    return Product(
        left=a,
        right=b,
        left_term=left,
        right_term=right,
        out=out,
        batch=batch,
        rows=rows,
        columns=columns,
        summed=summed[0],
    )


def pick(letters: list[str], tokens: set[str]) -> str:
    """The letter that becomes rows or columns: a sequence, else the last one."""
    return next((x for x in letters if x in tokens), letters[-1] if letters else "")


def write_product(node: Node, product: Product) -> None:
    """Replace the einsum."""

    def arranged(x: Node, term: str, last: str) -> Node:
        wanted = product.batch + last
        present = [letter for letter in wanted if letter in term]
        x = permuted(x, [term.index(letter) for letter in present])
        for dim, letter in enumerate(wanted):
            if letter not in term:
                x = insert_from(node.graph, aten.unsqueeze.default, (x, dim), node)
        return x

    def permuted(x: Node, order: list[int]) -> Node:
        if order == list(range(len(order))):
            return x
        return insert_from(node.graph, aten.permute.default, (x, order), node)

    with node.graph.inserting_before(node):
        left = arranged(product.left, product.left_term, product.rows + product.summed)
        right = arranged(
            product.right, product.right_term, product.summed + product.columns
        )
        made = insert_from(node.graph, aten.matmul.default, (left, right), node)
        have = product.batch + product.rows + product.columns
        made = permuted(made, [have.index(letter) for letter in product.out])
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
