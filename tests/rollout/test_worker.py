"""A rollout worker on a real store: slots, pause, stop, fencing, leases and errors."""

import asyncio
import functools
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from k3rl.envs.harness.parts import Harness
from k3rl.errors import ConfigError, StoreError, UserInputError
from k3rl.rollout.worker import RolloutWorker, make_env
from k3rl.store.audit import compare_ledger
from k3rl.store.host import StoreHost
from k3rl.types import OutcomeKind, TrajectoryHeader, TrajectoryKey, TrajectoryState
from tests.builders import NOTES, Notes, load_config

pytestmark = pytest.mark.sandbox
SETTINGS = ("run.ledger=true", "engine.policies=[writer]", "rollout.trajectories_per_worker=3")
PACED = ("engine.tokens_per_s=400", "engine.delta_tokens=4", "rollout.ack_tokens=4")


class Shop:
    """A store with queued trajectories and one running worker."""

    def __init__(self, config, host, store) -> None:
        self.config, self.host, self.store = config, host, store
        self.worker = RolloutWorker(config, store)
        self.running = asyncio.create_task(self.worker.run("w"))

    async def begin(self, count: int) -> list[str]:
        start = len(await self.store.trajectories())
        headers = []
        for number in range(start, start + count):
            task = make_env(self.config, NOTES).task("train", number)
            headers.append(TrajectoryHeader(TrajectoryKey("r", task.key, "max", number, 0), task))
        await self.store.begin(headers)
        return [header.id for header in headers]

    async def count(self, state: TrajectoryState) -> int:
        return len(await self.store.trajectories(state))

    async def until(self, condition, every_s: float = 0.01) -> None:
        """Until an async condition holds; fails at once when the worker fails."""
        while not await condition():
            if self.running.done():
                self.running.result()
            await asyncio.sleep(every_s)

    async def until_finished(self, count: int) -> None:
        async def are() -> bool:
            return await self.count(TrajectoryState.FINISHED) == count

        await self.until(are)

    async def until_busy(self) -> None:
        """Every slot holds a trajectory, and one at least is past its first turn."""
        slots = self.config.rollout.trajectories_per_worker

        async def are() -> bool:
            active = await self.store.trajectories(TrajectoryState.ACTIVE)
            return len(active) == slots and any(len(t.steps) > 1 for t in active)

        await self.until(are)

    async def stop(self) -> None:
        await self.worker.stop()
        await asyncio.wait_for(self.running, 10)


def in_shop(*overrides: str, **kwargs):
    """Run an async test with a shop of its own; `kwargs` are those of the environment."""

    def decorate(test):
        @functools.wraps(test)
        def run(tmp_path):
            async def go():
                envs = [{"id": NOTES, "kwargs": kwargs}]
                own = f"sandbox.scratch={scratch}"
                config = load_config(tmp_path, *SETTINGS, own, *overrides, envs=envs)
                host = StoreHost(config)
                shop = Shop(config, host, await host.open())
                try:
                    await asyncio.wait_for(test(shop), 30)
                finally:
                    shop.running.cancel()
                    await asyncio.gather(shop.running, return_exceptions=True)
                    await host.aclose()

            # Below a folder that is closed to others, a backend would choose another place.
            with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
                os.chmod(scratch, 0o755)
                asyncio.run(go())

        del run.__wrapped__
        return run

    return decorate


def scratch_of(config) -> list:
    """Folders of backends that are open."""
    return list(Path(config.sandbox.scratch).glob("owner-*"))


@in_shop(*PACED)
async def test_at_most_so_many_trajectories_are_played_at_once(shop):
    Notes.most_open = 0
    await shop.begin(5)
    seen = set()

    async def are_finished() -> bool:
        seen.add(await shop.count(TrajectoryState.ACTIVE))
        return await shop.count(TrajectoryState.FINISHED) == 5

    await shop.until(are_finished)
    assert Notes.most_open == 3
    assert max(seen) == 3
    stored = await shop.store.trajectories()
    assert [t.outcome.reward for t in stored] == [1.0] * 5
    await shop.stop()
    assert compare_ledger(shop.host.root, shop.config.run_folder / "ledger").is_exact


@in_shop(*PACED, "rollout.trajectories_per_worker=24")
async def test_workers_with_room_for_all_that_is_queued_share_it(shop):
    other = RolloutWorker(shop.config, shop.store)
    running = asyncio.create_task(other.run("v"))
    await shop.begin(24)
    await shop.until_finished(24)
    await other.stop()
    await running
    await shop.stop()
    ledgers = (shop.config.run_folder / "ledger").glob("*.jsonl")
    shares = [{json.loads(line)["id"] for line in path.open()} for path in ledgers]
    assert sorted(map(len, shares))[0] >= 8
    assert len(set.union(*shares)) == sum(map(len, shares)) == 24


class LateClaims:
    """The store, but a claim is long under way: what it names as held has ended when it arrives."""

    def __init__(self, store) -> None:
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def claim(self, *args):
        await asyncio.sleep(0.3)
        return await self._store.claim(*args)


@in_shop()
async def test_an_acknowledgement_is_noted_once(shop):
    """Claims that cross the end of a trajectory must not bring it back."""
    shop.worker.store = LateClaims(shop.store)
    await shop.begin(15)
    await shop.until_finished(15)
    await shop.stop()
    lines = (shop.config.run_folder / "ledger" / "w.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines)) > 15


@in_shop(*PACED)
async def test_pause_returns_when_all_is_given_back_and_nothing_is_claimed_after(shop):
    ids = await shop.begin(6)
    await shop.until_busy()
    await shop.worker.pause()
    states = [t.state for t in await shop.store.trajectories()]
    assert states.count(TrajectoryState.ACTIVE) == 0
    assert states.count(TrajectoryState.PAUSED) == 3
    assert Notes.num_open == 0

    await shop.store.requeue_paused()
    await asyncio.sleep(0.4)
    assert [t.state for t in await shop.store.trajectories()] == states

    await shop.worker.resume()
    await shop.until_finished(6)
    stored = await shop.store.trajectories()
    assert [t.id for t in stored] == ids
    assert all(t.outcome.reward == 1.0 for t in stored)
    await shop.stop()
    assert compare_ledger(shop.host.root, shop.config.run_folder / "ledger").is_exact


@in_shop()
async def test_pause_waits_for_a_claim_under_way_and_gives_back_what_it_brings(shop):
    """An idle worker is always in a claim."""
    await asyncio.sleep(0.4)
    pausing = asyncio.create_task(shop.worker.pause())
    await asyncio.sleep(0)
    await shop.begin(2)
    await pausing
    stored = await shop.store.trajectories()
    assert [(t.state, t.steps) for t in stored] == [(TrajectoryState.PAUSED, ())] * 2
    await shop.begin(2)
    await asyncio.sleep(0.4)
    assert await shop.count(TrajectoryState.QUEUED) == 2


@in_shop()
async def test_after_pause_no_claim_is_under_way(shop):
    await asyncio.sleep(0.4)
    await shop.worker.pause()
    await shop.begin(2)
    await asyncio.sleep(0.4)
    assert await shop.count(TrajectoryState.QUEUED) == 2


@in_shop(note_s=0.3)
async def test_pause_waits_for_tool_calls_and_keeps_their_steps(shop):
    await shop.begin(3)

    async def are_calling() -> bool:
        return Notes.num_calling == 3

    await shop.until(are_calling)
    await shop.worker.pause()
    paused = await shop.store.trajectories(TrajectoryState.PAUSED)
    assert [len(t.steps) for t in paused] == [2, 2, 2]


@in_shop(*PACED)
async def test_pause_and_resume_may_come_in_any_rhythm(shop):
    await shop.begin(6)
    for pause in range(9):
        await asyncio.sleep(0.02 * (pause % 4))
        await shop.worker.pause()
        assert await shop.count(TrajectoryState.ACTIVE) == 0
        await shop.store.requeue_paused()
        await shop.worker.resume()
    await shop.until_finished(6)
    assert all(t.outcome.reward == 1.0 for t in await shop.store.trajectories())
    await shop.stop()
    assert compare_ledger(shop.host.root, shop.config.run_folder / "ledger").is_exact


@in_shop(*PACED)
async def test_stop_gives_everything_back_and_ends_run(shop):
    await shop.begin(6)
    await shop.until_busy()
    assert len(scratch_of(shop.config)) == 1
    await shop.stop()
    assert shop.running.result() is None
    assert await shop.count(TrajectoryState.ACTIVE) == 0
    assert await shop.count(TrajectoryState.PAUSED) == 3
    assert scratch_of(shop.config) == []


@in_shop()
async def test_stop_ends_an_idle_and_a_paused_worker(shop):
    await shop.begin(1)
    await shop.until_finished(1)
    await shop.worker.pause()
    await shop.stop()


@in_shop(*PACED)
async def test_a_fenced_episode_is_dropped_and_its_trajectory_played_on(shop):
    """Its claims are reaped twice while it plays; nothing fails, nothing is lost or doubled."""
    await shop.begin(5)
    await shop.until_busy()

    async def are_reaped() -> bool:
        return bool(await shop.store.reap("w"))

    await shop.until(are_reaped)
    await shop.until(are_reaped)
    await shop.until_finished(5)
    assert not shop.running.done()
    assert all(t.outcome.reward == 1.0 for t in await shop.store.trajectories())
    await shop.stop()
    assert compare_ledger(shop.host.root, shop.config.run_folder / "ledger").is_exact


@in_shop("store.lease_ttl_s=0.6", "rollout.trajectories_per_worker=1", note_s=1.2)
async def test_a_worker_whose_slots_are_all_busy_keeps_its_lease(shop):
    """It neither writes nor claims for far longer than the lease, but it is not dead."""
    (id,) = await shop.begin(1)
    began = time.monotonic()

    async def has_a_call() -> bool:
        return len((await shop.store.get(id)).steps) == 2

    await shop.until(has_a_call)
    assert time.monotonic() - began > 1.0
    await shop.worker.pause()
    await shop.store.requeue_paused()
    (claim,) = await shop.store.claim("other", 1, [], 5.0)
    assert claim.epoch == 2, "an epoch counts claims and reapings"


@in_shop(*PACED)
async def test_a_closed_store_ends_run_with_its_error(shop):
    await shop.begin(3)
    await shop.until_busy()
    await shop.host.aclose()
    with pytest.raises(StoreError, match="closed"):
        await asyncio.wait_for(shop.running, 10)
    assert Notes.num_open == 0


@in_shop()
async def test_an_error_of_the_store_inside_an_episode_ends_run_with_it(shop):
    """Snapshots cannot be stored: a file stands where the blobs' folder should be."""
    blobs = shop.host.root / "blobs"
    shutil.rmtree(blobs, ignore_errors=True)
    blobs.write_text("")
    await shop.begin(1)
    with pytest.raises(StoreError, match="cannot store a blob"):
        await asyncio.wait_for(shop.running, 10)
    (stored,) = await shop.store.trajectories()
    assert (stored.outcome, stored.steps) == (None, ())


@in_shop("engine.policies=[crasher, writer]")
async def test_a_lost_sandbox_is_an_outcome_and_the_worker_goes_on(shop):
    await shop.begin(2)
    await shop.until_finished(2)
    kinds = [t.outcome.kind for t in await shop.store.trajectories()]
    assert kinds == [OutcomeKind.INFRA_FAULT] * 2
    assert not shop.running.done()
    await shop.stop()


@in_shop(hang_at=2)
async def test_a_cancelled_run_leaves_its_claims_to_be_reaped(shop):
    """As when its process is killed: committed steps stand, the rest is played again."""
    await shop.begin(3)

    async def are_hanging() -> bool:
        stored = await shop.store.trajectories()
        return [len(t.steps) for t in stored] == [2, 2, 2]

    await shop.until(are_hanging)
    shop.running.cancel()
    await asyncio.gather(shop.running, return_exceptions=True)
    assert Notes.num_open == 0
    assert scratch_of(shop.config) == []
    assert await shop.count(TrajectoryState.ACTIVE) == 3
    assert len(await shop.store.reap("w")) == 3
    assert len(await shop.store.claim("w2", 9, [], 1.0)) == 3


@in_shop()
async def test_a_trajectory_of_an_unknown_environment_ends_run(shop):
    task = make_env(shop.config, NOTES).task("train", 0)
    stranger = type(task)("k3rl/FileHunt-v0", 0)
    key = TrajectoryKey("r", stranger.key, "max", 0, 0)
    await shop.store.begin([TrajectoryHeader(key, stranger)])
    with pytest.raises(ConfigError, match="not in the config's envs"):
        await asyncio.wait_for(shop.running, 10)


@in_shop()
async def test_a_trajectory_of_another_harness_ends_run(shop):
    """What was begun in one harness is never played on in another."""
    task = make_env(shop.config, NOTES).task("train", 0)
    key = TrajectoryKey("r", task.key, "max", 0, 0)
    digests = {"harness": Harness(max_turns=1).digest}
    await shop.store.begin([TrajectoryHeader(key, task, digests=digests)])
    with pytest.raises(UserInputError, match="harness digest"):
        await asyncio.wait_for(shop.running, 10)
