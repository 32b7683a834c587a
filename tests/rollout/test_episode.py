"""Episodes over real parts: what they store, where limits cut, how they fail, pause and resume."""

import asyncio
import functools
import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from k3rl.envs import registry
from k3rl.envs.harness.parts import Harness
from k3rl.envs.harness.session import HarnessedEnv
from k3rl.envs.phases import Deadlines
from k3rl.envs.play import play
from k3rl.errors import EngineError, Fenced
from k3rl.rollout.episode import OVER_BUDGET_REWARD
from k3rl.store.audit import compare_ledger
from k3rl.store.ledger import read_ledgers
from k3rl.store.protocol import Ref
from k3rl.types import (
    Author,
    FinishReason,
    OutcomeKind,
    TaskLimits,
    TokenFrame,
    ToolStatus,
    TrajectoryState,
    TruncationCause,
)
from k3rl.types import Span as TokenSpan
from tests.builders import (
    HUNT,
    MATH,
    NOTES,
    NOWHERE,
    NUM_NOTES,
    InterruptedEngine,
    Notes,
    note,
    open_bench,
    record_of,
    say,
)

pytestmark = pytest.mark.sandbox
PLAYED = {"max_turns": 16, "max_context_tokens": 4096, "max_time_s": 600.0}


def in_bench(test):
    """Run an async test with a bench of its own; it may not take longer than 30 s."""

    @functools.wraps(test)
    def run(tmp_path, **arguments):
        async def go():
            async with open_bench(tmp_path) as bench:
                await asyncio.wait_for(test(bench, **arguments), 30)

        asyncio.run(go())

    # pytest asks for fixtures by the names it sees: `bench` is none.
    del run.__wrapped__
    return run


def notes(**kwargs) -> Notes:
    return registry.make(NOTES, **kwargs)


def limits(**changed) -> TaskLimits:
    return TaskLimits(**{**PLAYED, **changed})


# What is stored


@in_bench
async def test_the_opening_is_step_0(bench):
    """Prompt tokens, a snapshot of the task's files, no calls, nothing sampled."""
    header = await bench.begin(notes())
    episode = bench.episode(await bench.claim(), notes(), "writer")
    await episode.pause()
    assert await episode.run() is None

    stored = await bench.store.get(header.id)
    (opening,) = stored.steps
    prompt = bench.renderer.start(
        notes().observe(header.task).messages, notes().tools, header.key.level
    )
    read = await bench.store.read(Ref(header.id))
    assert read.token_ids.tolist() == prompt.tolist()
    assert (opening.token_start, opening.token_end) == (0, len(prompt))
    assert (opening.calls, opening.finish_reason, opening.is_terminal) == ((), None, False)
    assert opening.snapshot_before is None
    snapshot = await bench.store.snapshot(opening.snapshot_after)
    assert opening.tree_digest == snapshot.tree_digest
    sandbox_id = await bench.backend.restore(Notes.sandbox_spec, snapshot)
    assert await bench.backend.get(sandbox_id, "task.txt") == b"0\n"
    assert (stored.state, stored.num_policy_tokens) == (TrajectoryState.PAUSED, 0)


@pytest.mark.parametrize("env_id", [HUNT, MATH, "k3rl/CodeRepair-v0"])
def test_tokens_are_the_conversation_as_it_was_sampled(env_id, tmp_path):
    """start + assistant_ids + extend, built here from a play in messages; every array exact."""

    async def go():
        async with open_bench(tmp_path) as bench:
            stored = await bench.play(registry.make(env_id), "oracle")
            played = await play(
                registry.make(env_id),
                stored.header.task,
                registry.policy(env_id, "oracle"),
                bench.backend,
            )
            check_tokens(bench, stored, await bench.store.read(Ref(stored.id)), played)
            check_steps(stored, played)

    asyncio.run(go())


def check_tokens(bench, stored, read, played):
    env = registry.make(stored.header.task.env_id)
    parts, authors, answers = [], [], []
    for message in [*played.transcript, None]:
        if message is not None and message.role != "assistant":
            answers.append(message)
            continue
        if not parts:
            parts.append(bench.renderer.start(answers, env.tools, "max"))
            authors.append(Author.ENVIRONMENT)
        elif answers:
            parts.append(bench.renderer.extend(answers))
            authors.append(Author.ENVIRONMENT)
        if message is not None:
            parts.append(bench.renderer.assistant_ids(message))
            authors.append(Author.POLICY)
        answers = []
    is_policy = np.repeat([a is Author.POLICY for a in authors], [len(p) for p in parts])
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])]).tolist()
    assert read.token_ids.tolist() == np.concatenate(parts).tolist()
    assert read.loss_mask.tolist() == is_policy.tolist()
    assert np.isfinite(read.rollout_logprobs).tolist() == is_policy.tolist()
    assert np.isnan(read.rollout_logprobs).tolist() == (~is_policy).tolist()
    assert read.spans == tuple(
        TokenSpan(start, author, 0, 0) for start, author in zip(starts, authors, strict=True)
    )
    assert stored.num_tokens == len(read.token_ids)
    assert stored.num_policy_tokens == int(is_policy.sum())


def check_steps(stored, played):
    steps = stored.steps
    assert [step.index for step in steps] == list(range(len(steps)))
    assert steps[0].token_start == 0
    assert steps[-1].token_end == stored.num_tokens
    for before, after in itertools.pairwise(steps):
        assert after.token_start == before.token_end
        assert after.snapshot_before == before.snapshot_after
        assert after.finish_reason is FinishReason.STOP
    assert [step.is_terminal for step in steps] == [False] * (len(steps) - 1) + [True]
    called = [(c.call, c.status, c.output_digest) for step in steps for c in step.calls]
    assert called == [(r.call, r.status, r.output_digest) for r in played.records]
    assert stored.outcome == played.outcome
    assert stored.outcome.kind is OutcomeKind.COMPLETED
    assert stored.outcome.reward == 1.0


@in_bench
async def test_acknowledged_every_ack_tokens_and_at_a_turns_end(bench):
    """(tokens of a delta, ack_tokens): tokens of an acknowledgement."""
    for (delta_tokens, ack_tokens), most in {(4, 8): 8, (3, 8): 9, (1, 5): 5}.items():
        engine = bench.engine("writer", delta_tokens)
        stored = await bench.play(notes(), engine, {"ack_tokens": ack_tokens})
        spans = (await bench.store.read(Ref(stored.id))).spans
        ends = [*(span.start for span in spans[1:]), stored.num_tokens]
        wanted = set()
        for span, end in zip(spans, ends, strict=True):
            count = most if span.author is Author.POLICY else end - span.start
            starts = range(span.start, end, count)
            wanted |= {(start, min(count, end - start)) for start in starts}
        acks = read_ledgers(bench.ledger_folder)
        assert {(ack.offset, ack.count) for ack in acks if ack.id == stored.id} == wanted
    assert compare_ledger(bench.host.root, bench.ledger_folder).is_exact


class UpdatingEngine(InterruptedEngine):
    """Takes a new version after its first 12 tokens."""

    async def generate(self, request):
        async for delta in super().generate(request):
            self.policy_version = 1 if self.num_sampled < 12 else 2
            version = self.policy_version
            yield replace(delta, policy_version=version, state_version=version)


@in_bench
async def test_a_new_policy_version_in_mid_turn_ends_the_span_and_is_acknowledged(bench):
    """Decision 7: at a span's end what was sampled becomes durable."""
    engine = bench.engine("writer", make=UpdatingEngine)
    stored = await bench.play(notes(), engine, {"ack_tokens": 64})
    read = await bench.store.read(Ref(stored.id))
    start = stored.steps[0].token_end
    policy = [span for span in read.spans if span.author is Author.POLICY]
    assert policy[:2] == [
        TokenSpan(start, Author.POLICY, 1, 1),
        TokenSpan(start + 12, Author.POLICY, 2, 2),
    ]
    counts = {ack.offset: ack.count for ack in read_ledgers(bench.ledger_folder)}
    assert counts[start] == 12


@in_bench
async def test_two_calls_in_one_turn_are_one_step(bench):
    stored = await bench.play(notes(), "double")
    outputs = [[call.output for call in step.calls] for step in stored.steps]
    assert outputs == [[], ["1", "2"], [""]]
    assert await bench.notes(stored) == b"a\nb\n"


# Limits


@in_bench
async def test_the_budget_stops_at_exactly_so_many_sampled_tokens(bench):
    for budget in (1, 17, 64, 101):
        stored = await bench.play(notes(), "endless", budget=budget)
        assert stored.outcome.kind is OutcomeKind.TRUNCATED
        assert stored.outcome.cause is TruncationCause.BUDGET
        assert stored.outcome.reward == OVER_BUDGET_REWARD == -1.0
        assert stored.num_policy_tokens == budget
        mask = (await bench.store.read(Ref(stored.id))).loss_mask
        assert int(mask.sum()) == budget


@in_bench
async def test_a_budget_lasts_over_a_pause(bench):
    header = await bench.begin(notes(), budget=60)
    engine = bench.engine("endless")
    episode = bench.episode(await bench.claim(), notes(), engine)
    engine.at, engine.interrupt = 50, episode.pause
    assert await episode.run() is None
    await bench.store.requeue_paused()
    outcome = await bench.episode(await bench.claim(), notes(), "endless").run()
    assert outcome.cause is TruncationCause.BUDGET
    assert (await bench.store.get(header.id)).num_policy_tokens == 60


@in_bench
async def test_a_budget_that_just_suffices_does_not_cut(bench):
    whole = await bench.play(notes(), "writer")
    exact = await bench.play(notes(), "writer", budget=whole.num_policy_tokens)
    assert exact.outcome == whole.outcome
    assert whole.outcome.reward == 1.0
    short = await bench.play(notes(), "writer", budget=whole.num_policy_tokens - 1)
    assert short.outcome.cause is TruncationCause.BUDGET


@in_bench
async def test_the_turn_limit_lets_the_grader_judge_the_final_state(bench):
    stored = await bench.play(notes(), "endless", limits=limits(max_turns=2))
    assert stored.outcome.kind is OutcomeKind.TRUNCATED
    assert stored.outcome.cause is TruncationCause.TURNS
    assert stored.outcome.reward == 0.0
    assert stored.outcome.reward_parts["num_steps"] == 2.0
    assert len(stored.steps) == 3
    of_run = await bench.play(HarnessedEnv(notes(), Harness(max_turns=1)), "endless")
    assert (of_run.outcome.cause, len(of_run.steps)) == (TruncationCause.TURNS, 2)


@in_bench
async def test_the_context_limit_counts_every_token(bench):
    whole = await bench.play(notes(), "writer")
    room = whole.num_tokens - 5
    stored = await bench.play(notes(), "writer", limits=limits(max_context_tokens=room))
    assert stored.outcome.cause is TruncationCause.CONTEXT
    assert stored.outcome.reward == 0.0
    assert stored.num_tokens == room
    assert stored.steps[-1].token_end < room
    prompt = whole.steps[0].token_end
    full = await bench.play(notes(), "writer", limits=limits(max_context_tokens=prompt - 1))
    assert (full.outcome.cause, full.num_policy_tokens) == (TruncationCause.CONTEXT, 0)


@in_bench
async def test_the_time_limit_counts_live_time_only(bench):
    """Time spent paused is not live; what earlier claims used is: 1.6 + 1.6 > 3 s."""
    header = await bench.begin(notes(), limits=limits(max_time_s=3.0))
    env = notes(note_s=1.6)
    await paused_in_a_call(bench.episode(await bench.claim(), env, "endless"), env)
    await asyncio.sleep(3.1)
    await bench.store.requeue_paused()
    again = notes(note_s=1.6)
    outcome = await bench.episode(await bench.claim(), again, "endless").run()
    assert again.called.is_set(), "there was time left for a turn, though not for all of its call"
    assert outcome.kind is OutcomeKind.TRUNCATED
    assert outcome.cause is TruncationCause.TIME
    assert outcome.reward == 0.0
    assert len((await bench.store.get(header.id)).steps) == 2


@in_bench
async def test_a_call_runs_no_longer_than_the_time_that_is_left(bench):
    began = time.monotonic()
    stored = await bench.play(notes(note_s=30.0), "writer", limits=limits(max_time_s=2.0))
    assert (stored.outcome.kind, stored.outcome.cause) == (
        OutcomeKind.TRUNCATED,
        TruncationCause.TIME,
    )
    assert time.monotonic() - began < 20.0


@in_bench
async def test_a_step_deadline_truncates_and_a_hanging_grader_is_the_machines(bench):
    short = Deadlines(step_s=0.5, grade_s=30.0)
    stored = await bench.play(notes(note_s=30.0), "writer", {"deadlines": short})
    assert stored.outcome.cause is TruncationCause.TIME
    hung = await bench.play(notes(grader="hangs"), "writer", {"deadlines": Deadlines(grade_s=0.5)})
    assert hung.outcome.kind is OutcomeKind.INFRA_FAULT
    assert "grade took longer than 0.5 s" in hung.outcome.detail


@in_bench
async def test_a_bug_in_a_tool_ends_its_trajectory_and_not_the_run(bench):
    class Buggy(Notes):
        async def note(self, text: str):
            """Note."""
            raise LookupError("a bug")

    stored = await bench.play(Buggy(notes().spec), "writer")
    assert stored.outcome.kind is OutcomeKind.GRADER_FAULT
    assert stored.outcome.reward is None
    assert "tool note: LookupError('a bug')" in stored.outcome.detail
    assert (await bench.play(notes(), "writer")).outcome.reward == 1.0


async def paused_in_a_call(episode, env):
    """Run an episode and ask it to pause while its first tool call runs."""
    task = asyncio.create_task(episode.run())
    await env.called.wait()
    await episode.pause()
    assert await task is None


# Bad turns and failures


@in_bench
async def test_bad_calls_are_answered_and_the_episode_goes_on(bench):
    stored = await bench.play(notes(), "clumsy")
    calls = [call for step in stored.steps for call in step.calls]
    assert [call.status for call in calls[:3]] == [
        ToolStatus.ERROR,
        ToolStatus.ERROR,
        ToolStatus.OK,
    ]
    assert "no tool fly" in calls[0].output
    assert stored.outcome.reward == 1.0
    assert stored.outcome.reward_parts["format"] == 0.0


@in_bench
async def test_a_malformed_turn_is_answered_and_the_episode_goes_on(bench):
    """Its tokens stand as they were sampled; the policy reads what is wrong with them."""
    header = await bench.begin(notes())
    episode = bench.episode(await bench.claim(), notes(), "writer")
    await episode.pause()
    await episode.run()
    start = (await bench.store.get(header.id)).num_tokens
    turn = bench.renderer.assistant_ids(say(note("half")))
    broken = np.concatenate([turn[:6], turn[-1:]])
    await bench.store.requeue_paused()
    claim = await bench.claim()
    span = TokenSpan(0, Author.POLICY, 0, 0)
    arrays = broken, np.ones(len(broken), bool), np.zeros(len(broken), np.float32)
    await bench.store.append(TokenFrame(header.id, claim.epoch, start, *arrays, (span,)))
    await bench.store.pause(header.id, claim.epoch)

    await bench.store.requeue_paused()
    outcome = await bench.episode(await bench.claim(), notes(), "writer").run()
    stored = await bench.store.get(header.id)
    read = await bench.store.read(Ref(header.id))
    step = stored.steps[1]
    assert (step.calls, step.is_terminal) == ((), False)
    assert read.token_ids[start : start + len(broken)].tolist() == broken.tolist()
    answer = bench.renderer.parse_context(read.token_ids[: step.token_end])[-1]
    assert answer.content.startswith("error: malformed message: ")
    assert len(stored.steps) == 5
    assert outcome.kind is OutcomeKind.COMPLETED
    assert outcome.reward_parts["format"] == 0.0


@in_bench
async def test_a_sandbox_that_cannot_be_made_is_an_infra_fault(bench):
    stored = await bench.play(registry.make(NOWHERE), "writer")
    assert stored.outcome.kind is OutcomeKind.INFRA_FAULT
    assert "no-such-program" in stored.outcome.detail
    assert (stored.outcome.reward, stored.steps) == (None, ())


@in_bench
async def test_a_sandbox_lost_in_a_tool_or_in_the_grader_is_an_infra_fault(bench):
    in_tool = await bench.play(notes(), "crasher")
    in_grader = await bench.play(notes(grader="loses"), "writer")
    for stored, num_steps in ((in_tool, 2), (in_grader, NUM_NOTES + 2)):
        assert stored.outcome.kind is OutcomeKind.INFRA_FAULT
        assert stored.outcome.reward is None
        assert "is gone" in stored.outcome.detail
        assert len(stored.steps) == num_steps
    assert compare_ledger(bench.host.root, bench.ledger_folder).is_exact


@in_bench
async def test_a_workspace_whose_folders_vanish_is_an_infra_fault(bench):
    stored = await bench.play(notes(wipe=True), "crasher")
    bench.backend.backend.scratch.owner.unlink()
    assert stored.outcome.kind is OutcomeKind.INFRA_FAULT
    assert (stored.outcome.reward, len(stored.steps)) == (None, 2)


@in_bench
async def test_a_sandbox_that_cannot_be_closed_costs_nobody_a_known_outcome(bench):
    stored = await bench.play(notes(grader="wipes"), "writer")
    bench.backend.backend.scratch.owner.unlink()
    assert stored.outcome.kind is OutcomeKind.COMPLETED
    assert stored.outcome.reward == 1.0


@in_bench
async def test_a_grader_that_fails_gives_no_reward(bench):
    stored = await bench.play(notes(grader="raises"), "writer")
    assert stored.outcome.kind is OutcomeKind.GRADER_FAULT
    assert stored.outcome.reward is None
    assert "no such grade" in stored.outcome.detail


@in_bench
async def test_a_fault_while_judging_a_truncated_state_is_still_a_fault(bench):
    cut = limits(max_turns=1)
    lost = await bench.play(notes(grader="loses"), "endless", limits=cut)
    assert (lost.outcome.kind, lost.outcome.reward) == (OutcomeKind.INFRA_FAULT, None)


# Pause, crash, resume


@in_bench
async def test_a_trajectory_whose_last_step_is_terminal_is_only_graded(bench):
    """Its worker died between the last commit and `finish`."""
    header = await bench.begin(notes())
    env = notes(grader="hangs")
    task = asyncio.create_task(bench.episode(await bench.claim(), env, "writer").run())
    await env.reached.wait()
    await cancelled(task)
    before = await bench.store.get(header.id)
    assert before.steps[-1].is_terminal

    await bench.store.reap("w")
    engine = bench.engine("writer")
    outcome = await bench.episode(await bench.claim("w2"), notes(), engine).run()
    after = await bench.store.get(header.id)
    assert outcome.reward == 1.0
    assert outcome.reward_parts["num_steps"] == NUM_NOTES + 1
    assert engine.num_sampled == 0
    assert after.steps == before.steps
    assert after.num_tokens == before.num_tokens


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@in_bench
async def test_after_a_crash_in_a_tool_call_the_step_runs_again_from_its_snapshot(bench):
    """Whatever call the worker died in, the file shows one line per committed call."""
    for turn in range(1, NUM_NOTES + 1):
        header = await bench.begin(notes())
        env = notes(hang_at=turn)
        task = asyncio.create_task(bench.episode(await bench.claim(), env, "writer").run())
        await env.reached.wait()
        await cancelled(task)
        assert len((await bench.store.get(header.id)).steps) == turn

        await bench.store.reap("w")
        claim = await bench.claim("w2")
        turn_start = claim.steps[-1].token_end
        assert len(claim.tokens.token_ids) > turn_start
        engine = bench.engine("writer")
        await bench.episode(claim, notes(), engine).run()
        stored = await bench.store.get(header.id)
        lines = "".join(f"line {i}\n" for i in range(NUM_NOTES))
        assert await bench.notes(stored) == lines.encode()
        outputs = [call.output for step in stored.steps for call in step.calls]
        assert outputs == [*map(str, range(1, NUM_NOTES + 1)), ""]
        acked = int(claim.tokens.loss_mask.sum())
        assert engine.num_sampled == stored.num_policy_tokens - acked
    assert compare_ledger(bench.host.root, bench.ledger_folder).is_exact


@in_bench
async def test_a_pause_in_mid_turn_keeps_what_was_acknowledged(bench):
    header = await bench.begin(notes())
    engine = bench.engine("writer", 3)
    episode = bench.episode(await bench.claim(), notes(), engine)
    engine.at, engine.interrupt = 10, episode.pause
    assert await episode.run() is None
    paused = await bench.store.get(header.id)
    assert paused.state is TrajectoryState.PAUSED
    assert paused.num_policy_tokens == 0
    await bench.store.requeue_paused()
    claim = await bench.claim()
    assert int(claim.tokens.loss_mask.sum()) == 12
    rest = bench.engine("writer", 3)
    outcome = await bench.episode(claim, notes(), rest).run()
    assert outcome.reward == 1.0
    assert rest.num_sampled == (await bench.store.get(header.id)).num_policy_tokens - 12


@in_bench
async def test_acknowledgements_that_a_ledger_missed_are_noted_at_the_next_claim(bench):
    """A worker died after the store's answer and before its own note, or at the very end."""
    await bench.begin(notes())
    engine = bench.engine("writer")
    episode = bench.episode(await bench.claim(), notes(), engine, ledger=None)
    engine.at, engine.interrupt = 70, episode.pause
    await episode.run()
    await bench.store.requeue_paused()
    claim = await bench.claim()
    await bench.episode(claim, notes(), "writer").run()
    assert compare_ledger(bench.host.root, bench.ledger_folder).is_exact

    await bench.begin(notes())
    claim = await bench.claim()
    await bench.episode(claim, notes(), "writer", ledger=None).run()
    (finished,) = await bench.store.claim("w", 0, [claim.header.id], 0.0)
    engine = bench.engine("writer")
    assert (await bench.episode(finished, notes(), engine).run()).reward == 1.0
    assert engine.num_sampled == 0
    assert compare_ledger(bench.host.root, bench.ledger_folder).is_exact


@in_bench
async def test_what_the_session_remembers_outlives_a_pause(bench):
    header = await bench.begin(notes(has_secret=True))
    engine = bench.engine("recaller")
    episode = bench.episode(await bench.claim(), notes(has_secret=True), engine)
    engine.at, engine.interrupt = 60, episode.pause
    await episode.run()
    await bench.store.requeue_paused()
    await bench.episode(await bench.claim(), notes(has_secret=True), "recaller").run()
    steps = (await bench.store.get(header.id)).steps
    assert steps[1].calls[0].output == steps[3].calls[0].output


@in_bench
async def test_a_pause_during_a_tool_call_waits_for_its_step(bench):
    header = await bench.begin(notes())
    env = notes(note_s=0.2)
    await paused_in_a_call(bench.episode(await bench.claim(), env, "writer"), env)
    stored = await bench.store.get(header.id)
    assert (stored.state, len(stored.steps)) == (TrajectoryState.PAUSED, 2)
    assert await bench.notes(stored) == b"line 0\n"


@in_bench
async def test_whoever_was_fenced_stops_and_its_engine_can_play_the_trajectory_again(bench):
    header = await bench.begin(notes())
    engine = bench.engine("writer")
    episode = bench.episode(await bench.claim(), notes(), engine, ack_tokens=4)

    async def take_over():
        await bench.store.reap("w")

    engine.at, engine.interrupt = 12, take_over
    with pytest.raises(Fenced):
        await episode.run()
    outcome = await bench.episode(await bench.claim("w2"), notes(), engine, ack_tokens=4).run()
    assert outcome.reward == 1.0
    assert (await bench.store.get(header.id)).state is TrajectoryState.FINISHED
    assert compare_ledger(bench.host.root, bench.ledger_folder).is_exact


@in_bench
async def test_a_turn_that_is_not_the_scripts_is_an_error_not_an_outcome(bench):
    """Acknowledged tokens are never dropped to suit another script."""
    header = await bench.begin(notes())
    engine = bench.engine("writer", 3)
    episode = bench.episode(await bench.claim(), notes(), engine)
    engine.at, engine.interrupt = 30, episode.pause
    await episode.run()
    await bench.store.requeue_paused()
    with pytest.raises(EngineError, match="not what null would say"):
        await bench.episode(await bench.claim(), notes(), "null").run()
    assert (await bench.store.get(header.id)).outcome is None


INTERRUPTIONS = st.lists(
    st.tuples(st.integers(0, 70), st.sampled_from(["pause", "kill"])), min_size=1, max_size=3
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(id, record) of a game played in one go."""
    found = {}

    async def play_whole(env_id, script):
        async with open_bench(tmp_path_factory.mktemp("whole")) as bench:
            stored = await bench.play(registry.make(env_id), script)
            return stored.id, await record_of(bench.store, stored.id)

    def find(*game):
        if game not in found:
            found[game] = asyncio.run(play_whole(*game))
        return found[game]

    return find


@settings(
    derandomize=True,
    max_examples=8,
    deadline=None,
    # An example takes half a second: the first one that fails is small enough.
    phases=[Phase.explicit, Phase.generate],
)
@given(
    interruptions=INTERRUPTIONS,
    delta_tokens=st.integers(1, 7),
    ack_tokens=st.integers(1, 20),
    game=st.sampled_from([(NOTES, "writer"), (HUNT, "oracle"), (HUNT, "random")]),
)
def test_an_interrupted_trajectory_equals_an_uninterrupted_one(
    interruptions, delta_tokens, ack_tokens, game, uninterrupted, tmp_path_factory
):
    """Tokens, spans, steps, digests and outcome, wherever it was paused or killed."""
    env_id, script = game
    wanted_id, wanted = uninterrupted(*game)

    async def go():
        async with open_bench(tmp_path_factory.mktemp("parts")) as bench:
            header = await bench.begin(registry.make(env_id))
            for point, kind in [*interruptions, (None, "")]:
                claim = await bench.claim()
                engine = bench.engine(script, delta_tokens)
                env = registry.make(env_id)
                episode = bench.episode(claim, env, engine, ack_tokens=ack_tokens)
                await interrupted(bench, episode, engine, point, kind)
                if (await bench.store.get(header.id)).outcome is not None:
                    break
            assert header.id == wanted_id
            assert await record_of(bench.store, header.id) == wanted
            assert compare_ledger(bench.host.root, bench.ledger_folder).is_exact

    asyncio.run(go())


async def interrupted(bench, episode, engine, point, kind):
    """Run until `point` tokens of this claim are sampled, then pause or kill, and queue again."""

    async def kill():
        asyncio.current_task().cancel()

    interrupt = {"pause": episode.pause, "kill": kill}.get(kind)
    if point == 0 and kind == "pause":
        await episode.pause()
    engine.at, engine.interrupt = point or None, interrupt
    (result,) = await asyncio.gather(asyncio.create_task(episode.run()), return_exceptions=True)
    if isinstance(result, asyncio.CancelledError):
        await bench.store.reap("w")
    elif isinstance(result, BaseException):
        raise result
    await bench.store.requeue_paused()
