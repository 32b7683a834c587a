"""Many sessions: faults, deadlines, cancellation, fairness; nothing leaks and counts add up."""

import asyncio
import re
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.blobs import BlobStore
from k3rl.envs.base import EnvSpec
from k3rl.envs.phases import Deadlines
from k3rl.envs.play import play
from k3rl.envs.sessions import Job, SessionPool
from k3rl.envs.slots import FairSlots
from k3rl.errors import SandboxError, UserInputError
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import OutcomeKind, TruncationCause
from tests.envs.chaos import NAME, Chaos, Counting, in_loop, oracle, sleeper

pytestmark = pytest.mark.sandbox
SPEC = EnvSpec(NAME, "tests.envs.chaos:Counting")
SHORT = Deadlines(boot_s=4.0, step_s=4.0, grade_s=4.0, close_s=4.0)


@asynccontextmanager
async def opened(tmp_path, **chances):
    """A backend with chaos in front of it; whatever the test did, no sandbox of it is left."""
    real = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
    try:
        yield Chaos(real, **chances)
        folders = [p.name for p in real.scratch.owner.iterdir()]
        assert not [name for name in folders if re.fullmatch(r"[0-9a-f]{16}", name)]
        assert real._boxes == {}
    finally:
        await real.aclose()


def job(index=0, policy=oracle, queue="", **settings):
    make = lambda: Counting(SPEC, **settings)  # noqa: E731
    return Job(make().task("train", index), policy, make, queue=queue)


def total(pool):
    return pool.counts[NAME]


@pytest.mark.parametrize(
    ("seed", "chance", "hang"),
    [(0, 0.02, 0.0), (1, 0.1, 0.0), (2, 0.1, 0.03), (3, 0.25, 0.0), (4, 0.25, 0.03)],
)
def test_chaos_leaks_nothing_rewards_nothing_and_counts_add_up(tmp_path, seed, chance, hang):
    async def main():
        chances = dict.fromkeys(("create", "exec", "fork", "close"), chance)
        hangs = {"create_hang": hang, "fork_hang": hang}
        async with opened(tmp_path, seed=seed, **chances, **hangs) as backend:
            pool = SessionPool(backend, 8, SHORT, max_retries=1)
            results = await pool.play_all([job(index) for index in range(16)])
            return backend, pool, results

    backend, pool, results = asyncio.run(main())
    counts = total(pool)
    played = [result.played for result in results if result.played is not None]
    assert all(each.outcome.reward == 1.0 and len(each.transcript) == 8 for each in played)
    excluded = [result for result in results if result.played is None]
    assert all(result.outcome.kind is OutcomeKind.INFRA_FAULT for result in excluded)
    assert all(result.outcome.reward is None for result in excluded)
    assert (counts.num_played, counts.num_excluded) == (len(played), len(excluded))
    assert counts.num_jobs == len(results) == 16
    assert counts.faults == Counter(fault.name for r in results for fault in r.faults)
    assert counts.faults.total() == counts.num_retries + counts.num_excluded
    assert {name.partition("/")[2] for name in counts.faults} <= {"sandbox", "deadline"}
    assert counts.num_left_behind == 0
    assert backend.num_faults
    names = [fault.incarnation for result in results for fault in result.faults]
    assert len(set(names)) == len(names)


@in_loop
async def test_infrastructure_is_tried_again_and_then_excluded(tmp_path):
    async with opened(tmp_path, create=1.0) as backend:
        pool = SessionPool(backend, max_retries=2)
        result = await pool.play(job())
    assert [fault.name for fault in result.faults] == ["boot/sandbox"] * 3
    assert result.outcome.kind is OutcomeKind.INFRA_FAULT
    assert (total(pool).num_retries, total(pool).num_excluded) == (2, 1)


@pytest.mark.parametrize(
    ("fault", "name", "said"),
    [
        ("files", "boot/environment", "KeyError"),
        ("open", "boot/environment", "not today"),
        ("tool", "step/environment", "tool add: LookupError"),
        ("judge", "grade/grader", "ZeroDivisionError"),
    ],
)
@in_loop
async def test_an_authors_bug_is_named_and_ends_no_other_session(tmp_path, fault, name, said):
    async with opened(tmp_path) as backend:
        pool = SessionPool(backend, 4)
        jobs = [job(1, fault=fault), job(2), job(3)]
        broken, *others = await pool.play_all(jobs)
    (found,) = broken.faults
    assert found.name == name
    assert said in found.detail
    assert NAME in found.detail
    assert broken.outcome.kind is OutcomeKind.GRADER_FAULT
    assert broken.outcome.reward is None
    assert [each.outcome.reward for each in others] == [1.0, 1.0]
    assert total(pool).num_retries == 0


@in_loop
async def test_a_policy_that_fails_and_a_class_that_cannot_be_made_are_excluded(tmp_path):
    def bad(task, transcript, rng):
        raise RuntimeError("speechless")

    def unmade():
        raise TypeError("no class")

    async with opened(tmp_path) as backend:
        pool = SessionPool(backend, 4)
        spoken, made = await pool.play_all([job(1, bad), Job(job().task, oracle, unmade)])
    assert spoken.faults[0].name == "step/environment"
    assert "speechless" in spoken.faults[0].detail
    assert made.faults[0].name == "boot/environment"


@in_loop
async def test_a_hanging_boot_or_grade_is_the_machines_fault(tmp_path):
    for hang, name in (("create_hang", "boot/deadline"), ("fork_hang", "grade/deadline")):
        async with opened(tmp_path / hang, **{hang: 1.0}) as backend:
            limits = Deadlines(boot_s=9.0, grade_s=1.0)
            pool = SessionPool(backend, deadlines=limits, max_retries=0)
            result = await pool.play(job())
        assert [fault.name for fault in result.faults] == [name]
        assert result.outcome.reward is None


@in_loop
async def test_a_tool_that_outlives_its_step_is_cut_off_and_its_state_graded(tmp_path):
    async with opened(tmp_path) as backend:
        limits = Deadlines(step_s=0.5)
        result = await SessionPool(backend, deadlines=limits).play(job(policy=sleeper))
    assert result.faults == ()
    outcome = result.outcome
    assert (outcome.kind, outcome.cause) == (OutcomeKind.TRUNCATED, TruncationCause.TIME)
    assert outcome.reward == 0.0


@in_loop
async def test_a_backend_that_hangs_is_told_from_a_command_that_does(tmp_path):
    async with opened(tmp_path) as backend:
        made = await backend.create(SandboxSpec())
        slow, hanging = ExecRequest(("sleep", "9"), deadline_s=0.2), Chaos(backend, exec_hang=1.0)
        assert (await run(backend, made, slow)).timed_out
        with pytest.raises(SandboxError, match=r"still runs 0\.01 s after its deadline"):
            await run(hanging, made, ExecRequest(("true",), deadline_s=0.0), grace_s=0.01)
        await backend.close(made)


@pytest.mark.parametrize("num_cancels", [1, 2, 5])
@pytest.mark.parametrize("where", ["boot", "add", "wait", "judge"])
@in_loop
async def test_cancelled_anywhere_however_often_it_closes_all(tmp_path, where, num_cancels):
    async with opened(tmp_path) as backend:
        reached = asyncio.Event()
        note = lambda what: reached.set() if what == where else None  # noqa: E731
        policy = sleeper if where == "wait" else oracle
        pool = SessionPool(backend)
        playing = asyncio.create_task(pool.play(job(policy=policy, reached=note)))
        if where == "boot":
            await asyncio.sleep(0.001)
        else:
            await reached.wait()
        for _ in range(num_cancels):
            playing.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert total(pool).num_cancelled == 1
    assert not pool.slots.num_held


@in_loop
async def test_cancelled_at_every_moment_it_leaves_nothing(tmp_path):
    async with opened(tmp_path) as backend:
        for step in range(40):
            playing = asyncio.create_task(play(Counting(SPEC), job().task, oracle, backend))
            await asyncio.sleep(0.002 * step)
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            assert backend._boxes == {}


@in_loop
async def test_play_all_cancelled_closes_what_runs_and_starts_no_more(tmp_path):
    async with opened(tmp_path) as backend:
        pool, reached = SessionPool(backend, 2), asyncio.Event()
        jobs = [job(i, sleeper, reached=lambda _: reached.set()) for i in range(6)]
        playing = asyncio.create_task(pool.play_all(jobs))
        await reached.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert (total(pool).num_cancelled, total(pool).num_jobs) == (6, 6)


async def hold(slots, queue, seconds, order):
    async with slots.take(queue):
        order.append(queue)
        await asyncio.sleep(seconds)


@in_loop
async def test_a_slow_queue_cannot_starve_another():
    slots, order = FairSlots(4), []
    slow = [asyncio.create_task(hold(slots, "slow", 0.8, order)) for _ in range(40)]
    await asyncio.sleep(0)
    fast = [asyncio.create_task(hold(slots, "fast", 0.01, order)) for _ in range(16)]
    await asyncio.gather(*fast)
    begun = order.count("slow")
    assert order[:4] == ["slow"] * 4
    assert begun <= 8, "two of four places are the fast queue's while it wants them"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert not slots.num_held


@in_loop
async def test_queues_take_turns_and_all_places_are_used():
    slots, order = FairSlots(1), []
    tasks = [asyncio.create_task(hold(slots, q, 0, order)) for q in "aaabbbc"]
    await asyncio.gather(*tasks)
    assert order == list("abcabab")
    with pytest.raises(UserInputError):
        FairSlots(0)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_place_is_lost_or_given_twice(data):
    queues = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=20))
    cancels = data.draw(st.sets(st.integers(0, len(queues) - 1)))

    async def main():
        slots, held = FairSlots(3), set()

        async def holder(queue):
            async with slots.take(queue) as slot:
                assert slot not in held
                held.add(slot)
                try:
                    await asyncio.sleep(0)
                finally:
                    held.remove(slot)

        tasks = [asyncio.create_task(holder(queue)) for queue in queues]
        for number in cancels:
            await asyncio.sleep(0)
            tasks[number].cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(isinstance(end, AssertionError) for end in ends)
        async with slots.take("a"), slots.take("b"), slots.take("c"):
            assert slots.num_held.total() == 3

    asyncio.run(main())
