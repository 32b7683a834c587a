"""The loop over a real store and real workers: counts, order, retries, recovery and errors."""

import asyncio
import contextlib
import functools
import json
import math
from collections import Counter, defaultdict

import pytest

from k3rl import metrics
from k3rl.cluster import LocalWorker
from k3rl.controller import Controller
from k3rl.envs.harness.parts import Harness
from k3rl.errors import EngineError, StoreError, UserInputError
from k3rl.rollout.worker import make_env
from k3rl.store.audit import compare_ledger
from k3rl.store.host import StoreHost
from k3rl.supervisor import Supervisor, WorkerLost
from k3rl.types import OutcomeKind, TrajectoryHeader, TrajectoryKey, TrajectoryState
from tests.builders import HUNT, MATH, NOTES, NOWHERE, load_config, until

pytestmark = pytest.mark.sandbox
FINISHED, PAUSED, QUEUED, ACTIVE = (
    TrajectoryState.FINISHED,
    TrajectoryState.PAUSED,
    TrajectoryState.QUEUED,
    TrajectoryState.ACTIVE,
)
PACED = ("engine.tokens_per_s=500", "engine.delta_tokens=4", "rollout.ack_tokens=4")
QUICK = "engine.policies=[null]"


class ClaimLog:
    """A store that notes what it hands out, in order; everything else is the store's own."""

    def __init__(self, store) -> None:
        self.store, self.claims = store, []

    def __getattr__(self, name):
        return getattr(self.store, name)

    async def claim(self, *args):
        claims = await self.store.claim(*args)
        self.claims += [(claim.header, claim.state) for claim in claims]
        return claims


class MortalWorker:
    """A handle whose first `num_deaths` workers are lost: after `life_s`, or when told `dies_at`,
    a verb and whether that worker has been resumed by then."""

    name = "mortal"

    def __init__(self, config, store, num_deaths: int, life_s=None, dies_at=None) -> None:
        self.config, self.store, self.num_deaths = config, store, num_deaths
        self.life_s, self.dies_at = life_s, dies_at
        self.num_revived, self.ids, self.is_resumed = 0, [], False
        self.worker, self.death = LocalWorker(config, store), asyncio.Event()

    async def run(self, worker_id: str) -> None:
        self.ids.append(worker_id)
        works = [self.worker.run(worker_id), self.death.wait()]
        running, dying = tasks = [asyncio.create_task(work) for work in works]
        life_s = self.life_s if self.num_revived < self.num_deaths else None
        first = asyncio.FIRST_COMPLETED
        try:
            await asyncio.wait(tasks, timeout=life_s, return_when=first)
            if not running.done() or dying.done():
                self.death.set()
                raise WorkerLost("killed")
            await running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def tell(self, verb: str) -> None:
        self.is_resumed = self.is_resumed or verb == "resume"
        if (verb, self.is_resumed) == self.dies_at and self.num_revived < self.num_deaths:
            self.death.set()
        if self.death.is_set():
            raise WorkerLost("killed")
        await getattr(self.worker, verb)()

    async def revive(self) -> None:
        self.num_revived, self.is_resumed = self.num_revived + 1, False
        self.worker, self.death = LocalWorker(self.config, self.store), asyncio.Event()

    pause = functools.partialmethod(tell, "pause")
    resume = functools.partialmethod(tell, "resume")
    stop = functools.partialmethod(tell, "stop")


@contextlib.asynccontextmanager
async def open_store(config):
    host = StoreHost(config)
    try:
        yield await host.open()
    finally:
        await host.aclose()


def controller(config, store, workers=None, **options) -> Controller:
    workers = workers or [LocalWorker(config, store)]
    return Controller(config, store, workers, None, lambda id: make_env(config, id), **options)


def run_in(folder, *overrides, envs=({"id": NOTES},), timeout_s=30, **options):
    """One process's life: open the store, run, close. Returns (summary, rows of metrics)."""

    async def go():
        config = load_config(folder, *overrides, envs=envs)
        async with open_store(config) as store:
            summary = await asyncio.wait_for(controller(config, store, **options).run(), timeout_s)
            assert summary.trajectories == await store.trajectories()
            return summary, rows_of(config)

    return asyncio.run(go())


def rows_of(config) -> list[dict]:
    return [json.loads(line) for line in (config.run_folder / "metrics.jsonl").open()]


def by_level(trajectories) -> dict:
    found = defaultdict(list)
    for trajectory in trajectories:
        found[trajectory.header.key.level].append(trajectory)
    return found


def key_of(trajectory) -> tuple:
    key = trajectory.header.key
    return key.level, key.group_index, key.sample_index, key.attempt


# How much is played


@pytest.mark.parametrize(("share", "iterations"), [(0.3, 3), (1.0, 2)])
def test_an_iteration_ends_at_lambda_and_never_has_more_than_n_times_k_active(
    share, iterations, tmp_path
):
    """Per level: what is left of the last iteration and what is begun make N x K, whole groups."""
    num_groups, size, levels = 3, 2, ["low", "max"]
    left = Counter()
    for iteration in range(iterations):
        summary, rows = run_in(
            tmp_path,
            *PACED,
            "engine.tokens_per_s=2000",
            "engine.delta_tokens=16",
            "engine.policies=[writer, null]",
            f"run.iterations={iteration + 1}",
            f"rollout={{num_groups: {num_groups}, group_size: {size}, ack_tokens: 4}}",
            f"rollout.finished_fraction={share}",
            "rollout.trajectories_per_worker=4",
            f"intensity.levels={levels}",
        )
        levels_found = by_level(summary.trajectories)
        assert sorted(levels_found) == levels
        for level, found in levels_found.items():
            active = left[level] + sum(t.header.iteration == iteration for t in found)
            assert num_groups * size - size < active <= num_groups * size
            left[level] = sum(t.outcome is None for t in found)
            sizes = Counter(t.header.key.group_index for t in found)
            assert set(sizes.values()) == {size}
        target = math.ceil(share * num_groups * size * len(levels))
        assert len(rows) == iteration + 1
        assert rows[-1][metrics.NUM_FINISHED] >= target
        states = Counter(t.state for t in summary.trajectories)
        assert states[FINISHED] == sum(row[metrics.NUM_FINISHED] for row in rows)
        assert states[ACTIVE] == 0
        assert states[PAUSED] + states[QUEUED] == sum(left.values())
        assert rows[-1][metrics.NUM_UNFINISHED] == sum(left.values())
        assert bool(states[PAUSED]) == (share < 1)


def test_a_fraction_that_floats_cannot_hold_rounds_to_the_trajectory(tmp_path):
    """0.07 x 100 is 7, not the 7.000000000000001 that floats make of it."""
    seen = []
    run_in(
        tmp_path,
        QUICK,
        "rollout={num_groups: 100, group_size: 1, trajectories_per_worker: 2}",
        "rollout.finished_fraction=0.07",
        on_progress=lambda progress: seen.append(progress.num_target),
    )
    assert set(seen) == {7}


def test_paused_trajectories_are_claimed_first_in_the_next_iteration(tmp_path):
    async def go():
        config = load_config(
            tmp_path,
            *PACED,
            "run.iterations=2",
            "rollout={num_groups: 4, group_size: 2, finished_fraction: 0.3, ack_tokens: 4}",
            "rollout.trajectories_per_worker=6",
            "engine.policies=[writer, null]",
        )
        async with open_store(config) as store:
            log = ClaimLog(store)
            await controller(config, store, [LocalWorker(config, log)]).run()
            return log.claims

    claims = asyncio.run(go())
    resumed = [i for i, (_, state) in enumerate(claims) if state is PAUSED]
    waiting = [i for i, (h, _) in enumerate(claims) if h.iteration == 0 and i > resumed[-1]]
    new = [i for i, (header, _) in enumerate(claims) if header.iteration == 1]
    assert resumed == list(range(resumed[0], resumed[0] + len(resumed)))
    assert resumed[-1] < min([*waiting, *new])
    assert new == sorted(new)
    assert max([*waiting, resumed[-1]]) < new[0]


def test_groups_have_the_same_tasks_at_every_level_and_the_mix_is_exact(tmp_path):
    weights = {NOTES: 1.0, HUNT: 2.0, MATH: 5.0}
    summary, _ = run_in(
        tmp_path,
        "engine.policies=[null]",
        "rollout={num_groups: 16, group_size: 1}",
        "intensity.levels=[low, high]",
        "curriculum.first_task=3",
        envs=[{"id": id, "weight": weight} for id, weight in weights.items()],
    )
    tasks = defaultdict(dict)
    for trajectory in summary.trajectories:
        key = trajectory.header.key
        tasks[key.level][key.group_index] = trajectory.header.task
        assert trajectory.header.task.key == key.task_key
    assert tasks["low"] == tasks["high"]
    assert sorted(tasks["low"]) == list(range(16))
    ids = [tasks["low"][group].env_id for group in range(16)]
    for count in range(1, 17):
        for env_id, weight in weights.items():
            assert abs(ids[:count].count(env_id) - count * weight / 8) < 1
    assert Counter(ids) == {NOTES: 2, HUNT: 4, MATH: 10}
    seeds = [task.seed for task in tasks["low"].values() if task.env_id == NOTES]
    assert seeds == [3 + group for group, id in enumerate(ids) if id == NOTES]


def test_each_level_has_its_own_budget_and_every_header_says_what_made_it(tmp_path):
    summary, _ = run_in(
        tmp_path,
        "engine.policies=[endless]",
        "rollout={num_groups: 1, group_size: 1}",
        "intensity={levels: [low, high], budget_tokens: {low: 60}}",
        "harness.max_turns=3",
        digests={"tokenizer": "t"},
        capabilities=("no_network",),
    )
    low, high = summary.trajectories
    assert (low.header.budget, low.num_policy_tokens) == (60, 60)
    assert low.outcome.reward == -1.0
    assert (high.header.budget, len(high.steps)) == (None, 4)
    assert high.outcome.reward == 0.0
    for trajectory in (low, high):
        assert trajectory.header.capabilities == ("no_network",)
        assert set(trajectory.header.digests) == {"tokenizer", "env", "sandbox", "harness"}
        assert trajectory.header.digests["harness"] == Harness(max_turns=3).digest


# Groups that break


def test_a_group_with_too_few_valid_members_is_run_again_once_and_then_kept(tmp_path):
    summary, rows = run_in(
        tmp_path,
        "run.iterations=3",
        "engine.policies=[crasher]",
        "rollout={num_groups: 1, group_size: 2}",
    )
    keys = [key_of(t) for t in summary.trajectories]
    first = [("max", 0, sample, attempt) for attempt in (0, 1) for sample in (0, 1)]
    assert keys[:4] == first
    assert keys[4:] == [("max", 1, 0, 0), ("max", 1, 1, 0), ("max", 1, 0, 1), ("max", 1, 1, 1)]
    assert [t.header.iteration for t in summary.trajectories] == [0, 0, 0, 0, 2, 2, 2, 2]
    assert {t.outcome.kind for t in summary.trajectories[:6]} == {OutcomeKind.INFRA_FAULT}
    assert [row[metrics.NUM_INFRA_FAULTS] for row in rows] == [2, 2, 2]
    assert [row[metrics.NUM_FINISHED] for row in rows] == [2, 2, 2]
    assert [row[metrics.NUM_GROUPS] for row in rows] == [0, 1, 1]
    assert [row[metrics.NUM_DROPPED_GROUPS] for row in rows] == [0, 1, 1]
    assert [row[metrics.REWARD] for row in rows] == [0, 0, 0]


def test_only_the_broken_member_is_run_again_and_a_cured_group_counts(tmp_path):
    """The outage ends before the second iteration."""
    flag = tmp_path / "repaired"

    def watch(progress):
        if progress.iteration == 1:
            flag.touch()

    summary, rows = run_in(
        tmp_path,
        "run.iterations=2",
        "engine.policies=[null, crasher]",
        "rollout={num_groups: 1, group_size: 2}",
        envs=[{"id": NOTES, "kwargs": {"flag": str(flag)}}],
        on_progress=watch,
    )
    assert [key_of(t) for t in summary.trajectories[:3]] == [
        ("max", 0, 0, 0),
        ("max", 0, 1, 0),
        ("max", 0, 1, 1),
    ]
    assert [t.outcome.reward for t in summary.trajectories[:3]] == [0.0, None, 1.0]
    assert [row[metrics.NUM_GROUPS] for row in rows] == [0, 1]
    assert [row[metrics.NUM_DROPPED_GROUPS] for row in rows] == [0, 0]
    assert [row[metrics.NUM_INFORMATIVE_GROUPS] for row in rows] == [0, 1]


def test_a_trajectory_that_never_began_has_no_steps_in_the_mean(tmp_path):
    _, rows = run_in(tmp_path, "rollout={num_groups: 1, group_size: 1}", envs=[{"id": NOWHERE}])
    assert (rows[0][metrics.NUM_INFRA_FAULTS], rows[0][metrics.STEPS]) == (1, 0)


# Metrics


def test_metrics_say_per_iteration_what_happened(tmp_path):
    """With two valid members of three every group is kept as it is."""
    summary, rows = run_in(
        tmp_path,
        "run.iterations=2",
        "engine.policies=[writer, null, crasher]",
        "rollout={num_groups: 2, group_size: 3}",
    )
    assert [row["step"] for row in rows] == [0, 1]
    assert len(summary.trajectories) == 12
    for iteration, row in enumerate(rows):
        played = [t for t in summary.trajectories if t.header.iteration == iteration]
        assert row[metrics.NUM_FINISHED] == len(played) == 6
        assert row[metrics.SUCCESS] == pytest.approx(2 / 6)
        assert row[metrics.REWARD] == pytest.approx(2 / 4)
        assert row[metrics.NUM_INFRA_FAULTS] == 2
        tokens = [t.num_policy_tokens for t in played]
        assert row[metrics.POLICY_TOKENS] == pytest.approx(sum(tokens) / 6)
        assert row[metrics.STEPS] == pytest.approx(sum(len(t.steps) - 1 for t in played) / 6)
        assert row[metrics.NUM_GROUPS] == 2 * (iteration + 1)
        assert row[metrics.NUM_INFORMATIVE_GROUPS] == 2 * (iteration + 1)
        assert row[metrics.WORKER_RESTARTS] == 0
        assert row[metrics.ITERATION_S] > 0
    assert rows[-1][metrics.STORE_TOKENS] == sum(t.num_tokens for t in summary.trajectories)


def test_a_group_whose_rewards_are_equal_is_not_informative(tmp_path):
    size = "rollout={num_groups: 2, group_size: 2}"
    _, rows = run_in(tmp_path, "engine.policies=[writer]", size)
    assert rows[0][metrics.NUM_GROUPS] == 2
    assert rows[0][metrics.NUM_INFORMATIVE_GROUPS] == 0


# Carrying on


TWO_ITERATIONS = (
    "run.iterations=2",
    "rollout={num_groups: 3, group_size: 2, trajectories_per_worker: 4, ack_tokens: 4}",
    "engine.policies=[writer, null]",
    "store.lease_ttl_s=60.0",
    "run.ledger=true",
)


@pytest.fixture(scope="module")
def whole_keys(tmp_path_factory):
    """Identities of a run of two iterations that nothing interrupts."""
    summary, _ = run_in(tmp_path_factory.mktemp("whole"), *TWO_ITERATIONS)
    return {t.id: key_of(t) for t in summary.trajectories}


@pytest.mark.parametrize("name", ["worker0", "another"])
def test_a_second_controller_carries_on_after_an_abrupt_end(name, whole_keys, tmp_path):
    """Cut off in mid-turn, nothing given back; the next one may have workers of other names."""

    async def cut_off(config):
        async with open_store(config) as store:
            task = asyncio.create_task(controller(config, store).run())
            await until(lambda: store.trajectories(FINISHED))
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return await store.trajectories()

    async def carry_on(config):
        async with open_store(config) as store:
            worker = LocalWorker(config, store)
            worker.name = name
            return await controller(config, store, [worker]).run()

    slow = load_config(
        tmp_path,
        *TWO_ITERATIONS,
        "engine.tokens_per_s=30",
        "engine.delta_tokens=4",
        "rollout.ack_tokens=12",
    )
    before = asyncio.run(cut_off(slow))
    assert any(t.state is ACTIVE for t in before)
    config = load_config(tmp_path, *TWO_ITERATIONS)
    summary = asyncio.run(asyncio.wait_for(carry_on(config), 30))
    keys = {t.id: key_of(t) for t in summary.trajectories}
    assert len(set(keys.values())) == len(summary.trajectories)
    assert list(keys)[: len(before)] == [t.id for t in before]
    groups = Counter((level, group) for level, group, _, _ in keys.values())
    assert set(groups.values()) == {2}
    assert all(t.outcome for t in summary.trajectories)
    assert keys == whole_keys
    assert summary.num_iterations == 2
    ledger = config.run_folder / "ledger"
    assert compare_ledger(config.run_folder / "store", ledger).is_exact


def test_a_finished_run_does_nothing_when_it_is_run_again(tmp_path):
    first, rows = run_in(tmp_path, *TWO_ITERATIONS)
    second, same_rows = run_in(tmp_path, *TWO_ITERATIONS)
    assert second.trajectories == first.trajectories
    assert same_rows == rows


def test_a_run_does_not_go_on_with_another_tokenizer(tmp_path):
    """What was played before would be trained on as other text."""
    first, _ = run_in(tmp_path, *TWO_ITERATIONS, digests={"tokenizer": "old"})
    with pytest.raises(UserInputError, match=r"its tokenizer digest is old, .* is new: use"):
        run_in(tmp_path, *TWO_ITERATIONS, digests={"tokenizer": "new"})
    again, _ = run_in(tmp_path, *TWO_ITERATIONS, digests={"tokenizer": "old", "harness": "new"})
    assert again.trajectories == first.trajectories


def test_a_group_that_was_begun_in_part_is_completed(tmp_path):
    """The controller died between the headers of one group: its K members must all be played."""

    async def go():
        config = load_config(tmp_path, *TWO_ITERATIONS, "run.iterations=1")
        whole = load_config(tmp_path / "whole", *TWO_ITERATIONS, "run.iterations=1")
        async with open_store(whole) as store:
            headers = [t.header for t in (await controller(whole, store).run()).trajectories]
        async with open_store(config) as store:
            await store.begin(headers[:3])
            return headers, await controller(config, store).run()

    headers, summary = asyncio.run(go())
    assert sorted(t.id for t in summary.trajectories) == sorted(h.id for h in headers)
    assert all(t.outcome for t in summary.trajectories)


def test_a_group_begun_in_part_is_not_judged_by_the_members_that_finished_before(tmp_path):
    """Sample 0 had finished when sample 1 was begun; that one breaks and is run again."""
    settings = ("engine.policies=[null, crasher]", "rollout={num_groups: 1, group_size: 2}")

    async def go():
        config = load_config(tmp_path, *settings, "run.iterations=2")
        whole = load_config(tmp_path / "whole", *settings)
        async with open_store(whole) as store:
            headers = [t.header for t in (await controller(whole, store).run()).trajectories]
        async with open_store(config) as store:
            await store.begin(headers[:1])
            worker = LocalWorker(config, store)
            running = asyncio.create_task(worker.run("early"))
            await until(lambda: store.trajectories(FINISHED))
            await worker.stop()
            await running
            return await controller(config, store).run()

    summary = asyncio.run(go())
    keys = [("max", 0, 0, 0), ("max", 0, 1, 0), ("max", 0, 1, 1)]
    assert [key_of(t) for t in summary.trajectories[:3]] == keys


# Lost workers and errors


def test_a_lost_worker_is_revived_and_what_it_played_is_played_on(tmp_path):
    async def go():
        own = ("engine.tokens_per_s=200", "run.iterations=1")
        config = load_config(tmp_path, *TWO_ITERATIONS, *PACED, *own)
        async with open_store(config) as store:
            worker = MortalWorker(config, store, num_deaths=2, life_s=0.6)
            summary = await asyncio.wait_for(controller(config, store, [worker]).run(), 30)
            return config, worker, summary

    config, worker, summary = asyncio.run(go())
    assert summary.num_restarts == worker.num_revived == 2
    assert len(set(worker.ids)) == 3
    assert [t.outcome.kind for t in summary.trajectories] == [OutcomeKind.COMPLETED] * 6
    assert rows_of(config)[0][metrics.WORKER_RESTARTS] == 2
    assert compare_ledger(config.run_folder / "store", config.run_folder / "ledger").is_exact


@pytest.mark.parametrize("dies_at", [("pause", False), ("resume", True), ("pause", True)])
def test_a_worker_lost_when_it_is_told_something_holds_nothing_and_is_revived(dies_at, tmp_path):
    async def go():
        config = load_config(
            tmp_path, *TWO_ITERATIONS, *PACED, "rollout.finished_fraction=0.3", "run.iterations=3"
        )
        async with open_store(config) as store:
            worker = MortalWorker(config, store, num_deaths=2, dies_at=dies_at)
            summary = await asyncio.wait_for(controller(config, store, [worker]).run(), 30)
            await store.requeue_paused()
            claims = await store.claim("other", 99, [], 0.0)
            return config, worker, summary, {claim.header.id for claim in claims}

    config, worker, summary, free = asyncio.run(go())
    assert 1 <= summary.num_restarts == worker.num_revived <= 2
    assert all(row[metrics.NUM_FINISHED] >= 2 for row in rows_of(config))
    assert free == {t.id for t in summary.trajectories if t.outcome is None}
    assert compare_ledger(config.run_folder / "store", config.run_folder / "ledger").is_exact


def test_when_pause_returns_a_lost_worker_holds_nothing_any_more(tmp_path):
    """It was lost when it was told; nobody waits for its supervisor to notice."""

    async def go():
        slots = "rollout.trajectories_per_worker=3"
        config = load_config(tmp_path, *PACED, "engine.policies=[endless]", slots)
        async with open_store(config) as store:
            task = make_env(config, NOTES).task("train", 0)
            keys = [TrajectoryKey("r", task.key, "max", 0, sample) for sample in range(3)]
            await store.begin([TrajectoryHeader(key, task) for key in keys])
            worker = MortalWorker(config, store, num_deaths=1, dies_at=("pause", True))
            supervisor = Supervisor([worker], store, max_restarts=1)
            supervisor.start()
            await supervisor.play()
            await until(lambda: store.trajectories(ACTIVE))
            await supervisor.pause()
            claims = await store.claim("other", 3, [], 0.0)
            await supervisor.aclose()
            return [claim.header.key for claim in claims], keys

    claimed, keys = asyncio.run(go())
    assert claimed == keys


@pytest.mark.parametrize("most", [0, 3])
def test_restarts_are_bounded(most, tmp_path):
    async def go():
        config = load_config(tmp_path, QUICK, f"rollout.max_worker_restarts={most}")
        async with open_store(config) as store:
            worker = MortalWorker(config, store, num_deaths=99, life_s=0.0)
            with pytest.raises(EngineError, match=f"lost {most + 1} times.* mortal: killed"):
                await asyncio.wait_for(controller(config, store, [worker]).run(), 30)
            assert worker.num_revived == most

    asyncio.run(go())


def test_an_error_of_the_store_ends_the_run_as_itself(tmp_path):
    async def go():
        config = load_config(tmp_path, *PACED, "engine.policies=[endless]")
        host = StoreHost(config)
        store = await host.open()
        task = asyncio.create_task(controller(config, store).run())
        await until(lambda: store.trajectories(ACTIVE))
        await host.aclose()
        with pytest.raises(StoreError, match="closed"):
            await asyncio.wait_for(task, 10)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(go()) == []


def test_an_error_of_a_worker_ends_the_run_as_itself_and_leaves_nothing_running(tmp_path):
    """Its episode meets a store that cannot keep snapshots, while another worker waits for work."""

    async def go():
        config = load_config(tmp_path, QUICK, "rollout={num_groups: 1, group_size: 2}")
        blobs = config.run_folder / "store" / "blobs"
        blobs.parent.mkdir(parents=True)
        blobs.write_text("")
        async with open_store(config) as store:
            before = asyncio.all_tasks()
            second = LocalWorker(config, store)
            second.name = "worker1"
            workers = [LocalWorker(config, store), second]
            with pytest.raises(StoreError, match="cannot store a blob"):
                await asyncio.wait_for(controller(config, store, workers).run(), 10)
            return asyncio.all_tasks() - before

    assert asyncio.run(go()) == set()
