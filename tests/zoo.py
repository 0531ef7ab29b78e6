"""Trains every architecture of ``zoo_entries`` optimized and untouched, and writes the table.

    python tests/zoo.py                      # all: docs/zoo.md and tests/zoo_expects.json
    python tests/zoo.py --only gpt2 t5       # these rows; the others stay as they were
    python tests/zoo.py --jobs 2 --dry-run   # print, write nothing

Each entry is built twice with equal weights and trained for a step at each of its lengths,
once with ``fpdt_compile.optimize``; loss and every gradient are compared. What was found
comes from the analyses of the optimized model. An entry that raises has the error in its
row. ``test_zoo.py`` asserts that the facts stay what ``zoo_expects.json`` says.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from zoo_entries import ENTRIES, Entry

import fpdt_compile
from fpdt_compile.api import backend_of
from fpdt_compile.testing import compare_training

HERE = Path(__file__).resolve().parent
EXPECTS = HERE / "zoo_expects.json"
TABLE = HERE.parent / "docs" / "zoo.md"
OPTIONS = dict(codegen="eager", chunk_len=8, head_len=4)
BATCH = 32
SECONDS = 240  # an entry that takes longer is an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What was found in an architecture, summed over its captured graphs.

    ``recompiled`` are graphs captured after the first length. ``whole`` are the reasons of
    what does not run in chunks. An ``error`` (its first line) comes without the rest.
    """

    graphs: int = 0
    recompiled: int = 0
    attentions: int = 0
    chunked: int = 0
    whole: tuple[str, ...] = ()
    error: str = ""

    @property
    def verdict(self) -> str:
        if self.error:
            return "error"
        if not self.chunked:
            return "whole"
        return "in part" if self.whole else "chunked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Facts of one entry, and how far loss and gradients are from the untouched model's."""

    name: str
    facts: Facts
    loss_error: float = float("nan")
    grad_error: float = float("nan")
    worst: str = ""
    seconds: float = 0.0

    @property
    def difference(self) -> float:
        """The larger one; not a number when either is."""
        return max(self.grad_error, self.loss_error, key=lambda x: (x != x, x))


def measure(entry: Entry) -> Outcome:
    """Train the entry both ways. Raises what building, optimizing or training raises."""
    start = time.perf_counter()
    torch._dynamo.reset()
    reference = entry.model()
    model = fpdt_compile.optimize(copy.deepcopy(reference), **OPTIONS)
    analyses = backend_of(model).analyses
    loss_error, grad_error, worst, graphs = 0.0, 0.0, "", 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in entry.lengths:
            step = compare_training(
                model, reference, entry.call(length), loss_of=entry.loss_of
            )
            graphs = graphs or len(analyses)
            loss_error = max(loss_error, step.loss_error)
            if not step.grad_error <= grad_error:
                grad_error, worst = step.grad_error, step.worst
    return Outcome(
        name=entry.name,
        facts=facts_of(analyses, graphs),
        loss_error=loss_error,
        grad_error=grad_error,
        worst=worst,
        seconds=time.perf_counter() - start,
    )


def facts_of(analyses: Sequence[Any], graphs: int) -> Facts:
    first = analyses[:graphs]
    reasons = [short(str(r.op), r.reason) for a in first for r in a.rejections]
    return Facts(
        graphs=graphs,
        recompiled=len(analyses) - graphs,
        attentions=sum(a.num_found for a in first),
        chunked=sum(len(a.attentions) for a in first if a.cut is not None),
        whole=tuple(dict.fromkeys(reasons)),
    )


def short(op: str, reason: str) -> str:
    """``op: reason`` on one line, without numbers of nodes and overload names."""
    op = op.removeprefix("aten.").removesuffix(".default")
    return f"{op}: {' '.join(reason.split())}"


def expectations() -> dict[str, Facts]:
    """Facts by entry, as last accepted."""
    if not EXPECTS.exists():
        return {}
    stored = json.loads(EXPECTS.read_text())
    return {
        name: Facts(**{**row, "whole": tuple(row.get("whole", ()))})
        for name, row in stored.items()
    }


class TooSlow(Exception):
    """An entry ran out of time."""


def run_entry(name: str) -> Outcome:
    """``measure`` in a worker process, with a time limit; errors become a row."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()

    def stop(*_: object) -> None:
        raise TooSlow(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return measure(ENTRIES[name])
    except Exception as error:  # whatever a model raises is its row in the table
        return Outcome(name=name, facts=Facts(error=first_line(error)))
    finally:
        signal.alarm(0)


def first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((x for x in lines if x != "backend='fpdt' raised:"), "")
    return f"{type(error).__name__}: {text}"[:160]


def run_all(names: Sequence[str], jobs: int) -> Iterable[Outcome]:
    """In spawned processes, replaced after each batch so that no state piles up."""
    for start in range(0, len(names), BATCH):
        batch = names[start : start + BATCH]
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            for future in as_completed([pool.submit(run_entry, x) for x in batch]):
                yield future.result()


def line_of(outcome: Outcome) -> str:
    facts = outcome.facts
    detail = facts.error or "; ".join(facts.whole)
    return (
        f"{outcome.name:26} {facts.verdict:8} {facts.chunked}/{facts.attentions} "
        f"graphs {facts.graphs}+{facts.recompiled} error {outcome.difference:.1e} "
        f"{outcome.seconds:5.1f} s  {detail}"
    )


HEADER = """\
# Zoo

Made by `python tests/zoo.py` with torch {torch} and transformers {transformers}. Each row is a tiny
random model (2 layers, width 32) trained for one step at two lengths, with `chunk_len=8`, against
the untouched model. "found" counts attentions over the sequence, "chunked" those that run in
chunks. "error" is the largest relative difference of the loss or any gradient. What runs whole is
exact too; it costs memory.

{counts}
"""
COLUMNS = (
    "architecture",
    "graphs",
    "attentions found / chunked",
    "runs",
    "why not in chunks",
    "error",
    "dtype",
)


def row_of(entry: Entry, facts: Facts, difference: str) -> tuple[str, ...]:
    graphs = str(facts.graphs)
    if facts.recompiled:
        graphs += f" (+{facts.recompiled} at the second length)"
    why = facts.error or "; ".join(facts.whole)
    return (
        entry.name,
        graphs,
        f"{facts.attentions} / {facts.chunked}",
        facts.verdict,
        why.replace("|", "\\|"),
        difference,
        str(entry.dtype).removeprefix("torch."),
    )


def table(facts: dict[str, Facts], differences: dict[str, str]) -> str:
    counts: dict[str, int] = {}
    for name in facts:
        counts[facts[name].verdict] = counts.get(facts[name].verdict, 0) + 1
    total = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
    parts = [
        HEADER.format(
            torch=torch.__version__.split("+")[0],
            transformers=transformers.__version__,
            counts=f"{len(facts)} rows: {total}.",
        )
    ]
    for family in dict.fromkeys(entry.family for entry in ENTRIES.values()):
        rows = [
            row_of(entry, facts[name], differences.get(name, ""))
            for name, entry in ENTRIES.items()
            if entry.family == family and name in facts
        ]
        parts.append(f"## {family.capitalize()}\n\n{markdown(rows)}\n")
    return "\n".join(parts)


def markdown(rows: Iterable[tuple[str, ...]]) -> str:
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


ROW = re.compile(r"^\| (\S+) \|.*\| ([^|]*) \| [^|]* \|$", re.MULTILINE)


def differences_in(text: str) -> dict[str, str]:
    """The error column of a table written before."""
    rows = ROW.findall(text)
    return {name: error.strip() for name, error in rows if name in ENTRIES}


def write(outcomes: dict[str, Outcome]) -> None:
    """Both files, with the new outcomes in place of the old rows."""
    facts, old = expectations(), TABLE.read_text() if TABLE.exists() else ""
    facts.update({name: outcome.facts for name, outcome in outcomes.items()})
    facts = {name: facts[name] for name in ENTRIES if name in facts}
    differences = differences_in(old)
    differences.update({n: f"{o.difference:.0e}" for n, o in outcomes.items()})
    rows = {name: without_defaults(row) for name, row in facts.items()}
    EXPECTS.write_text(json.dumps(rows, indent=1) + "\n")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(facts, differences))


def without_defaults(facts: Facts) -> dict[str, Any]:
    values = asdict(facts)
    return {
        f.name: values[f.name] for f in fields(facts) if values[f.name] != f.default
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(ENTRIES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", help="write no file")
    options = parser.parse_args()
    unknown = [name for name in options.only if name not in ENTRIES]
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: allowed are {', '.join(ENTRIES)}")
    outcomes, wrong = {}, 0
    for outcome in run_all(options.only, options.jobs):
        outcomes[outcome.name] = outcome
        bad = not outcome.difference <= ENTRIES[outcome.name].tolerance
        wrong += bad
        print(line_of(outcome), "NOT EXACT" if bad else "", flush=True)
    if not options.dry_run:
        write(outcomes)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
