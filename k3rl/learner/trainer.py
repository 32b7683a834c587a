"""The trainer of a run: trajectories by reference in, published policy versions out.

    plan -> read tokens -> pack -> forward, backward -> agreement check -> optimiser step
         -> blob, version number -> checkpoint (holds the update's row) -> row in `updates`

A crash before the checkpoint leaves a version number that nobody serves, and the update is made
again; a crash after it loses nothing, because `start` records the checkpoint's row once more.
Trajectories are consumed when a row below the newest checkpoint's next update names them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np

from k3rl import metrics
from k3rl.algorithms.advantage import group_advantages, is_informative
from k3rl.blobs import BlobStore
from k3rl.config import Config
from k3rl.errors import ConfigError, UserInputError
from k3rl.learner.agreement import Agreement
from k3rl.learner.checkpoint import Checkpoints
from k3rl.learner.k3_learner import WEIGHTS_FILE, K3Learner
from k3rl.learner.packing import Packed, Stored, pack
from k3rl.learner.protocol import (
    Denominators,
    Trainer,
    TrainerState,
    UpdatePlan,
    UpdateReport,
)
from k3rl.model import checkpoint
from k3rl.model.model import K3Model
from k3rl.store.protocol import Ref, TrajectoryStore, UpdateRow
from k3rl.types import (
    Digest,
    JsonObject,
    PackedBatch,
    TrajectoryId,
    TrajectoryState,
    canonical_json,
)
from k3rl.weights.blob import manifest_of

CHECKPOINTS = "checkpoints"


def make_trainer(config: Config, store: TrajectoryStore) -> Trainer:
    """The trainer that a config names. Its weights are loaded by `start`."""
    return K3Trainer(config, store, BlobStore(config.run_folder / "store" / "blobs"))


class K3Trainer:
    """One run's trainer: a K3Learner, the checkpoints of the run and its published versions."""

    def __init__(self, config: Config, store: TrajectoryStore, blobs: BlobStore) -> None:
        """Loads nothing yet."""
        self.config, self.store, self.blobs = config, store, blobs
        self.checkpoints = Checkpoints(config.run_folder / CHECKPOINTS)
        self.learner: K3Learner | None = None
        """None before `start`, and after an update that broke off half done."""
        self.next_update = 0
        self.manifest: JsonObject = {}
        """Of the version that was published last."""
        self._reference: K3Learner | None = None
        """Holds the weights the run started from; only with `objective.reference_coef`."""

    async def start(self) -> TrainerState:
        """Load the newest checkpoint, or the policy's first weights, and publish them.

        A checkpoint is published under its own version number, the first weights as version 0.
        After a rollback (rows were recorded that no checkpoint holds) the weights get a new number
        instead, so that no engine sees a version go back. When it ran before and no update broke
        off since, it only answers.
        """
        if self.learner is None:
            await self._load()
        consumed = dict.fromkeys(member for row in await self._rows() for member in row.members)
        return self._state(tuple(consumed))

    async def update(self, plan: UpdatePlan) -> UpdateReport:
        """One optimiser step on the plan's groups; see the contract.

        Groups without variance have no gradient: they are consumed, counted, and left out of the
        loss and its denominator. Policy tokens older than `max_staleness` versions are left out of
        both as well.
        """
        began = time.monotonic()
        learner = self._check(plan)
        rewards = [[member.reward for member in group] for group in plan.groups]
        members = [member.id for group in plan.groups for member in group]
        advantages = [value for group in rewards for value in group_advantages(group)]
        trains = [is_informative(group) for group in rewards for _ in group]
        packed = await self._pack(members, advantages, trains)
        self.learner = None  # Until the update is whole: what breaks off is loaded again.
        learner.update = plan.update
        try:
            losses, found = await self._accumulate(learner, packed, members)
        except BaseException:
            await learner.drop_gradients()
            self.learner = learner
            raise
        stepping = time.monotonic()
        step = await learner.optim_step(plan.update)
        found[metrics.STEP_S] = time.monotonic() - stepping
        row = await self._publish(learner, plan.update, members, advantages, losses, packed, step)
        await self._keep(learner, row)
        self.learner, self.next_update = learner, plan.update + 1
        found |= {metrics.LEARNER + name: value for name, value in step.items()}
        found[metrics.NUM_UNINFORMATIVE_GROUPS] = float(sum(not is_informative(r) for r in rewards))
        found[metrics.NUM_STALE_TOKENS] = float(packed.num_stale_tokens)
        found[metrics.UPDATE_S] = time.monotonic() - began
        return UpdateReport(self._state(tuple(members)), found)

    # Start

    async def _load(self) -> None:
        saved = await asyncio.to_thread(self.checkpoints.newest)
        if saved is not None:
            learner = self._learner(checkpoint.load_model(saved.folder / WEIGHTS_FILE))
        else:
            learner = self._learner(self._first_weights())
        version, parent, self.next_update = 0, 0, 0
        if saved is not None:
            await learner.load(saved.folder)
            await self.store.record_update(saved.meta.row)
            self.next_update = saved.meta.row.update + 1
            version, parent = (saved.meta.manifest[key] for key in ("policy_version", "parent"))
        model = learner.model
        data = checkpoint.to_bytes(model.state_dict(), model.config)
        blob = await asyncio.to_thread(self.blobs.put, data)
        recorded = [row.policy_version_out for row in await self.store.updates()]
        is_behind = max(recorded, default=0) > version
        if is_behind or (saved is not None and blob != saved.meta.manifest["blob"]):
            version, parent = await self.store.next_version(version, blob, blob), version
        self.manifest = manifest_of(version, parent, blob, len(data))
        self.learner = learner

    def _first_weights(self) -> K3Model:
        """What the run starts from, also as the reference."""
        policy = self.config.policy
        model = checkpoint.first_model(policy.checkpoint, policy.model, self.config.seed)
        if model is not None:
            return model
        raise ConfigError("policy: a trainer needs policy.checkpoint or policy.model")

    def _learner(self, model: K3Model) -> K3Learner:
        settings = self.config
        return K3Learner(
            model, settings.objective, settings.optimiser, num_threads=settings.learner.num_threads
        )

    async def _rows(self) -> list[UpdateRow]:
        """The rows that count: the last one of every update below the next."""
        rows = {row.update: row for row in await self.store.updates()}
        return [row for update, row in sorted(rows.items()) if update < self.next_update]

    def _state(self, consumed: tuple[TrajectoryId, ...]) -> TrainerState:
        version = self.manifest["policy_version"]
        return TrainerState(self.next_update, version, self.manifest, consumed)

    # Parts of an update

    def _check(self, plan: UpdatePlan) -> K3Learner:
        if self.learner is None:
            raise UserInputError(f"update {plan.update}: the trainer is not started")
        if plan.update != self.next_update:
            raise UserInputError(f"update {plan.update}: the next one is {self.next_update}")
        ids = Counter(member.id for group in plan.groups for member in group)
        if twice := [id for id, count in ids.items() if count > 1]:
            raise UserInputError(f"update {plan.update}: trajectory {twice[0]} is named twice")
        return self.learner

    async def _pack(
        self, members: list[TrajectoryId], advantages: list[float], trains: list[bool]
    ) -> Packed:
        indices = [index for index, train in enumerate(trains) if train]
        found = await asyncio.gather(
            *(self._read(members[index], index, advantages[index]) for index in indices)
        )
        settings = self.config
        return await asyncio.to_thread(
            pack,
            [context for contexts in found for context in contexts],
            version=self.manifest["policy_version"],
            max_staleness=settings.rollout.max_staleness,
            micro_batch_tokens=settings.learner.micro_batch_tokens,
        )

    async def _read(self, id: TrajectoryId, index: int, advantage: float) -> list[Stored]:
        trajectory = await self.store.get(id)
        if trajectory.state is not TrajectoryState.FINISHED:
            raise UserInputError(f"trajectory {id} is {trajectory.state}, not finished")
        if trajectory.header.temperature != 1.0:
            law = f"sampled at temperature {trajectory.header.temperature:g}"
            raise UserInputError(f"trajectory {id} was {law}; the law that is trained has 1")
        refs = [Ref(id, context=context) for context in range(trajectory.num_contexts)]
        reads = await asyncio.gather(*(self.store.read(ref) for ref in refs))
        is_anchored = self._is_anchored(trajectory.header.key.level)
        return [Stored(read, index, advantage, is_anchored) for read in reads]

    def _is_anchored(self, level: str) -> bool:
        objective = self.config.objective
        return objective.reference_coef > 0 and level in objective.reference_levels

    async def _with_reference(self, batch: PackedBatch, anchored: frozenset[int]) -> PackedBatch:
        """The batch with the reference's log-probs at the tokens of anchored trajectories."""
        is_anchored = np.isin(batch.trajectory_index, list(anchored))
        if not is_anchored.any():
            return batch
        if self._reference is None:
            self._reference = self._learner(self._first_weights())
        logprobs = await self._reference.logprobs(batch)
        return replace(batch, ref_logprobs=np.where(is_anchored, logprobs, np.float32(np.nan)))

    async def _accumulate(
        self, learner: K3Learner, packed: Packed, members: list[TrajectoryId]
    ) -> tuple[list[float], dict[str, float]]:
        """Gradients of all micro-batches: loss per member, and metrics; checked for agreement."""
        denominators = Denominators(packed.num_policy_tokens, packed.num_trajectories)
        settings = self.config.learner
        agreement = Agreement(
            learner.model, members, most=settings.agreement_max, mean_k3=settings.agreement_k3
        )
        losses, sums = [0.0] * len(members), defaultdict[str, float](float)
        num_tokens, began = 0, time.monotonic()
        for micro in packed.micro_batches:
            batch = await self._with_reference(micro.batch, packed.anchored)
            stats = await learner.forward_backward(batch, denominators)
            agreement.add(micro, learner.policy_logprobs)
            indices = micro.batch.trajectory_index[micro.batch.cu_seqlens[:-1]]
            for index, loss in zip(indices, stats.losses, strict=True):
                losses[index] += loss
            for name, value in stats.metrics.items():
                sums[name] += value
            num_tokens += stats.num_tokens
        passed_s = time.monotonic() - began
        found = await learner.run(agreement.check)
        count = max(packed.num_policy_tokens, 1)
        found |= {f"{metrics.LEARNER}{name}_mean": value / count for name, value in sums.items()}
        found[metrics.LOSS] = sum(losses)
        found[metrics.LEARNER_TOKENS] = float(num_tokens)
        found[metrics.LEARNER_TOKENS_PER_S] = num_tokens / passed_s
        found[metrics.LEARNER_POLICY_TOKENS] = float(packed.num_policy_tokens)
        return losses, found

    async def _publish(
        self,
        learner: K3Learner,
        update: int,
        members: list[TrajectoryId],
        advantages: list[float],
        losses: list[float],
        packed: Packed,
        step: dict[str, float],
    ) -> UpdateRow:
        """The new weights under the next version number; returns the update's row."""
        before = int(self.manifest["policy_version"])

        def work() -> tuple[int, Digest]:
            data = checkpoint.to_bytes(learner.model.state_dict(), learner.model.config)
            return len(data), self.blobs.put(data)

        num_bytes, blob = await learner.run(work)
        version = await self.store.next_version(before, blob, blob)
        self.manifest = manifest_of(version, before, blob, num_bytes)
        stats = await self.store.stats()
        return UpdateRow(
            update=update,
            policy_version_in=before,
            policy_version_out=version,
            manifest_seq=stats.manifest_seq,
            rng_key=canonical_json([self.config.seed, "update", update]).decode(),
            members=tuple(members),
            advantages=tuple(advantages),
            denominators={
                "num_policy_tokens": float(packed.num_policy_tokens),
                "num_trajectories": float(packed.num_trajectories),
            },
            loss=tuple(losses),
            gradient_norm=step["gradient_norm"],
            checkpoint=blob,
        )

    async def _keep(self, learner: K3Learner, row: UpdateRow) -> None:
        """Checkpoint, then record: a row without its checkpoint would be trained on again."""
        if (row.update + 1) % self.config.learner.checkpoint_every == 0:
            await self.checkpoints.write(learner, row, self.manifest)
        await self.store.record_update(row)
