"""What a task's workspace holds: one file with a bug, or a small package with one somewhere.

Both hold public tests, which the policy may read, run and change. They decide nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path

from k3rl.envs.code_repair.grading import Part
from k3rl.envs.code_repair.problems import Problem
from k3rl.envs.code_repair.table import ENV_ID, Mutant, mutants, rows_of
from k3rl.errors import EnvError
from k3rl.types import philox

VARIANTS = ("function", "project")
NUM_FUNCTIONS = 4
"""Of a project."""
NUM_PUBLIC = 3
"""Public cases of a function that has no bug."""
PYTEST_ZIP = ".pytest.zip"
PACKAGE = "toolbox"
REGISTRY = '''"""The functions of this package, by name."""

FUNCTIONS = {}


def register(function):
    """Add a function."""
    FUNCTIONS[function.__name__] = function
    return function
'''
INIT = '"""Small functions; `toolbox.api` has all of them."""\n'


@dataclass(frozen=True, slots=True)
class Workspace:
    """A task's files, where the bug is, and what must hold in the end."""

    files: dict[str, bytes]
    broken: str
    """The path of the file with the bug."""
    repaired: str
    """What that file holds without it."""
    parts: tuple[Part, ...]
    paths: tuple[str, ...]
    """Files that must be there as plain files when the work is judged."""


@lru_cache(maxsize=256)
def workspace(row: int, split: str, variant: str) -> Workspace:
    """The workspace of a mutant. Equal arguments give equal bytes."""
    mutant = mutants()[row]
    return _function(mutant) if variant == "function" else _project(row, split, mutant)


def _function(mutant: Mutant) -> Workspace:
    problem = mutant.right()
    tests = _tests(problem, "solution", mutant.seen)
    files = {"solution.py": mutant.source().encode(), "test_solution.py": tests.encode()}
    parts = (Part(problem, "solution"),)
    return Workspace(files, "solution.py", problem.source, parts, ("solution.py",))


def _project(row: int, split: str, mutant: Mutant) -> Workspace:
    """A package of several functions, one module each; the others are of the same split."""
    functions = [mutant.right(), *_companions(row, split, mutant)]
    sources = {problem.name: _module(problem, problem.source) for problem in functions}
    repaired = sources[mutant.right().name]
    sources[mutant.right().name] = _module(mutant.right(), mutant.source())
    names = sorted(sources)
    texts = {f"{PACKAGE}/{name}.py": sources[name] for name in names}
    texts |= {f"{PACKAGE}/__init__.py": INIT, f"{PACKAGE}/registry.py": REGISTRY}
    texts[f"{PACKAGE}/api.py"] = _api(names)
    paths = tuple(sorted(texts))
    for problem in functions:
        seen = mutant.seen if problem.number == mutant.problem else _first_cases(problem)
        texts[f"tests/test_{problem.name}.py"] = _tests(problem, f"{PACKAGE}.api", seen)
    files = {path: text.encode() for path, text in sorted(texts.items())}
    parts = tuple(Part(problem, f"{PACKAGE}.api") for problem in functions)
    broken = f"{PACKAGE}/{mutant.right().name}.py"
    return Workspace({**files, PYTEST_ZIP: pytest_zip()}, broken, repaired, parts, paths)


def _companions(row: int, split: str, mutant: Mutant) -> Iterable[Problem]:
    others = {mutants()[other].problem: mutants()[other] for other in rows_of(split)}
    drawn = philox(row, ENV_ID, "project").permutation(sorted(others))
    names = {mutant.right().name}
    for number in drawn:
        problem = others[int(number)].right()
        if len(names) < NUM_FUNCTIONS and problem.name not in names:
            names.add(problem.name)
            yield problem


def _module(problem: Problem, source: str) -> str:
    head, foot = f"from {PACKAGE}.registry import register\n", f"register({problem.name})\n"
    return f"{head}{source.rstrip()}\n\n\n{foot}"


def _api(names: Sequence[str]) -> str:
    imports = "".join(f"from {PACKAGE}.{name} import {name}\n" for name in names)
    return (
        f'"""What this package offers."""\n\n{imports}'
        f"from {PACKAGE}.registry import FUNCTIONS\n\n\n"
        'def call(name, *arguments):\n    """Call a function by its name."""\n'
        "    return FUNCTIONS[name](*arguments)\n"
    )


def _first_cases(problem: Problem) -> tuple[int, ...]:
    order = sorted(range(len(problem.cases)), key=lambda i: (i not in problem.shown, i))
    return tuple(sorted(order[:NUM_PUBLIC]))


def _tests(problem: Problem, module: str, seen: Iterable[int]) -> str:
    """Public tests of a function, for run_tests and for pytest alike."""
    name = problem.name
    text = f"from {module} import {name}\n\n\ndef test_is_there():\n    assert callable({name})\n"
    for number, case in enumerate((problem.cases[i] for i in seen), 1):
        text += (
            f"\n\ndef test_{number}():\n    result = {name}({case.call})\n"
            f'    assert result == {case.expected}, f"the result is {{result!r}}"\n'
        )
    return text


PACKER = r"""
import importlib.metadata, pathlib, py_compile, sys, zipfile
names, places, target = eval(sys.argv[1]), eval(sys.argv[2]), pathlib.Path(sys.argv[3])
cache = target.with_suffix(".pyc")
unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
    for name in names:
        for path in sorted(str(file) for file in importlib.metadata.distribution(name).files):
            is_deep = name == "pygments" and path.count("/") > 1
            if not path.endswith(".py") or path.startswith("..") or is_deep and path not in places:
                continue
            file = str(importlib.metadata.distribution(name).locate_file(path))
            py_compile.compile(file, cache, path, doraise=True, invalidation_mode=unchecked)
            for entry, data in ((path, pathlib.Path(file)), (path + "c", cache)):
                archive.writestr(zipfile.ZipInfo(entry), data.read_bytes(), zipfile.ZIP_DEFLATED)
"""
PYTEST_PARTS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
PYGMENTS_FILES = tuple(
    f"pygments/{name}.py"
    for name in (
        "lexers/__init__",
        "lexers/_mapping",
        "lexers/python",
        "lexers/diff",
        "formatters/__init__",
        "formatters/_mapping",
        "formatters/terminal",
        "styles/__init__",
        "styles/_mapping",
        "styles/default",
        "filters/__init__",
    )
)
"""What of pygments' subpackages pytest imports; all of them are ten times as much."""


@cache
def pytest_zip() -> bytes:
    """The installed pytest and what it imports, as one importable file; about a second, once.

    A fresh interpreter packs it, so that equal packages give equal bytes. It holds source beside
    compiled code, which another Python version passes over. Raises EnvError.
    """
    for name in PYTEST_PARTS:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise EnvError(
                f"{ENV_ID}: the variant project needs the package {name}: pip install pytest"
            ) from None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "pytest.zip"
        argv = [sys.executable, "-I", "-c", PACKER, repr(PYTEST_PARTS), repr(PYGMENTS_FILES)]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run([*argv, str(target)], env=environment, capture_output=True)
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise EnvError(f"{ENV_ID}: cannot pack pytest: {last}")
        return target.read_bytes()
