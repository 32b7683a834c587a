"""k3rl/CodeRepair-v0: find the one bug in a function, or in a small package, and repair it.

The bugs are single edits of HumanEval's solutions (arXiv 2107.03374; `table.py`). The policy reads,
edits, runs and tests files; when it ends, a fork of its final state is judged by hidden checks that
no tool has seen (`grading.py`). What it says does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3rl.envs.base import EnvSpec, Normaliser, Observation
from k3rl.envs.code_repair.grading import let_in, verify
from k3rl.envs.code_repair.table import ENV_ID, mutants, row_at, rows_of
from k3rl.envs.code_repair.workspace import PYTEST_ZIP, VARIANTS, Workspace, workspace
from k3rl.envs.interpreter import PYTHON
from k3rl.envs.session import ToolSession
from k3rl.envs.tools import SHOWN_BYTES, Tool, ToolOutput, command_output, run_command
from k3rl.errors import GraderError, UncapturableTree, UserInputError
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import JsonObject, Message, Task, TaskLimits, ToolStatus

LIMITS = TaskLimits(max_turns=12, max_context_tokens=16384, max_time_s=600.0)
DEADLINE_S = 10.0
MAX_FILE_BYTES = 64 * 1024
"""Of what is viewed or written by a tool."""
MAX_PATH_CHARS = 200
PROMPTS = {
    "function": (
        "solution.py holds a function with one bug: it does not do what its docstring says. "
        "test_solution.py holds public tests. Repair solution.py, then call submit. "
        "More tests, which you cannot see, decide."
    ),
    "project": (
        "The package toolbox holds several functions, one of which has a bug: it does not do what "
        "its docstring says. tests/ holds public tests. Repair it, then call submit. "
        "More tests, of all functions, which you cannot see, decide. Keep every file in its place."
    ),
}
EMPTY = "chmod -R u+rwX . && find . -mindepth 1 -delete"
RUN_TESTS = r"""
import sys, traceback
try:
    import test_solution
except BaseException as error:
    print("cannot import test_solution:", traceback.format_exception_only(error)[-1].strip())
    sys.exit()
tests = {name: each for name, each in vars(test_solution).items() if name.startswith("test_")}
passed = 0
for name, test in tests.items():
    try:
        test()
    except BaseException as error:
        print(name, "failed:", traceback.format_exception_only(error)[-1].strip())
    else:
        passed += 1
        print(name, "passed")
print(passed, "of", len(tests), "passed")
"""
RUN_PYTEST = f"""
import sys
sys.path[0] = ""
sys.path.append({PYTEST_ZIP!r})
import pytest
sys.exit(pytest.main(["-q", "--color=no", "--tb=short", "-p", "no:cacheprovider", "tests"]))
"""
RUNNERS = {"function": RUN_TESTS, "project": RUN_PYTEST}
ADDRESSES = Normaliser(
    "addresses",
    r"\b0x[0-9a-f]{8,16}\b",
    "0x...",
    hides=("<function f at 0x7f1c2a9b3d00>", "<function f at 0x55d0aa10c0e0>"),
    keeps=("0x1f", "0x2f"),
)
DURATIONS = Normaliser(
    "durations",
    r"\b((?:passed|failed|errors?|skipped|warnings?|deselected|tests ran)) in \d+\.\d\ds\b",
    r"\1",
    hides=("1 failed, 1 passed in 0.02s", "1 failed, 1 passed in 0.11s"),
    keeps=("1 failed, 1 passed in 0.02s", "2 passed in 0.02s"),
)


class CodeRepair(ToolSession):
    """One session of k3rl/CodeRepair-v0."""

    # Without a bytecode cache and with fixed hashing, a re-run leaves the same files and output.
    sandbox_spec = SandboxSpec(
        environment={"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
        executables=("python3",),
    )
    normalisers = (ADDRESSES, DURATIONS)

    def __init__(self, spec: EnvSpec, variant: str = "function") -> None:
        """`variant`: function is one file and its tests, project a package tested by pytest."""
        if variant not in VARIANTS:
            raise UserInputError(
                f"{spec.id}: variant {variant!r}, use one of {', '.join(VARIANTS)}"
            )
        super().__init__(spec)
        self._variant = variant

    def make_tools(self) -> Sequence[Tool]:
        """View, edit, run, test, submit."""
        each = (self.view, self.replace, self.write, self.python, self.run_tests, self.submit)
        return tuple(Tool.of(function) for function in each)

    def num_tasks(self, split: str) -> int:
        """How many different tasks a split has; so many first indices are all of them."""
        return len(rows_of(split))

    def task(self, split: str, index: int) -> Task:
        """A mutant. Each run of `num_tasks` indices is a permutation of the split's mutants."""
        row = row_at(split, index)
        metadata: JsonObject = {"variant": self._variant, "mutant": mutants()[row].digest}
        return Task(self.spec.id, row, split, metadata, LIMITS)

    def files(self, task: Task) -> Mapping[str, bytes]:
        """The code with the bug, the public tests, and for a project pytest itself."""
        return dict(workspace_of(task).files)

    def observe(self, task: Task) -> Observation:
        """What is to be done; the code itself is in the files."""
        workspace_of(task)
        return Observation((Message("user", PROMPTS[task.metadata["variant"]]),))

    async def judge(self, task: Task) -> Mapping[str, float]:
        """1 when every function of the final state passes its hidden check."""
        return {"correct": float(await self._is_right(workspace_of(task)))}

    async def _is_right(self, wanted: Workspace) -> bool:
        """Raises GraderError only when the verifier fails on a right workspace too.

        What the policy left may keep it from starting, disk limits that are exceeded for one. It is
        tried twice, so that one mishap of the machine is not the policy's.
        """
        for _ in range(2):
            try:
                async with self.final_fork() as fork:
                    await let_in(fork)
                    return (await verify(fork, wanted.parts, wanted.paths)).is_right
            except UncapturableTree:
                return False
            except GraderError:
                continue
        await self._prove_verifier(wanted)
        return False

    async def _prove_verifier(self, wanted: Workspace) -> None:
        """Raise GraderError unless an emptied workspace with the right files is found right.

        One that cannot be emptied is its maker's fault. It is a fork, for which a full pool has
        room where it has none for a new sandbox.
        """
        files = {**wanted.files, wanted.broken: wanted.repaired.encode()}
        async with self.final_fork() as proof:
            if (await proof.run("sh", "-c", EMPTY)).exit_code != 0:
                return
            for path, data in files.items():
                await proof.put(path, data)
            verdict = await verify(proof, wanted.parts, wanted.paths)
        if not verdict.is_right:
            raise GraderError(f"{ENV_ID}: the right files are found wrong: {verdict.reason}")

    def no_calls(self, message: Message) -> str:
        """Ending without a submission; what the files hold by then is judged all the same."""
        self.finish(None)
        return ""

    async def view(self, path: str) -> ToolOutput | str:
        """Show a file."""
        text = await self._read(path)
        return text if isinstance(text, ToolOutput) else text or "(empty)"

    async def replace(self, path: str, old: str, new: str) -> ToolOutput | str:
        """Replace a text that stands once in a file."""
        text = await self._read(path)
        if isinstance(text, ToolOutput):
            return text
        number = text.count(old) if old else 0
        if number != 1:
            return _error(f"replace: {path} holds the old text {number} times, not once")
        return await self._write(path, text.replace(old, new))

    async def write(self, path: str, content: str) -> ToolOutput | str:
        """Write a whole file."""
        return await self._write(path, content)

    async def python(self, code: str) -> ToolOutput:
        """Run Python in the workspace."""
        source = code.encode()
        result = await run_command(self.sandbox, *PYTHON, stdin=source, deadline_s=DEADLINE_S)
        return command_output(result, DEADLINE_S)

    async def run_tests(self) -> ToolOutput:
        """Run the public tests."""
        runner = ("python3", "-S", "-s", "-c", RUNNERS[self._variant])
        result = await run_command(self.sandbox, *runner, deadline_s=DEADLINE_S)
        return command_output(result, DEADLINE_S)

    async def submit(self) -> str:
        """Hand in the files as they are."""
        self.finish("submitted")
        return ""

    async def _read(self, path: str) -> str | ToolOutput:
        """A file's text, or what to answer instead."""
        problem = _path_problem(path)
        if problem is not None:
            return problem
        try:
            data = await self.sandbox.backend.get(self.sandbox.id, path, MAX_FILE_BYTES)
        except UserInputError as error:
            return _error(str(error))
        return data.decode(errors="replace")

    async def _write(self, path: str, content: str) -> ToolOutput | str:
        problem = _path_problem(path)
        if problem is not None:
            return problem
        data = content.encode()
        if len(data) > MAX_FILE_BYTES:
            return _error(f"{path}: more than {MAX_FILE_BYTES} bytes")
        try:
            await self.sandbox.put(path, data)
        except UserInputError as error:
            return _error(str(error))
        return f"wrote {path}"


def workspace_of(task: Task) -> Workspace:
    """A task's workspace. Raises UserInputError for a task that the table does not hold."""
    variant, digest = task.metadata.get("variant"), task.metadata.get("mutant")
    is_known = 0 <= task.seed < len(mutants()) and mutants()[task.seed].digest == digest
    if not is_known or task.seed not in rows_of(task.split) or variant not in VARIANTS:
        raise UserInputError(f"{ENV_ID}: no task has seed {task.seed} and {task.metadata}")
    return workspace(task.seed, task.split, str(variant))


def _error(text: str) -> ToolOutput:
    return ToolOutput(f"error: {text}"[:SHOWN_BYTES], ToolStatus.ERROR)


def _path_problem(path: str) -> ToolOutput | None:
    """Only the workspace may be named."""
    parts = path.split("/")
    is_bad = not path or path.startswith("/") or ".." in parts or "\0" in path
    return _error("path outside the workspace") if is_bad or len(path) > MAX_PATH_CHARS else None
