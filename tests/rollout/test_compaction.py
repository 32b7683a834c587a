"""Compaction over real parts: what the contexts hold, limits, kills and pauses at every place."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from k3rl.envs import registry
from k3rl.envs.harness.parts import Context, ContextKind, Harness, Memory, SubAgents
from k3rl.envs.harness.scripted import harnessed
from k3rl.envs.harness.session import HarnessedEnv
from k3rl.errors import UserInputError
from k3rl.learner.packing import Stored, pack
from k3rl.replay.verify import replay as replay_one
from k3rl.rollout.engine import GenerateRequest
from k3rl.rollout.sub_agents import child_key
from k3rl.store.audit import compare_ledger
from k3rl.store.protocol import Ref
from k3rl.store.reader import StoreReader
from k3rl.types import (
    Author,
    FinishReason,
    Message,
    OutcomeKind,
    TaskLimits,
    TrajectoryHeader,
    TrajectoryKey,
    TrajectoryState,
    TruncationCause,
)
from tests.builders import HUNT, NOTES, InterruptedEngine, note, open_bench, record_of, say

pytestmark = pytest.mark.sandbox
LIMITS = TaskLimits(max_turns=16, max_context_tokens=1536)
COMPACT = Harness("Be brief.", context=Context(ContextKind.COMPACTION, 0.4), memory=Memory())
NUM_CONTEXTS = 3


def run_bench(tmp_path, use):
    async def go():
        async with open_bench(tmp_path) as bench:
            await asyncio.wait_for(use(bench), 120)

    asyncio.run(go())


def session(harness=COMPACT, env_id=NOTES) -> HarnessedEnv:
    return HarnessedEnv(registry.make(env_id), harness)


def talker(task, transcript, rng) -> Message:
    """Notes long lines until the answer to one says there are enough, then submits."""
    said = [message for message in transcript if message.role == "assistant"]
    if len(said) < 6:
        return say(note("a long line " * 4 + str(len(said))))
    return say(("submit", {"value": "ok"}))


def engine(bench, policy=talker, env=None, delta_tokens=4) -> InterruptedEngine:
    wrapped = harnessed(policy, env or session())
    return InterruptedEngine(bench.renderer, ["x"], lambda *_: wrapped, delta_tokens=delta_tokens)


async def play(bench, env=None, policy=talker, **begin):
    env = env or session()
    return await bench.play(env, engine(bench, policy, env), limits=LIMITS, **begin)


async def again(bench, stored, env):
    reader = StoreReader(bench.host.root)
    args = (env, bench.backend, env.sandbox_spec, bench.renderer)
    return await replay_one(reader, stored.id, *args)


async def contexts_of(bench, stored):
    refs = [Ref(stored.id, context=context) for context in range(stored.num_contexts)]
    return [await bench.store.read(ref) for ref in refs]


def test_every_context_is_stored_and_its_summary_is_in_the_loss(tmp_path):
    async def use(bench):
        stored = await play(bench)
        assert (stored.outcome.kind, stored.outcome.reward) == (OutcomeKind.COMPLETED, 1.0)
        assert stored.num_contexts == NUM_CONTEXTS
        reads = await contexts_of(bench, stored)
        messages = [bench.renderer.parse_context(read.token_ids) for read in reads]
        for number, (read, said) in enumerate(zip(reads, messages, strict=True)):
            steps = [step for step in stored.steps if step.context == number]
            opening = steps[0]
            assert (opening.token_start, opening.finish_reason) == (0, None)
            assert not read.loss_mask[: opening.token_end].any()
            assert said[0] == Message("system", "Be brief.")
            assert len(read.token_ids) == steps[-1].token_end <= LIMITS.max_context_tokens
            if number:
                summary = messages[number - 1][-1].content
                assert said[2].content == f"Summary so far:\n{summary}"
            if number < NUM_CONTEXTS - 1:
                last = steps[-1]
                assert said[-2] == Message("user", COMPACT.context.instruction)
                assert read.loss_mask[last.token_start : last.token_end].all()
                assert last.finish_reason is FinishReason.STOP
                assert said[-1].role == "assistant"
                assert steps[-2].token_end >= LIMITS.max_context_tokens * 0.4
        assert [step.index for step in stored.steps] == list(range(len(stored.steps)))
        num_masked = sum(int(read.loss_mask.sum()) for read in reads)
        assert stored.num_policy_tokens == num_masked
        authors = [s.author for read in reads for s in read.spans]
        assert authors[0] is Author.ENVIRONMENT
        assert (await bench.notes(stored)).count(b"\n") == 6

    run_bench(tmp_path, use)


def test_the_learner_packs_all_contexts_with_the_advantage_of_the_trajectory(tmp_path):
    async def use(bench):
        stored = await play(bench)
        reads = await contexts_of(bench, stored)
        packed = pack(
            [Stored(read, 0, 0.5) for read in reads],
            version=0,
            max_staleness=4,
            micro_batch_tokens=1024,
        )
        assert packed.num_policy_tokens == stored.num_policy_tokens
        assert packed.num_trajectories == 1
        batches = [micro.batch for micro in packed.micro_batches]
        assert sum(len(batch.cu_seqlens) - 1 for batch in batches) == NUM_CONTEXTS
        for batch in batches:
            assert set(batch.trajectory_index.tolist()) == {0}
            assert set(batch.advantages[batch.loss_mask].tolist()) == {0.5}

    run_bench(tmp_path, use)


def test_replay_goes_through_every_context(tmp_path):
    async def use(bench):
        stored = await play(bench)
        report = await again(bench, stored, session())
        assert report.is_identical, report.first_divergence
        assert len(report.verdicts) == len(stored.steps)
        other = Harness("Be long.", context=COMPACT.context, memory=COMPACT.memory)
        changed = await again(bench, stored, session(other))
        assert changed.first_divergence is not None
        assert "opening" in changed.first_divergence.differences[0]

    run_bench(tmp_path, use)


def test_replay_refuses_another_harness_where_the_header_names_one(tmp_path):
    async def use(bench):
        env = session()
        number = len(await bench.store.trajectories())
        task = env.task("train", number)
        key = TrajectoryKey("r", task.key, "max", number, 0)
        digests = {"env": env.spec.digest, "harness": env.harness.digest}
        await bench.store.begin([TrajectoryHeader(key, task, digests=digests)])
        await bench.episode(await bench.claim(), env, engine(bench)).run()
        stored = await bench.store.get(key.id)
        assert (await again(bench, stored, session())).is_identical
        with pytest.raises(UserInputError, match="harness digest"):
            await again(bench, stored, session(Harness()))

    run_bench(tmp_path, use)


class InterruptedStore:
    """A store whose `nth` commit of a step, once durable, ends the episode that made it."""

    def __init__(self, store, nth: int | None) -> None:
        self.store, self.nth, self.num_commits = store, nth, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    async def commit_step(self, *args):
        acks = await self.store.commit_step(*args)
        self.num_commits += 1
        if self.num_commits == self.nth:
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        return acks


async def attempt(
    bench, header, *, kill_at=None, pause_at=None, commit=None, env=None, policy=talker
):
    """One claim of the trajectory, ended at a number of tokens or after a commit."""
    env = env or session()
    playing = engine(bench, policy, env)
    episode = bench.episode(await bench.claim(), env, playing)
    if commit is not None:
        episode.parts = replace(episode.parts, store=InterruptedStore(bench.store, commit))

    async def kill():
        asyncio.current_task().cancel()

    if kill_at is not None:
        playing.at, playing.interrupt = kill_at, kill
    if pause_at is not None:
        playing.at, playing.interrupt = pause_at, episode.pause
    task = asyncio.create_task(episode.run())
    (result,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(result, asyncio.CancelledError):
        await bench.store.reap("w")
    elif isinstance(result, BaseException):
        raise result
    await bench.store.requeue_paused()
    return await bench.store.get(header.id)


def test_an_interrupted_trajectory_equals_an_uninterrupted_one_at_every_place(tmp_path):
    """A kill behind every commit; a pause and a kill at every 24th sampled token, summaries too."""
    wanted = {}

    async def whole(bench):
        stored = await play(bench)
        wanted["record"] = await record_of(bench.store, stored.id)
        wanted["tokens"], wanted["steps"] = stored.num_policy_tokens, len(stored.steps)

    run_bench(tmp_path / "whole", whole)

    async def interrupted(bench, **how):
        header = await bench.begin(session(), limits=LIMITS)
        for _ in range(200):
            stored = await attempt(bench, header, **how)
            if stored.state is TrajectoryState.FINISHED:
                break
        assert await record_of(bench.store, header.id) == wanted["record"]
        assert compare_ledger(bench.host.root, bench.ledger_folder).is_exact

    # Of every claim one commit stands, or so many tokens: each place is passed, one after another.
    run_bench(tmp_path / "commits", lambda bench: interrupted(bench, commit=1))
    run_bench(tmp_path / "pauses", lambda bench: interrupted(bench, pause_at=24))
    run_bench(tmp_path / "kills", lambda bench: interrupted(bench, kill_at=92))


def test_a_pause_behind_the_summary_opens_the_next_context_later(tmp_path):
    async def use(bench):
        whole = await play(bench)
        summary = next(s for s in whole.steps if s.context == 0 and was_last(whole, s))
        reads = await contexts_of(bench, whole)
        num_sampled = int(reads[0].loss_mask[: summary.token_end].sum())
        header = await bench.begin(session(), limits=LIMITS)
        stored = await attempt(bench, header, pause_at=num_sampled)
        assert (stored.num_contexts, len(stored.steps)) == (1, summary.index + 1)
        assert stored.steps[-1].env_state["harness"]["is_context_closed"]
        stored = await attempt(bench, header)
        assert (stored.outcome.reward, stored.num_contexts) == (1.0, NUM_CONTEXTS)

    def was_last(whole, step):
        return step.index + 1 < len(whole.steps) and whole.steps[step.index + 1].context == 1

    run_bench(tmp_path, use)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_budget_counts_over_contexts(tmp_path, is_paused):
    async def use(bench):
        whole = await play(bench)
        budget = whole.num_policy_tokens - 10
        header = await bench.begin(session(), limits=LIMITS, budget=budget)
        stored = await attempt(bench, header, pause_at=budget - 12 if is_paused else None)
        if is_paused:
            assert (stored.outcome, stored.num_contexts) == (None, NUM_CONTEXTS)
            stored = await attempt(bench, header)
        assert stored.outcome.cause is TruncationCause.BUDGET
        assert stored.num_policy_tokens == budget

    run_bench(tmp_path, use)


def test_turns_are_counted_without_summaries_and_no_summary_is_asked_for_behind_the_last(tmp_path):
    async def use(bench):
        harness = Harness(context=Context(ContextKind.COMPACTION, 0.01), max_turns=3)
        stored = await play(bench, session(harness))
        assert stored.outcome.cause is TruncationCause.TURNS
        turns = [step for step in stored.steps if step.calls]
        assert (len(turns), stored.num_contexts) == (3, 3)
        assert not stored.steps[-1].env_state["harness"]["is_summarising"]

    run_bench(tmp_path, use)


def test_the_oracle_solves_hunts_over_several_contexts(tmp_path):
    async def use(bench):
        harness = Harness(context=Context(ContextKind.COMPACTION, 0.3))
        policy = registry.policy(HUNT, "oracle")
        for _ in range(3):
            stored = await bench.play(
                session(harness, HUNT), engine(bench, policy, session(harness, HUNT))
            )
            assert stored.outcome.reward == 1.0
            assert (await again(bench, stored, session(harness, HUNT))).is_identical

    run_bench(tmp_path, use)


def test_contexts_have_random_numbers_of_their_own():
    key = TrajectoryKey("r", "t", "max", 0, 0)
    none = np.empty(0, np.int32)
    requests = [GenerateRequest(key, None, none, 0, 1, (), context=context) for context in range(3)]
    assert requests[0].stream == key.id
    assert len({request.stream for request in requests}) == 3


# Sub-agents

DELEGATING = Harness(sub_agents=SubAgents(max_count=2, max_turns=3, tools=("note",)), memory=None)


def boss(task, transcript, rng) -> Message:
    """Gives a task away twice, then submits; as the sub-agent it notes a line and answers."""
    if transcript[0].content == SubAgents().prompt:
        said = sum(message.role == "assistant" for message in transcript)
        if said == 0:
            return say(note(f"by a sub-agent {rng.integers(1 << 30)}"))
        return Message("assistant", f"line {transcript[-1].content} is written")
    answers = [message for message in transcript if message.role == "tool"]
    if len(answers) < 2:
        return say(("assign_task", {"task": f"write line {len(answers)}"}))
    return say(("submit", {"value": "ok"}))


def test_sub_agents_work_outside_the_loss_and_replay(tmp_path):
    async def use(bench):
        stored = await play(bench, session(DELEGATING), boss)
        assert stored.outcome.reward == 1.0
        lines = (await bench.notes(stored)).splitlines()
        assert [line[:15] for line in lines] == [b"by a sub-agent "] * 2
        assert lines[0] != lines[1], "each sub-agent draws its own numbers"
        (read,) = await contexts_of(bench, stored)
        (first, second) = [s.calls[0] for s in stored.steps if s.calls and s.calls[0].output][:2]
        assert (first.output, second.output) == ("line 1 is written", "line 2 is written")
        said = bench.renderer.parse_context(read.token_ids)
        assert not any("by a sub-agent" in message.content for message in said)
        harness_states = [step.env_state["harness"] for step in stored.steps]
        assert harness_states[-1]["num_sub_agents"] == 2
        assert harness_states[-1]["num_sub_agent_tokens"] > 0
        own = [m for m in said if m.role == "assistant"]
        num_own = sum(len(bench.renderer.assistant_ids(message)) for message in own)
        assert stored.num_policy_tokens == num_own
        report = await again(bench, stored, session(DELEGATING))
        assert report.is_identical, report.first_divergence

    run_bench(tmp_path, use)


@pytest.mark.parametrize("how", ["pause_at", "kill_at"])
def test_an_interrupted_sub_agent_does_the_same_again(tmp_path, how):
    async def use(bench):
        header = await bench.begin(session(DELEGATING), limits=LIMITS)
        for point in itertools.count(4, 12):
            stored = await attempt(
                bench, header, env=session(DELEGATING), policy=boss, **{how: point}
            )
            if stored.state is TrajectoryState.FINISHED:
                break
        record = await record_of(bench.store, header.id)
        assert record == wanted["record"]

    wanted = {}

    async def whole(bench):
        stored = await play(bench, session(DELEGATING), boss)
        wanted["record"] = await record_of(bench.store, stored.id)

    run_bench(tmp_path / "whole", whole)
    run_bench(tmp_path / "parts", use)


def test_a_sub_agent_ends_at_its_limits(tmp_path):
    def chatty(task, transcript, rng) -> Message:
        if transcript[0].content == SubAgents().prompt:
            return say(note("again"))
        answered = any(message.role == "tool" for message in transcript)
        if answered:
            return say(("submit", {"value": "ok"}))
        return say(("assign_task", {"task": "write"}))

    async def use(bench):
        for limited, num_turns in ((SubAgents(max_turns=2, tools=("note",)), 2),
                                   (SubAgents(max_tokens=7, tools=("note",)), 0)):  # fmt: skip
            env = session(Harness(sub_agents=limited))
            stored = await play(bench, env, chatty)
            step = next(step for step in stored.steps if step.calls)
            assert step.calls[0].output == "the sub-agent came to no answer"
            (report,) = step.env_state["harness"]["sub_agents"]
            assert len(report["turns"]) == num_turns
            assert report["num_tokens"] <= limited.max_tokens
            env = session(Harness(sub_agents=limited))
            assert (await again(bench, stored, env)).is_identical

    run_bench(tmp_path, use)


def test_sub_agents_are_keyed_apart(tmp_path):
    async def use(bench):
        header = await bench.begin(session(DELEGATING))
        ids = {child_key(header, number).id for number in range(3)}
        assert len(ids | {header.id}) == 4

    run_bench(tmp_path, use)
