"""The contract suite over the shipped environments, and what is promised of each of them."""

import asyncio
import json
import subprocess
import sys

import pytest

from k3rl.envs import file_hunt, reason, registry
from k3rl.envs.checker.check import BAD, examine
from k3rl.envs.checker.suite import CHECKS
from k3rl.envs.play import play
from k3rl.errors import EnvError, SandboxError, UserInputError
from k3rl.types import Message, OutcomeKind, ToolCall, ToolStatus, TruncationCause, to_plain
from tests.envs.env_helpers import IDS, opened, with_case

VARIANTS = [
    *((env_id, {}) for env_id in IDS),
    ("k3rl/Reason-v0", {"preset": "arithmetic"}),
    pytest.param("k3rl/CodeRepair-v0", {"variant": "project"}, marks=pytest.mark.slow),
]
pytestmark = pytest.mark.sandbox
NUM_TASKS = 3
"""Of each split, in the default suite."""


async def finding_of(case, name):
    (found,) = await examine(case, [check for check in CHECKS if check.name == name])
    return found


@pytest.mark.parametrize(("env_id", "kwargs"), VARIANTS, ids=str)
@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_contract(tmp_path, env_id, kwargs, name):
    use = lambda case: finding_of(case, name)  # noqa: E731
    found = with_case(tmp_path, env_id, use, num_tasks=NUM_TASKS, **kwargs)
    assert found.verdict not in BAD, found.detail


@pytest.mark.slow
@pytest.mark.parametrize("env_id", IDS)
def test_contract_on_many_tasks(tmp_path, env_id):
    findings = with_case(tmp_path, env_id, lambda case: examine(case, CHECKS), num_tasks=32)
    assert not [found for found in findings if found.verdict in BAD]


def content(task):
    """What makes two tasks the same problem, seen from outside: files, and the opening."""
    env = registry.make(task.env_id)
    files = {path: data.decode() for path, data in env.files(task).items()}
    return json.dumps([files, to_plain(env.observe(task))], sort_keys=True)


@pytest.mark.parametrize(("env_id", "kwargs"), VARIANTS, ids=str)
def test_splits_share_no_task(env_id, kwargs):
    env = registry.make(env_id, **kwargs)
    is_dear = env_id in ("k3rl/CodeRepair-v0", "k3rl/Terminal-v0") or (env_id, kwargs) == (
        "k3rl/Reason-v0",
        {},
    )
    size = 300 if is_dear else 3000
    train = [env.task("train", index) for index in range(size)]
    heldout = [env.task("heldout", index) for index in range(size // 3)]
    assert not {task.seed for task in train} & {task.seed for task in heldout}
    assert not {content(task) for task in train} & {content(task) for task in heldout}
    assert len({content(task) for task in train}) > size / 2


def test_splits_stay_disjoint_across_settings():
    preset = {"preset": "arithmetic"}
    small = registry.make(
        "k3rl/Reason-v0", datasets=["chain_sum"], max_terms=2, max_digits=1, **preset
    )
    usual = registry.make("k3rl/Reason-v0", **preset)
    heldout = {content(small.task("heldout", index)) for index in range(300)}
    assert not heldout & {content(usual.task("train", index)) for index in range(3000)}
    assert len(heldout) > 10


def test_hunts_can_be_of_some_kinds_only():
    env = registry.make("k3rl/FileHunt-v0", kinds=["ls", "grep"])
    kinds = [env.task("train", index).metadata["kind"] for index in range(100)]
    assert min(kinds.count("ls"), kinds.count("grep")) > 30
    assert kinds.count("ls") + kinds.count("grep") == 100


def test_hunt_shapes():
    env = registry.make("k3rl/FileHunt-v0")
    tasks = [env.task("train", index) for index in range(1000)]
    shares = {
        kind: sum(task.metadata["kind"] == kind for task in tasks) for kind in file_hunt.KINDS
    }
    assert 700 < shares["cat"] < 880
    assert min(shares["ls"], shares["grep"]) > 50
    for task in tasks:
        hunt = file_hunt.generate(task.seed, **task.metadata)
        assert len(hunt.way) == task.metadata["num_pointers"]
        assert sum(text.split()[-1] == hunt.value for text in hunt.files.values()) == 1
        assert len({path.partition("/")[2] for path in hunt.files}) == len(hunt.files)


def test_longest_oracle_has_four_calls(tmp_path):
    async def use(case):
        tasks = [case.make().task("train", index) for index in range(30)]
        plays = [play(case.make(), task, case.policy("oracle"), case.backend) for task in tasks]
        return [len(played.records) for played in await asyncio.gather(*plays)]

    lengths = with_case(tmp_path, "k3rl/FileHunt-v0", use)
    assert set(lengths) == {2, 3, 4}


def call(tool, **arguments):
    return Message("assistant", tool_calls=(ToolCall(tool, arguments, 1),))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (call("cat", path="z/z9"), "cat: z/z9: No such file or directory"),
        (call("cat", path=""), "cat: '': No such file or directory"),
        (call("cat", path="."), "cat: .: Is a directory"),
        (call("ls", path="-l"), "ls: cannot access '-l': No such file or directory"),
        (call("ls", path="a b; echo x"), "ls: cannot access 'a b; echo x'"),
        (call("grep", pattern="nowhere", path="."), "exit status 1"),
        (call("grep", pattern="[", path="."), "grep: "),
        (call("cat", path="/etc/passwd"), "outside the workspace"),
        (call("ls", path="a/../.."), "outside the workspace"),
        (call("cat", path="a\0b"), "outside the workspace"),
        (call("grep", pattern="x" * 100_000, path="."), "bad pattern"),
    ],
)
def test_hunt_errors_are_real(tmp_path, message, says):
    async def use(case):
        env, *_ = await opened(case)
        return await env.act(message)

    step = with_case(tmp_path, "k3rl/FileHunt-v0", use)
    assert says in step.messages[0].content
    assert step.records[0].status is ToolStatus.ERROR
    assert not step.terminated


def test_grep_shows_real_lines_in_fixed_order(tmp_path):
    async def use(case):
        env, _, task, _ = await opened(case)
        return env.files(task), await env.act(call("grep", pattern="", path="."))

    files, step = with_case(tmp_path, "k3rl/FileHunt-v0", use)
    expected = sorted(f"./{path}:{data.decode().strip()}" for path, data in files.items())
    assert step.messages[0].content.split("\n") == expected


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("print(6*7)", ToolStatus.OK, "42"),
        ("x = 1", ToolStatus.OK, "(no output)"),
        ("print(1)\n1/0", ToolStatus.ERROR, "1\nZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", ToolStatus.ERROR, "exit status 3"),
        ("a\0b", ToolStatus.ERROR, None),
        ("while True: pass", ToolStatus.TIMEOUT, "timeout after 0.5 s"),
    ],
)
def test_python_tool(tmp_path, monkeypatch, code, status, output):
    monkeypatch.setattr(reason, "DEADLINE_S", 0.5 if status is ToolStatus.TIMEOUT else 5.0)

    async def use(case):
        env, *_ = await opened(case)
        return await env.act(call("python", code=code))

    step = with_case(tmp_path, "k3rl/Reason-v0", use)
    assert step.records[0].status is status
    assert output is None or step.messages[0].content == output


def test_long_output_is_bounded_and_says_so(tmp_path):
    async def use(case):
        env, *_ = await opened(case)
        return await env.act(call("python", code="print('x' * 1_000_000)"))

    step = with_case(tmp_path, "k3rl/Reason-v0", use)
    assert len(step.messages[0].content) < 2200
    assert "bytes dropped" in step.messages[0].content


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("{}", 1.0), (" {}\n", 1.0), ("{}.5", 0.0), ("", 0.0), ("nan", 0.0), ("\ud800", 0.0)],
)
def test_only_the_right_number_is_rewarded(tmp_path, answer, reward):
    async def use(case):
        env, _, task, _ = await opened(case)
        result = eval(env.observe(task).messages[0].content.removesuffix("=?"))
        step = await env.act(Message("assistant", answer.format(result)))
        return step, await env.grade()

    step, outcome = with_case(tmp_path, "k3rl/Reason-v0", use, preset="arithmetic")
    assert step.terminated
    assert (outcome.kind, outcome.reward) == (OutcomeKind.COMPLETED, reward)


def test_turn_limit_is_a_truncation(tmp_path):
    async def use(case):
        task = case.make().task("train", 0)
        return await play(case.make(), task, lambda *_: call("ls", path="."), case.backend)

    outcome = with_case(tmp_path, "k3rl/FileHunt-v0", use).outcome
    assert (outcome.kind, outcome.cause) == (OutcomeKind.TRUNCATED, TruncationCause.TURNS)
    assert outcome.reward_parts["complete"] == 0.0


def test_calls_after_submit_do_not_run(tmp_path):
    calls = tuple(ToolCall("submit", {"value": str(n)}, n) for n in (1, 2))

    async def use(case):
        env, *_ = await opened(case)
        return await env.act(Message("assistant", tool_calls=calls)), env.state()

    step, state = with_case(tmp_path, "k3rl/FileHunt-v0", use)
    assert (step.terminated, len(step.records), state["answer"]) == (True, 1, "1")


def test_a_lost_sandbox_is_an_infrastructure_failure(tmp_path):
    async def use(case):
        env, sandbox, *_ = await opened(case)
        await case.backend.close(sandbox.id)
        with pytest.raises(SandboxError):
            await env.act(call("ls", path="."))

    with_case(tmp_path, "k3rl/FileHunt-v0", use)


RESUME = """
import asyncio, json, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.factory import open_backend
from k3rl.types import Message, Snapshot, Task, from_plain, philox, to_plain

async def main(root, left):
    backend = open_backend("bwrap", BlobStore(root / "blobs"), root / "other", False)
    env = registry.make(left["env_id"])
    task = from_plain(Task, left["task"])
    id = await backend.restore(env.sandbox_spec, from_plain(Snapshot, left["snapshot"]))
    await env.open(task, Sandbox(backend, id), left["state"])
    transcript = [from_plain(Message, message) for message in left["transcript"]]
    oracle, terminated = registry.policy(left["env_id"], "oracle"), False
    while not terminated:
        message = oracle(task, tuple(transcript), philox(0, task.key, 0))
        step = await env.act(message)
        transcript += [message, *step.messages]
        terminated = step.terminated
    outcome = await env.grade()
    await backend.aclose()
    print(json.dumps([[to_plain(m) for m in transcript], outcome.reward, outcome.reward_parts]))

asyncio.run(main(Path(sys.argv[1]), json.load(sys.stdin)))
"""


@pytest.mark.parametrize("env_id", IDS)
def test_another_process_carries_on_from_a_snapshot(tmp_path, env_id):
    async def use(case):
        tasks = (case.make().task("train", index) for index in range(100))
        task = next(task for task in tasks if task.metadata.get("num_pointers", 3) == 3)
        whole = await play(case.make(), task, case.policy("oracle"), case.backend)
        env, sandbox, task, transcript = await opened(case, task=task)
        message = case.policy("oracle")(task, tuple(transcript), None)
        transcript += [message, *(await env.act(message)).messages]
        snapshot = await case.backend.snapshot(sandbox.id, {})
        return whole, {
            "env_id": env_id,
            "task": to_plain(task),
            "snapshot": to_plain(snapshot),
            "state": env.state(),
            "transcript": [to_plain(message) for message in transcript],
        }

    whole, left = with_case(tmp_path, env_id, use)
    argv = [sys.executable, "-c", RESUME, str(tmp_path)]
    done = subprocess.run(argv, input=json.dumps(left), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcome = whole.outcome
    assert json.loads(done.stdout) == [
        [to_plain(message) for message in whole.transcript],
        outcome.reward,
        outcome.reward_parts,
    ]


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("k3rl/FileHunt-v0", {"max_pointers": 4}),
        ("k3rl/FileHunt-v0", {"kinds": ["cat", "find"]}),
        ("k3rl/FileHunt-v0", {"kinds": []}),
        ("k3rl/Reason-v0", {"preset": "maths"}),
        ("k3rl/Reason-v0", {"datasets": ["algebra"]}),
        ("k3rl/Reason-v0", {"max_terms": 1}),
        ("k3rl/Terminal-v0", {"kinds": ["vim"]}),
    ],
)
def test_bad_settings_are_named(env_id, kwargs):
    with pytest.raises(UserInputError, match=next(iter(kwargs))):
        registry.make(env_id, **kwargs)


@pytest.mark.parametrize("env_id", IDS)
def test_foreign_metadata_is_refused(env_id):
    env = registry.make(env_id)
    task = env.task("train", 0)
    task.metadata.clear()
    with pytest.raises(UserInputError):
        env.observe(task)


def test_grader_failure_is_not_a_reward(tmp_path):
    async def use(case):
        env, _, task, _ = await opened(case)
        await env.act(Message("assistant", "1"))
        task.metadata["dataset"] = "gone"
        with pytest.raises(EnvError, match="grading failed"):
            await env.grade()

    with_case(tmp_path, "k3rl/Reason-v0", use)
