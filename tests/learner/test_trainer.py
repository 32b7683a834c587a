"""The trainer over a real store: updates, resuming, and crashes between any two of its steps."""

import asyncio
import os

import numpy as np
import pytest
import torch

from k3rl import metrics
from k3rl.blobs import BlobStore
from k3rl.errors import ConfigError, CorruptData, EngineError, UserInputError
from k3rl.learner import checkpoint as checkpoints
from k3rl.learner.protocol import Member, Trainer, UpdatePlan
from k3rl.learner.trainer import K3Trainer, make_trainer
from k3rl.model import checkpoint
from k3rl.model.model import K3Model
from k3rl.types import from_plain, to_plain
from k3rl.weights.blob import fetch
from tests.learner.learner_helpers import (
    decode,
    open_run,
    put,
    put_groups,
    run_config,
    tiny,
    to_yaml,
)

PER_UPDATE = 6
"""Trajectories that `put_groups` makes."""


class CrashError(Exception):
    """Stands for the end of the process."""


class Crashing:
    """A store whose caller dies right before or right after one call."""

    def __init__(self, store, method, when):
        self._store, self._method, self._when = store, method, when

    def __getattr__(self, name):
        call = getattr(self._store, name)
        if name != self._method:
            return call

        async def crash(*args):
            if self._when == "after":
                await call(*args)
            raise CrashError(f"{self._when} {name}")

        return crash


def blobs_of(config):
    return BlobStore(config.run_folder / "store" / "blobs")


def served(config, manifest):
    """The model that an engine has after applying a manifest."""
    found, tensors = checkpoint.from_bytes(fetch(blobs_of(config), manifest))
    model = K3Model(found, seed=None)
    model.load_state_dict(tensors)
    return model


async def groups_for(config, store, state):
    """The groups of the next update, played by the version that is served."""
    model = served(config, state.manifest)
    first = state.next_update * PER_UPDATE
    return await put_groups(store, model, first, state.policy_version)


async def train(config, store, trainer, num_updates):
    """Updates until `num_updates` are made; returns the last state and the reports."""
    state, reports = await trainer.start(), []
    while state.next_update < num_updates:
        groups = await groups_for(config, store, state)
        reports.append(await trainer.update(UpdatePlan(state.next_update, groups)))
        state = reports[-1].state
    return state, reports


def run(folder, url, work, *overrides):
    async def go():
        async with open_run(folder, url, *overrides) as (config, store):
            return await work(config, store)

    return asyncio.run(asyncio.wait_for(go(), 60))


def weights(config, manifest):
    return {k: v.clone() for k, v in served(config, manifest).state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, valkey):
    """The weights after each of four updates of a run that nothing interrupts."""

    async def work(config, store):
        _, reports = await train(config, store, make_trainer(config, store), 4)
        return [weights(config, report.state.manifest) for report in reports]

    return run(tmp_path_factory.mktemp("straight"), valkey, work)


def test_starts_at_version_0_with_the_weights_of_the_policy(tmp_path, valkey):
    async def work(config, store):
        trainer = make_trainer(config, store)
        assert isinstance(trainer, Trainer)
        state = await trainer.start()
        assert (state.next_update, state.policy_version, state.consumed) == (0, 0, ())
        assert same(weights(config, state.manifest), tiny().state_dict())
        assert await trainer.start() == state

    run(tmp_path, valkey, work)


def test_random_weights_follow_from_the_seed(tmp_path, valkey):
    model = tmp_path / "model.yaml"

    async def work(config, store):
        state = await make_trainer(config, store).start()
        made = served(config, state.manifest)
        assert same(made.state_dict(), K3Model(made.config, seed=3).state_dict())

    model.write_text(to_yaml(tiny().config))
    run(tmp_path, valkey, work, "policy.checkpoint=null", f"policy.model={model}", "seed=3")


def test_an_update_is_one_version_and_one_row(tmp_path, valkey):
    async def work(config, store):
        trainer = make_trainer(config, store)
        state = await trainer.start()
        groups = await groups_for(config, store, state)
        report = await trainer.update(UpdatePlan(0, groups))
        members = tuple(member.id for group in groups for member in group)
        assert report.state.next_update == report.state.policy_version == 1
        assert report.state.consumed == members
        before, after = (weights(config, s.manifest) for s in (state, report.state))
        assert not same(before, after)
        (row,) = await store.updates()
        assert (row.update, row.policy_version_in, row.policy_version_out) == (0, 0, 1)
        assert row.members == members
        assert row.advantages == (0.5, -0.5, -0.5, 0.5, 0.0, 0.0)
        assert row.loss[4:] == (0.0, 0.0)
        assert all(np.sign(row.loss[:4]) == [-1, 1, 1, -1])
        trained = [(await store.get(id)).num_policy_tokens for id in members[:4]]
        assert row.denominators == {"num_policy_tokens": sum(trained), "num_trajectories": 4.0}
        assert row.gradient_norm == report.metrics["learner/gradient_norm"] > 0
        assert row.checkpoint == report.state.manifest["blob"]
        found = report.metrics
        assert found[metrics.NUM_UNINFORMATIVE_GROUPS] == 1
        assert found[metrics.AGREEMENT_TOKENS] == found[metrics.LEARNER_POLICY_TOKENS]
        assert found[metrics.LEARNER_POLICY_TOKENS] == sum(trained)
        assert abs(found["learner/log_ratio_mean"]) < 1e-4
        assert found["learner/masked_mean"] == 0

    run(tmp_path, valkey, work)


def test_an_update_without_a_gradient_still_is_a_version(tmp_path, valkey):
    async def work(config, store):
        trainer = make_trainer(config, store)
        state = await trainer.start()
        groups = await put_groups(store, tiny(), 0, rewards=((1.0, 1.0), (0.0, 0.0)))
        report = await trainer.update(UpdatePlan(0, groups))
        assert report.state.policy_version == 1
        assert report.metrics["learner/num_skipped_steps"] == 1
        assert same(weights(config, state.manifest), weights(config, report.state.manifest))

    run(tmp_path, valkey, work)


def test_what_does_not_follow_the_contract_is_refused(tmp_path, valkey):
    async def work(config, store):
        trainer = make_trainer(config, store)
        groups = await put_groups(store, tiny(), 0)
        with pytest.raises(UserInputError, match="not started"):
            await trainer.update(UpdatePlan(0, groups))
        await trainer.start()
        with pytest.raises(UserInputError, match="update 1: the next one is 0"):
            await trainer.update(UpdatePlan(1, groups))
        with pytest.raises(UserInputError, match="named twice"):
            await trainer.update(UpdatePlan(0, groups + groups[:1]))
        (played,) = decode(tiny(), (1,))
        greedy = await put(store, 50, played, 1.0, temperature=0.0)
        with pytest.raises(UserInputError, match="temperature 0"):
            await trainer.update(UpdatePlan(0, ((greedy, Member(groups[0][1].id, 0.0)),)))
        newer = await put(store, 51, played, 1.0, version=7)
        with pytest.raises(UserInputError, match="version 7 at token 5, but the learner is at 0"):
            await trainer.update(UpdatePlan(0, ((newer, Member(groups[0][1].id, 0.0)),)))
        report = await trainer.update(UpdatePlan(0, groups))
        assert report.state.next_update == 1

    run(tmp_path, valkey, work)


def test_log_probs_that_the_learner_does_not_reproduce_stop_the_update(tmp_path, valkey):
    async def work(config, store):
        trainer = make_trainer(config, store)
        state = await trainer.start()
        groups = await put_groups(store, tiny(seed=1), 0)
        with pytest.raises(EngineError, match="agreement: trajectory"):
            await trainer.update(UpdatePlan(0, groups))
        assert await store.updates() == []
        assert await trainer.start() == state
        # Nothing of the refused gradient is left.
        good = await put_groups(store, tiny(), 100)
        await trainer.update(UpdatePlan(0, good))
        return weights(config, trainer.manifest)

    async def other(config, store):
        trainer = make_trainer(config, store)
        await trainer.start()
        await trainer.update(UpdatePlan(0, await put_groups(store, tiny(), 100)))
        return weights(config, trainer.manifest)

    assert same(run(tmp_path / "a", valkey, work), run(tmp_path / "b", valkey, other))


def test_a_run_that_is_carried_on_equals_one_that_never_stopped(tmp_path, valkey, straight):
    async def part(config, store):
        start = await make_trainer(config, store).start()
        state, _ = await train(config, store, make_trainer(config, store), start.next_update + 1)
        return start, state, weights(config, state.manifest)

    consumed = 0
    for number in range(4):
        start, state, got = run(tmp_path, valkey, part)
        assert start.next_update == start.policy_version == number
        assert len(start.consumed) == len(set(start.consumed)) == consumed
        consumed += PER_UPDATE
    assert state.policy_version == 4
    assert same(straight[3], got)
    folders = sorted(os.listdir(run_config(tmp_path).run_folder / "checkpoints"))
    assert folders == ["update-00000002", "update-00000003"]


CRASHES = [
    ("next_version", "before", 1),
    ("next_version", "after", 1),
    ("save", "after", 1),
    ("rename", "before", 1),
    ("rename", "after", 2),
    ("record_update", "before", 2),
    ("record_update", "after", 2),
]


def crashing(method, when, trainer, store, monkeypatch):
    """Let the trainer die at one point of its update."""
    if method in {"next_version", "record_update"}:
        trainer.store = Crashing(store, method, when)
        return
    target = os if method == "rename" else trainer.learner
    real = getattr(target, method)

    def rename(*args):
        if when == "after":
            real(*args)
        raise CrashError(method)

    async def save(*args):
        await real(*args)
        raise CrashError(method)

    monkeypatch.setattr(target, method, {"rename": rename, "save": save}[method])


@pytest.mark.parametrize(("method", "when", "next_update"), CRASHES)
def test_a_crash_trains_nothing_twice(
    tmp_path, valkey, monkeypatch, straight, method, when, next_update
):
    async def work(config, store):
        trainer = make_trainer(config, store)
        state, _ = await train(config, store, trainer, 1)
        groups = await groups_for(config, store, state)
        with monkeypatch.context() as patch:
            crashing(method, when, trainer, store, patch)
            with pytest.raises(CrashError):
                await trainer.update(UpdatePlan(1, groups))
        trainer = make_trainer(config, store)
        again = await trainer.start()
        assert again.next_update == next_update
        assert again.policy_version >= state.policy_version
        assert len(again.consumed) == PER_UPDATE * next_update
        if next_update == 1:
            assert again.policy_version == state.policy_version
            again = (await trainer.update(UpdatePlan(1, groups))).state
        final, _ = await train(config, store, trainer, 3)
        rows = {row.update: row for row in await store.updates()}
        assert len(await store.updates()) == len(rows) == 3
        members = [id for row in rows.values() for id in row.members]
        assert len(members) == len(set(members)) == 3 * PER_UPDATE
        versions = [rows[n].policy_version_out for n in range(3)]
        assert versions == sorted(set(versions))
        assert [rows[n].policy_version_in for n in range(3)] == [0, *versions[:-1]]
        assert final.policy_version == versions[-1]
        return weights(config, final.manifest)

    assert same(straight[2], run(tmp_path, valkey, work))


def test_the_same_trainer_loads_again_after_an_update_that_broke_off(tmp_path, valkey, monkeypatch):
    async def work(config, store):
        trainer = make_trainer(config, store)
        state = await trainer.start()
        groups = await groups_for(config, store, state)
        with monkeypatch.context() as patch:
            crashing("rename", "before", trainer, store, patch)
            with pytest.raises(CrashError):
                await trainer.update(UpdatePlan(0, groups))
        with pytest.raises(UserInputError, match="not started"):
            await trainer.update(UpdatePlan(0, groups))
        assert await trainer.start() == state
        assert (await trainer.update(UpdatePlan(0, groups))).state.policy_version == 2

    run(tmp_path, valkey, work)


def test_updates_after_the_last_checkpoint_are_made_again_under_new_versions(tmp_path, valkey):
    async def first(config, store):
        state, _ = await train(config, store, make_trainer(config, store), 3)
        assert state.policy_version == 3
        return state

    async def second(config, store):
        trainer = make_trainer(config, store)
        state = await trainer.start()
        # Checkpoints hold update 1; engines have seen version 3, so its weights get number 4.
        assert (state.next_update, state.policy_version) == (2, 4)
        assert (state.manifest["parent"], len(state.consumed)) == (2, 2 * PER_UPDATE)
        old = [(await store.updates())[2].members[n : n + 2] for n in (0, 2)]
        groups = tuple(tuple(Member(id, float(n)) for n, id in enumerate(ids)) for ids in old)
        report = await trainer.update(UpdatePlan(2, groups))
        assert report.state.policy_version == 5
        assert report.metrics[metrics.AGREEMENT_TOKENS] == 0
        return report.state

    run(tmp_path, valkey, first, "learner.checkpoint_every=2")
    run(tmp_path, valkey, second, "learner.checkpoint_every=2")


def test_a_checkpoint_that_changed_on_disk_is_named(tmp_path, valkey):
    async def work(config, store):
        await train(config, store, make_trainer(config, store), 1)
        folder = config.run_folder / "checkpoints" / "update-00000000"
        weights_file = folder / "model.safetensors"
        data = bytearray(weights_file.read_bytes())
        data[-1] ^= 1
        weights_file.write_bytes(data)
        with pytest.raises(CorruptData, match=r"update-00000000/model\.safetensors"):
            await make_trainer(config, store).start()
        (folder / "meta.json").write_text("{}")
        with pytest.raises(CorruptData, match=r"meta\.json"):
            await make_trainer(config, store).start()

    run(tmp_path, valkey, work)


def test_meta_travels(tmp_path, valkey):
    async def work(config, store):
        await train(config, store, make_trainer(config, store), 1)
        saved = checkpoints.Checkpoints(config.run_folder / "checkpoints").newest()
        assert saved.meta.row == (await store.updates())[0]
        assert from_plain(checkpoints.Meta, to_plain(saved.meta)) == saved.meta
        assert set(saved.meta.files) == {"model.safetensors", "optimiser.safetensors"}

    run(tmp_path, valkey, work)


def test_a_trainer_needs_weights(tmp_path):
    config = run_config(tmp_path)
    bare = config.policy.model_copy(update={"checkpoint": None})
    trainer = K3Trainer(config.model_copy(update={"policy": bare}), None, blobs_of(config))
    with pytest.raises(ConfigError, match=r"policy\.checkpoint or policy\.model"):
        asyncio.run(trainer.start())


def test_only_named_levels_are_pulled_towards_the_first_weights(tmp_path, valkey):
    """Before the first step policy and reference are one, after it they differ."""

    async def drift(config, store):
        trainer = make_trainer(config, store)
        found = []
        for update in range(2):
            state = await trainer.start()
            groups = await groups_for(config, store, state)
            report = await trainer.update(UpdatePlan(update, groups))
            found.append(report.metrics.get("learner/reference_drift_mean"))
        return found

    anchored = ("objective.reference_coef=0.5", "objective.reference_levels=[max]")
    first, second = run(tmp_path / "a", valkey, drift, *anchored)
    assert first == pytest.approx(0.0, abs=1e-6)
    assert abs(second) > 1e-5
    other = ("objective.reference_coef=0.5", "objective.reference_levels=[low]")
    assert run(tmp_path / "b", valkey, drift, *other) == [None, None]
