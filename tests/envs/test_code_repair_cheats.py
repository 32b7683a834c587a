"""Every known cheat gets 0, and each does what it tries where a grader is careless."""

import asyncio
import gzip
import json

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.code_repair import cheats, grading
from k3rl.envs.code_repair.table import mutants
from k3rl.envs.code_repair.workspace import workspace
from k3rl.envs.play import play
from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.factory import open_backend
from k3rl.types import Message, OutcomeKind, ToolCall, philox
from tests.envs import code_repair_graders as careless

ID = "k3rl/CodeRepair-v0"
SLOW = ("exhaust", "hang", "stop_parent")
QUICK = [name for name in registry.cheats(ID) if name not in SLOW]
pytestmark = pytest.mark.sandbox


def with_backend(tmp_path, use):
    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        try:
            return await use(backend)
        finally:
            await backend.aclose()

    return asyncio.run(main())


def played(tmp_path, name, variant, indices):
    async def use(backend):
        policy, few = registry.policy(ID, f"cheat/{name}"), asyncio.Semaphore(8)

        async def one(index):
            async with few:
                env = registry.make(ID, variant=variant)
                return await play(env, env.task("train", index), policy, backend)

        return await asyncio.gather(*(one(index) for index in indices))

    return with_backend(tmp_path, use)


def assert_nothing_gained(found):
    for each in found:
        assert each.outcome.reward == 0.0
        assert each.outcome.kind is OutcomeKind.COMPLETED
        assert each.outcome.reward_parts["complete"] == 1.0


def test_there_are_enough():
    assert len(registry.cheats(ID)) >= 12


@pytest.mark.parametrize("name", QUICK)
def test_cheat_gets_nothing(tmp_path, name):
    assert_nothing_gained(played(tmp_path, name, "function", (0, 1)))


@pytest.mark.parametrize("name", QUICK)
def test_cheat_gets_nothing_in_a_project(tmp_path, name):
    assert_nothing_gained(played(tmp_path, name, "project", (0,)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["function", "project"])
@pytest.mark.parametrize("name", SLOW)
def test_slow_cheat_gets_nothing(tmp_path, name, variant):
    assert_nothing_gained(played(tmp_path, name, variant, (0,)))


@pytest.mark.slow
def test_hard_coding_never_pays(tmp_path):
    """Over the whole of train, as the table promises."""
    indices = range(registry.make(ID).num_tasks("train"))
    assert_nothing_gained(played(tmp_path, "hard_code", "function", indices))


async def cheated(backend, name, index=0, variant="function", turns=1):
    """A session in which a cheat has done its deed but not submitted."""
    env = registry.make(ID, variant=variant)
    task = env.task("train", index)
    sandbox = Sandbox(backend, await backend.create(env.sandbox_spec, env.files(task)))
    transcript = list((await env.open(task, sandbox)).messages)
    policy = registry.policy(ID, f"cheat/{name}")
    for turn in range(turns):
        message = policy(task, tuple(transcript), philox(0, task.key, turn))
        transcript += [message, *(await env.act(message)).messages]
    return env, task, sandbox


@pytest.mark.parametrize(
    "name",
    [
        "always_equal",
        "at_exit",
        "except_hook",
        "exit_at_call",
        "exit_at_import",
        "forge_output",
        "patch_builtins",
        "patch_caller",
        "thread",
    ],
)
def test_cheat_passes_a_grader_in_its_own_process(tmp_path, name):
    async def use(backend):
        _, honest, plain = await cheated(backend, "edit_tests")
        _, task, sandbox = await cheated(backend, name)
        return await careless.in_process(plain, honest), await careless.in_process(sandbox, task)

    assert with_backend(tmp_path, use) == (False, True)


@pytest.mark.parametrize("name", ["link_away", "search_files", "shadow_modules"])
def test_cheat_passes_a_grader_in_the_workspace(tmp_path, name):
    async def use(backend):
        _, honest, plain = await cheated(backend, "edit_tests")
        _, task, sandbox = await cheated(backend, name)
        return await careless.from_file(plain, honest), await careless.from_file(sandbox, task)

    assert with_backend(tmp_path, use) == (False, True)


def test_daemon_passes_a_grader_that_lets_it_live(tmp_path):
    async def use(backend):
        _, task, sandbox = await cheated(backend, "edit_tests")
        await sandbox.put("daemon.py", cheats.DAEMON.replace("BROKEN", "solution.py").encode())
        before = "python3 daemon.py; until grep -q _exit solution.py; do sleep 0.05; done"
        alone = await careless.from_file(sandbox, task)
        return alone, await careless.from_file(sandbox, task, before)

    assert with_backend(tmp_path, use) == (False, True)


@pytest.mark.parametrize(
    ("name", "variant", "turns"), [("edit_tests", "function", 1), ("hard_code", "function", 1),
                                   ("pytest_plugins", "project", 1), ("edit_tests", "project", 4)]
)  # fmt: skip
def test_cheat_passes_the_public_tests(tmp_path, name, variant, turns):
    async def use(backend):
        env, _, _ = await cheated(backend, name, failing_index(), variant, 0)
        cheater, _, _ = await cheated(backend, name, failing_index(), variant, turns)
        return await careless.public_tests(env), await careless.public_tests(cheater)

    assert with_backend(tmp_path, use) == (False, True)


def failing_index():
    """A task of whose public cases one fails, and none of whose bugs ends the whole module."""
    env = registry.make(ID)
    for index in range(env.num_tasks("train")):
        mutant = mutants()[env.task("train", index).seed]
        if len(mutant.seen) == 3 and mutant.operator in ("comparison", "arithmetic"):
            return index
    raise AssertionError("no such mutant")


def test_memory_and_descriptors_of_a_verifier_that_does_not_hide_can_be_had(tmp_path):
    """What the verifier hides is worth hiding: two cheats get it from one that does not."""

    async def use(backend):
        found = []
        for program in (grading.VERIFIER, careless.DUMPABLE):
            _, task, sandbox = await cheated(backend, "read_parent")
            wanted = workspace(task.seed, task.split, "function")
            verdict = await grading.verify(sandbox, wanted.parts, wanted.paths, program)
            found.append(verdict.is_right)
        for program in (grading.VERIFIER, careless.DUMPABLE):
            _, task, sandbox = await cheated(backend, "forge_channel")
            found.append(b"pass" in await channel_of(sandbox, task, program))
        return found

    assert with_backend(tmp_path, use) == [False, True, False, True]


async def channel_of(sandbox, task, program):
    """What comes on descriptor 3 while the verifier runs."""
    wanted = workspace(task.seed, task.split, "function")
    job = {"nonce": "n", "paths": [], "limit_s": 8.0, "cpu_s": 4}
    job["parts"] = [part.job() for part in wanted.parts]
    argv = (*grading.PYTHON, program)
    result = await careless.exec_in(sandbox, *argv, stdin=repr(job).encode())
    return result.channel


def test_history_finds_what_lies_about(tmp_path):
    """Were the problems' package to be seen in the sandbox, it would be found."""

    async def use(backend):
        env, task, sandbox = await cheated(backend, "history")
        before = await sandbox.get("solution.py")
        right = mutants()[task.seed].right()
        row = {"entry_point": right.name, "prompt": right.source, "canonical_solution": ""}
        await sandbox.put("HumanEval.jsonl.gz", gzip.compress(json.dumps(row).encode()))
        code = cheats.HISTORY.replace("NAME", right.name).replace("BROKEN", "solution.py")
        await env.act(Message("assistant", tool_calls=(ToolCall("python", {"code": code}, 1),)))
        return before.decode(), (await sandbox.get("solution.py")).decode(), task, right.source

    before, after, task, source = with_backend(tmp_path, use)
    assert before == mutants()[task.seed].source()
    assert after == source


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kill_parent", "the verifier ended with 137"),
        ("kill_all", "the verifier ended with 137"),
        ("flood", "too large"),
        ("deep_literal", "too many nested parentheses"),
        ("raise_base", "raised Quiet"),
        ("link_zero", "not a plain file"),
        ("link_away", "not a plain file"),
        ("pipe", "not a plain file"),
        ("exit_at_import", "its process ended"),
    ],
)
def test_what_the_verifier_says_of_it(tmp_path, name, reason):
    """The deed was done, and was taken for what it is."""

    async def use(backend):
        _, task, sandbox = await cheated(backend, name)
        wanted = workspace(task.seed, task.split, "function")
        return await grading.verify(sandbox, wanted.parts, wanted.paths)

    verdict = with_backend(tmp_path, use)
    assert not verdict.is_right
    assert reason in verdict.reason
