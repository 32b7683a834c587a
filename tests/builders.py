"""Real parts for tests of the loop: a store on a private Valkey, sandboxes, an environment that
can be told to fail, scripts that play it, and engines that are interrupted at a chosen token."""

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from k3rl import config as configs
from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.base import Observation
from k3rl.envs.session import ToolSession
from k3rl.envs.tools import Tool, run_command
from k3rl.rollout.episode import Episode, EpisodeParts
from k3rl.rollout.scripted import ScriptedEngine
from k3rl.rollout.worker import make_backend, make_renderer
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.store.host import StoreHost
from k3rl.store.ledger import Ledger
from k3rl.store.protocol import Ref
from k3rl.types import Message, Task, TaskLimits, ToolCall, TrajectoryHeader, TrajectoryKey

NOTES = "test/Notes-v0"
NOWHERE = "test/Nowhere-v0"
HUNT = "k3rl/FileHunt-v0"
MATH = "k3rl/Reason-v0"
TERSE = {"id": MATH, "kwargs": {"preset": "arithmetic"}}
ANSWER = "ok"
NUM_NOTES = 3
"""Calls of the `writer` before it submits."""
APPEND = 'echo "$1" >> notes.txt; wc -l < notes.txt'


def say(*calls: tuple[str, dict], content: str = "") -> Message:
    made = tuple(ToolCall(tool, args, i) for i, (tool, args) in enumerate(calls, start=1))
    return Message("assistant", content, think="go", tool_calls=made)


def note(text: str) -> tuple[str, dict]:
    return "note", {"text": text}


SUBMIT = say(("submit", {"value": ANSWER}))


def script(*turns: Message):
    """A policy that says `turns` in order and the last one for ever."""

    def policy(task, transcript, rng) -> Message:
        said = sum(message.role == "assistant" for message in transcript)
        return turns[min(said, len(turns) - 1)]

    return policy


SCRIPTS = {
    "writer": script(*(say(note(f"line {i}")) for i in range(NUM_NOTES)), SUBMIT),
    "endless": script(say(note("again"))),
    "null": script(Message("assistant", "no", think="")),
    "clumsy": script(
        say(("fly", {"to": "moon"})), say(("note", {"txt": "x"})), say(note("line 0")), SUBMIT
    ),
    "double": script(say(note("a"), note("b")), SUBMIT),
    "crasher": script(say(note("before")), say(("crash", {})), SUBMIT),
    "stamper": script(say(note("before")), say(("stamp", {})), say(note("after")), SUBMIT),
    "marker": script(say(note("before")), say(("mark", {})), say(note("after")), SUBMIT),
    "recaller": script(say(("recall", {})), say(note("line 0")), say(("recall", {})), SUBMIT),
    "peeker": script(say(note("before")), say(("peek", {})), say(note("after")), SUBMIT),
}


@registry.register(NOTES, policies=SCRIPTS)
class Notes(ToolSession):
    """Every `note` adds a line to notes.txt; submitting ANSWER is right.

    `note` sets `called`; `hang_at` sets `reached` in that turn's note and never returns. `flag`
    names a file of the host that `crash` and `peek` look for. `crash` closes the sandbox or, with
    `wipe`, puts a file in place of its folders. `grader` is ok, raises, loses (the sandbox), wipes
    or hangs. With `has_secret` a new session draws a number that `recall` tells.
    Class-wide, `num_open` counts sessions and `num_calling` running notes.
    """

    sandbox_spec = SandboxSpec(executables=("sh", "wc"))
    num_open = most_open = num_calling = 0

    def __init__(
        self,
        spec,
        hang_at: int | None = None,
        flag: str = "/nonexistent",
        grader: str = "ok",
        note_s: float = 0.0,
        wipe: bool = False,
        has_secret: bool = False,
    ) -> None:
        super().__init__(spec)
        self.hang_at, self.flag, self.grader, self.note_s = hang_at, Path(flag), grader, note_s
        self.has_secret = has_secret
        self.wipe, self.called, self.reached = wipe, asyncio.Event(), asyncio.Event()

    def make_tools(self) -> Sequence[Tool]:
        names = ("note", "recall", "stamp", "mark", "crash", "peek", "submit")
        return tuple(Tool.of(getattr(self, name)) for name in names)

    def task(self, split: str, index: int) -> Task:
        return Task(self.spec.id, index, split)

    def files(self, task: Task) -> Mapping[str, bytes]:
        return {"task.txt": f"{task.seed}\n".encode()}

    def observe(self, task: Task) -> Observation:
        return Observation((Message("user", f"take notes {task.seed}"),))

    def is_correct(self, task: Task, answer: str) -> bool:
        if self.grader == "raises":
            raise ZeroDivisionError("no such grade")
        return answer == ANSWER

    async def open(self, task, sandbox, state=None) -> Observation:
        observation = await super().open(task, sandbox, state)
        if self.has_secret and state is None:
            self.progress.memory["secret"] = secrets.token_hex(4)
        Notes.num_open += 1
        Notes.most_open = max(Notes.most_open, Notes.num_open)
        return observation

    async def close(self) -> None:
        if self._sandbox is not None:
            Notes.num_open -= 1
        await super().close()

    async def grade(self):
        if self.grader == "loses":
            await self._lose()
            await self.sandbox.get("notes.txt")
        if self.grader == "wipes":
            self._wipe()
        if self.grader == "hangs":
            self.reached.set()
            await asyncio.sleep(3600)
        return await super().grade()

    async def note(self, text: str) -> str:
        """Add a line"""
        result = await run_command(self.sandbox, "sh", "-c", APPEND, "-", text)
        self.called.set()
        Notes.num_calling += 1
        try:
            await asyncio.sleep(self.note_s)
            if self.hang_at == self.progress.num_turns:
                self.reached.set()
                await asyncio.sleep(3600)
        finally:
            Notes.num_calling -= 1
        return result.stdout.decode().strip()

    async def recall(self) -> str:
        """Tell the secret"""
        return self.progress.memory["secret"]

    async def stamp(self) -> str:
        """Tell a random id"""
        result = await run_command(self.sandbox, "cat", "/proc/sys/kernel/random/uuid")
        return result.stdout.decode()

    async def mark(self) -> str:
        """Write a random id down"""
        await run_command(self.sandbox, "sh", "-c", "cat /proc/sys/kernel/random/uuid > id.txt")
        return "done"

    async def crash(self) -> str:
        """Lose the sandbox unless the flag is up"""
        if self.wipe:
            self._wipe()
        elif not self.flag.exists():
            await self._lose()
        return "still here"

    async def peek(self) -> str:
        """End if the flag is up"""
        if self.flag.exists():
            self.finish(ANSWER)
        return "nothing"

    async def submit(self, value: str) -> str:
        """Give the answer"""
        self.finish(value)
        return ""

    async def _lose(self) -> None:
        await self.sandbox.backend.close(self.sandbox.id)

    def _wipe(self) -> None:
        owner = self.sandbox.backend.backend.scratch.owner
        shutil.rmtree(owner)
        owner.touch()


@registry.register(NOWHERE, policies=SCRIPTS)
class Nowhere(Notes):
    """Needs a program that no sandbox has."""

    sandbox_spec = SandboxSpec(executables=("no-such-program",))


class InterruptedEngine(ScriptedEngine):
    """Awaits `interrupt` once, when it has sampled `at` tokens of whatever requests."""

    at: int | None = None
    num_sampled = 0

    async def generate(self, request):
        async with contextlib.aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta
                self.num_sampled += len(delta.token_ids)
                if self.at is not None and self.num_sampled >= self.at:
                    self.at = None
                    await self.interrupt()


class Bench:
    """What one run's episodes need, and shorthands to play them by hand."""

    def __init__(self, config, host, store, backend) -> None:
        self.config, self.host, self.store, self.backend = config, host, store, backend
        self.renderer = make_renderer(config)
        self.ledger_folder = config.run_folder / "ledger"
        self.ledger = Ledger(self.ledger_folder / "bench.jsonl")
        self.blobs = BlobStore(config.run_folder / "store" / "blobs")

    def engine(self, name: str, delta_tokens: int = 4, make=InterruptedEngine, **options):
        return make(self.renderer, [name], registry.policy, delta_tokens=delta_tokens, **options)

    async def begin(self, env, *, limits: TaskLimits | None = None, **fields) -> TrajectoryHeader:
        """Queue a trajectory of the env's next task."""
        number = len(await self.store.trajectories())
        task = env.task("train", number)
        if limits is not None:
            task = Task(task.env_id, task.seed, task.split, task.metadata, limits)
        key = TrajectoryKey(self.config.run.name, task.key, "max", number, 0)
        digests = {"env": env.spec.digest, "tokenizer": self.renderer.digest}
        header = TrajectoryHeader(key, task, digests=digests, **fields)
        await self.store.begin([header])
        return header

    async def claim(self, worker_id: str = "w"):
        (claim,) = await self.store.claim(worker_id, 1, [], 5.0)
        return claim

    def episode(self, claim, env, policy: str | ScriptedEngine, **options) -> Episode:
        """`policy` is an engine, or the name of the script that one plays."""
        engine = self.engine(policy) if isinstance(policy, str) else policy
        parts = EpisodeParts(
            self.store,
            engine,
            self.renderer,
            self.backend,
            0,
            **{"ledger": self.ledger, **options},
        )
        return Episode(parts, env, env.sandbox_spec, claim)

    async def play(self, env, policy: str | ScriptedEngine, options=None, **begin):
        """A new trajectory, played until it finishes or is paused."""
        header = await self.begin(env, **begin)
        await self.episode(await self.claim(), env, policy, **(options or {})).run()
        return await self.store.get(header.id)

    async def notes(self, trajectory) -> bytes:
        """notes.txt, as the last committed snapshot holds it."""
        snapshot = await self.store.snapshot(trajectory.steps[-1].snapshot_after)
        sandbox_id = await self.backend.restore(Notes.sandbox_spec, snapshot)
        try:
            return await self.backend.get(sandbox_id, "notes.txt")
        finally:
            await self.backend.close(sandbox_id)


async def until(condition, every_s: float = 0.01):
    """The first truthy answer of an async condition."""
    while not (answer := await condition()):  # noqa: ASYNC110
        await asyncio.sleep(every_s)
    return answer


def load_config(folder: Path, *overrides: str, envs: Sequence[Mapping] = ({"id": NOTES},)):
    """A config whose run lies in `folder`; `overrides` as on the command line."""
    plain = {"run": {"name": "r", "folder": str(folder)}, "envs": [dict(env) for env in envs]}
    plain["metrics"] = {"tensorboard": False}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(plain))
    return configs.load(path, overrides)


@contextlib.asynccontextmanager
async def open_bench(folder: Path, *overrides: str, **options):
    """A bench over a running store of its own."""
    config = load_config(folder, *overrides, **options)
    host = StoreHost(config)
    store = await host.open()
    backend = make_backend(config)
    bench = Bench(config, host, store, backend)
    try:
        yield bench
    finally:
        bench.ledger.close()
        await backend.aclose()
        await host.aclose()


async def record_of(store, id: str) -> tuple:
    """Everything of a trajectory that pauses, crashes and speed must not change.

    Snapshot ids are left out: they name times of files too.
    """
    trajectory = await store.get(id)
    refs = [Ref(id, context=context) for context in range(trajectory.num_contexts)]
    reads = [await store.read(ref) for ref in refs]
    arrays = [each for r in reads for each in (r.token_ids, r.loss_mask, r.rollout_logprobs)]
    steps = [
        (
            (step.index, step.token_start, step.token_end, step.finish_reason, step.is_terminal),
            (step.context, step.tree_digest, step.env_state),
            [(call.call, call.status, call.output, call.output_digest) for call in step.calls],
        )
        for step in trajectory.steps
    ]
    spans = [read.spans for read in reads]
    return [array.tobytes() for array in arrays], spans, steps, trajectory.outcome
