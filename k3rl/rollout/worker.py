"""A rollout worker: claims trajectories from the store and plays them side by side.

It owns an engine and a sandbox backend and nothing else; all that must outlive it is in the store.
It runs as a Ray actor or inside the controller's process, by the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from k3rl.blobs import BlobStore
from k3rl.config import Config
from k3rl.envs import registry
from k3rl.envs.base import ScriptedPolicy, ToolEnv
from k3rl.envs.harness.drawing import harness_of
from k3rl.envs.harness.scripted import harnessed
from k3rl.envs.harness.session import HarnessedEnv
from k3rl.envs.phases import Deadlines
from k3rl.errors import ConfigError, Fenced, WeightsError
from k3rl.rollout.engine import RolloutEngine
from k3rl.rollout.episode import Episode, EpisodeParts
from k3rl.rollout.renderer import Renderer
from k3rl.rollout.scripted import ScriptedEngine
from k3rl.rollout.tokenizer import NanoTokenizer
from k3rl.sandboxes.admission import AdmissionLimits, PoolLimits
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.factory import open_backend
from k3rl.sandboxes.pool import Pool
from k3rl.sandboxes.spec import Capability, SandboxSpec
from k3rl.store.ledger import Ledger
from k3rl.store.protocol import Claim, TrajectoryStore, check_digests
from k3rl.types import JsonObject, Message, Task, TrajectoryId

CLAIM_SIZE = 8
"""Most trajectories of one claim: workers that have room for all that is queued share it."""
CLAIM_WAIT_S = 0.25
"""How long a claim waits for work; also how long a pause may have to wait for a claim."""


class RolloutWorker:
    """Plays up to `rollout.trajectories_per_worker` trajectories at once."""

    def __init__(self, config: Config, store: TrajectoryStore) -> None:
        """`store` is the service or a proxy to it."""
        self.config, self.store = config, store
        self._engine: RolloutEngine | None = None
        self._manifest: JsonObject | None = None
        self._episodes: dict[TrajectoryId, Episode] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._is_paused = self._is_stopping = False
        self._wake = asyncio.Event()
        self._claiming = asyncio.Lock()

    async def run(self, worker_id: str) -> None:
        """Claim and play until `stop`. Raises what made it impossible to go on (StoreError)."""
        engine = make_engine(self.config)
        if self._manifest is not None:
            await engine.apply(self._manifest)
        self._engine = engine
        backend = make_backend(self.config)
        parts = EpisodeParts(
            store=self.store,
            engine=engine,
            renderer=make_renderer(self.config),
            backend=backend,
            seed=self.config.seed,
            ack_tokens=self.config.rollout.ack_tokens,
            ledger=self._ledger(worker_id),
            deadlines=Deadlines(**self.config.rollout.deadlines.model_dump()),
        )
        beat = asyncio.create_task(self._heartbeat(worker_id))
        try:
            while not self._is_stopping:
                await self._claim_some(worker_id, parts)
        finally:
            beat.cancel()
            try:
                await self._cancel_all()
                await engine.aclose()
            finally:  # a cancellation must not leave sandboxes and their pool behind
                await backend.aclose()
                if parts.ledger is not None:
                    parts.ledger.close()

    async def pause(self) -> None:
        """Stop claiming and give everything back as paused; returns when all is given back."""
        self._is_paused = True
        async with self._claiming:
            pass
        await asyncio.gather(*(episode.pause() for episode in self._episodes.values()))
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def resume(self) -> None:
        """Claim again."""
        self._is_paused = False
        self._wake.set()

    async def stop(self) -> None:
        """End `run` after giving everything back."""
        await self.pause()
        self._is_stopping = True
        self._wake.set()

    async def apply(self, manifest: str) -> None:
        """Sample from a published version from now on; `manifest` is its manifest as JSON.

        Before `run` it is kept, and applied when the engine is made. Raises WeightsError.
        """
        try:
            loaded = json.loads(manifest)
        except ValueError as error:
            raise WeightsError(f"a manifest is not JSON: {error}") from None
        if self._engine is not None:
            await self._engine.apply(loaded)
        self._manifest = loaded

    async def stats(self) -> str:
        """The engine's counters as a JSON object; empty for an engine without any."""
        counters = getattr(self._engine, "stats", None)
        return json.dumps(asdict(counters) if counters is not None else {})

    async def _claim_some(self, worker_id: str, parts: EpisodeParts) -> None:
        """Wait for a free slot, then for a claim, and start what was claimed."""
        if self._failure is not None:
            raise self._failure
        capacity = self.config.rollout.trajectories_per_worker - len(self._episodes)
        if self._is_paused or capacity <= 0:
            self._wake.clear()
            await self._wake.wait()
            return
        async with self._claiming:
            holding = list(self._episodes)
            count = min(capacity, CLAIM_SIZE)
            claims = await self.store.claim(worker_id, count, holding, CLAIM_WAIT_S)
            for claim in claims:
                # Finished: its episode here has ended meanwhile, or is about to, and noted all.
                if claim.header.id in self._episodes or claim.outcome is not None:
                    continue
                if self._is_paused:
                    with contextlib.suppress(Fenced):
                        await self.store.pause(claim.header.id, claim.epoch)
                else:
                    self._start(claim, parts)

    def _start(self, claim: Claim, parts: EpisodeParts) -> None:
        env = make_session(self.config, claim.header.task)
        check_digests(claim.header, {"harness": env.harness.digest})
        episode = Episode(parts, env, sandbox_spec(self.config, env), claim)
        self._episodes[episode.id] = episode
        task = asyncio.create_task(self._play(episode))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, episode: Episode) -> None:
        try:
            await episode.run()
        except Fenced:
            # Another worker holds the trajectory now; what was sampled past its claim is void.
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self._episodes.pop(episode.id, None)
            self._wake.set()

    async def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _heartbeat(self, worker_id: str) -> None:
        """Renew the lease while every slot is busy and nothing else talks to the store."""
        try:
            while True:
                await asyncio.sleep(self.config.store.lease_ttl_s / 3)
                await self.store.claim(worker_id, 0, list(self._episodes), 0.0)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Let `run` end with the first error that an episode cannot answer for."""
        self._failure = self._failure or error
        self._wake.set()

    def _ledger(self, worker_id: str) -> Ledger | None:
        if not self.config.run.ledger:
            return None
        return Ledger(self.config.run_folder / "ledger" / f"{worker_id}.jsonl")


def make_session(config: Config, task: Task) -> HarnessedEnv:
    """A fresh session for `task`, in the harness that its group has."""
    harness = harness_of(config.harness.model_dump(mode="json"), config.seed, task)
    return HarnessedEnv(make_env(config, task.env_id), harness)


def find_policy(config: Config) -> Callable[[str, str], ScriptedPolicy]:
    """Scripted policies by environment and name, translated into each task's harness."""

    def find(env_id: str, name: str) -> ScriptedPolicy:
        policy = registry.policy(env_id, name)

        def play(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
            return harnessed(policy, make_session(config, task))(task, transcript, rng)

        return play

    return find


def make_env(config: Config, env_id: str) -> ToolEnv:
    """A fresh session of one of the config's environments, without a harness: draws tasks."""
    for env in config.envs:
        if env.id == env_id:
            return registry.make(env_id, reward=env.reward, **env.kwargs)
    raise ConfigError(f"environment {env_id} is not in the config's envs")


def sandbox_spec(config: Config, env: ToolEnv) -> SandboxSpec:
    """What the environment asks for; running unconfined, as allowed, drops what it requires."""
    if config.sandbox.backend == "process" and config.sandbox.allow_unconfined:
        return replace(env.sandbox_spec, required=(Capability.SNAPSHOT,))
    return env.sandbox_spec


def make_renderer(config: Config) -> Renderer:
    """The renderer of the config's policy."""
    assert config.policy.tokenizer == "nano"
    return Renderer(NanoTokenizer.shipped())


def make_engine(config: Config) -> RolloutEngine:
    """The config's engine. Raises ConfigError for a model that does not fit the tokenizer."""
    settings = config.engine
    if settings.kind == "native":
        # Scripted runs stay small and start fast: without torch.
        from k3rl.rollout.build import make_native

        return make_native(config, make_renderer(config), max_context_tokens(config))
    return ScriptedEngine(
        make_renderer(config),
        settings.policies,
        find_policy(config),
        delta_tokens=settings.delta_tokens,
        tokens_per_s=settings.tokens_per_s,
    )


def max_context_tokens(config: Config) -> int:
    """The longest context that the limits of the config's tasks allow."""
    tasks = [make_env(config, env.id).task(config.rollout.split, 0) for env in config.envs]
    return max(task.limits.max_context_tokens for task in tasks)


def make_backend(config: Config) -> SandboxBackend:
    """The config's sandbox backend over the run's blobs, behind a pool."""
    folder = config.run_folder
    scratch = Path(config.sandbox.scratch) if config.sandbox.scratch else folder / "scratch"
    blobs = BlobStore(folder / "store" / "blobs")
    settings = config.sandbox
    backend = open_backend(settings.backend, blobs, scratch, settings.allow_unconfined)
    pool = settings.pool
    admission = AdmissionLimits(
        max_sandboxes=pool.max_sandboxes,
        reserve_bytes=pool.reserve_bytes,
        wait_s=pool.admission_wait_s,
    )
    limits = PoolLimits(
        admission, num_warm=pool.num_warm, idle_pause_s=pool.idle_pause_s, lease_s=pool.lease_s
    )
    return Pool(backend, limits)
