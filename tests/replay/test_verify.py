"""Replay over real trajectories: what is identical, what is refused, where a difference lies."""

import asyncio
from dataclasses import replace

import pytest

from k3rl.envs import registry
from k3rl.errors import UserInputError
from k3rl.replay.verify import replay
from k3rl.rollout.renderer import Renderer
from k3rl.rollout.tokenizer import NanoTokenizer, write_nano
from k3rl.store.reader import StoreReader
from k3rl.types import OutcomeKind, TaskLimits, TruncationCause
from tests.builders import HUNT, MATH, NOTES, NOWHERE, open_bench

pytestmark = pytest.mark.sandbox


def played_and_replayed(folder, script, *, between=None, **kwargs):
    """Play the notes script, then replay it; `between` runs after playing. Returns the report."""

    async def go():
        async with open_bench(folder) as bench:
            stored = await bench.play(registry.make(NOTES, **kwargs), script)
            if between is not None:
                between()
            return await again(bench, stored, registry.make(NOTES, **kwargs))

    return asyncio.run(go())


async def again(bench, stored, env, renderer=None):
    reader = StoreReader(bench.host.root)
    spec, renderer = env.sandbox_spec, renderer or bench.renderer
    return await replay(reader, stored.id[:12], env, bench.backend, spec, renderer)


def num_sandboxes(bench) -> int:
    """Sandboxes that this bench's backend keeps."""
    return bench.backend.admission.num_in


@pytest.mark.parametrize("env_id", [HUNT, MATH])
def test_shipped_environments_replay_identically(env_id, tmp_path):
    async def go():
        async with open_bench(tmp_path) as bench:
            for script in ("oracle", "random", "null"):
                stored = await bench.play(registry.make(env_id), script)
                report = await again(bench, stored, registry.make(env_id))
                assert report.is_identical, report.first_divergence
                assert report.trajectory == stored
                assert [v.step for v in report.verdicts] == list(range(len(stored.steps)))
                assert [v.num_calls for v in report.verdicts] == [
                    len(step.calls) for step in stored.steps
                ]
                assert num_sandboxes(bench) == 0

    asyncio.run(go())


def test_the_session_carries_on_from_the_state_that_the_opening_stored(tmp_path):
    """What it drew at random when it was opened is not drawn again."""
    report = played_and_replayed(tmp_path, "recaller", has_secret=True)
    assert report.is_identical, report.first_divergence
    assert report.trajectory.steps[1].calls[0].output


def test_bad_calls_and_several_calls_replay_identically(tmp_path):
    async def go():
        async with open_bench(tmp_path) as bench:
            for script in ("writer", "double", "clumsy", "null"):
                stored = await bench.play(registry.make(NOTES), script)
                assert (await again(bench, stored, registry.make(NOTES))).is_identical

    asyncio.run(go())


def test_a_truncated_trajectory_replays_as_far_as_its_steps_go(tmp_path):
    """Tokens of a turn that was cut off belong to no step and run nothing."""
    cuts = {
        TruncationCause.BUDGET: {"budget": 75},
        TruncationCause.TURNS: {"limits": TaskLimits(max_turns=2)},
        TruncationCause.CONTEXT: {"limits": TaskLimits(max_context_tokens=300)},
    }

    async def go():
        async with open_bench(tmp_path) as bench:
            for cause, play in cuts.items():
                stored = await bench.play(registry.make(NOTES), "endless", **play)
                report = await again(bench, stored, registry.make(NOTES))
                assert report.is_identical
                assert report.trajectory.outcome.cause is cause
                assert len(report.verdicts) == len(stored.steps) > 1

    asyncio.run(go())


def test_a_trajectory_that_lost_its_sandbox_replays_up_to_its_last_step(tmp_path):
    report = played_and_replayed(tmp_path, "crasher")
    assert report.trajectory.outcome.kind is OutcomeKind.INFRA_FAULT
    assert report.is_identical
    assert len(report.verdicts) == 2


def test_a_trajectory_that_was_paused_and_resumed_replays_identically(tmp_path):
    async def go():
        async with open_bench(tmp_path) as bench:
            env, engine = registry.make(NOTES), bench.engine("writer")
            await bench.begin(env)
            episode = bench.episode(await bench.claim(), env, engine)
            engine.at, engine.interrupt = 60, episode.pause
            assert await episode.run() is None
            await bench.store.requeue_paused()
            claim = await bench.claim()
            await bench.episode(claim, registry.make(NOTES), "writer").run()
            stored = await bench.store.get(claim.header.id)
            return await again(bench, stored, registry.make(NOTES))

    report = asyncio.run(go())
    assert report.is_identical
    assert len(report.verdicts) == 5


# Differences


def test_an_output_that_differs_is_found_at_its_step_and_there_alone(tmp_path):
    report = played_and_replayed(tmp_path, "stamper")
    assert not report.is_identical
    assert [v.step for v in report.verdicts if v.differences] == [2]
    assert report.first_divergence.step == 2
    (difference,) = report.first_divergence.differences
    stored = report.trajectory.steps[2].calls[0].output
    assert difference.startswith(f"call 1 stamp: output: stored {stored!r}, now ")


def test_a_file_that_differs_is_found_from_its_step_on(tmp_path):
    """The tool says the same both times; only the workspace tells."""
    report = played_and_replayed(tmp_path, "marker")
    assert [v.step for v in report.verdicts if v.differences] == [2, 3, 4]
    (difference,) = report.first_divergence.differences
    stored = report.trajectory.steps[2].tree_digest
    assert difference.startswith(f"tree_digest: stored {stored}, now ")


def test_a_world_that_ends_earlier_is_found_and_replay_stops_there(tmp_path):
    """Its later turns have no world to act in."""
    flag = tmp_path / "flag"
    report = played_and_replayed(tmp_path, "peeker", between=flag.touch, flag=str(flag))
    assert len(report.trajectory.steps) == 5
    assert [v.step for v in report.verdicts] == [0, 1, 2]
    assert report.first_divergence.step == 2
    assert report.first_divergence.differences == ("end: stored False, now True",)


def test_a_world_that_ends_later_is_found(tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    report = played_and_replayed(tmp_path, "peeker", between=flag.unlink, flag=str(flag))
    assert report.first_divergence.step == 2
    assert "end: stored True, now False" in report.first_divergence.differences


# Refusals


def refusal(folder, change):
    """The error of replaying a trajectory with what `change` makes of (env, renderer)."""

    async def go():
        async with open_bench(folder) as bench:
            stored = await bench.play(registry.make(NOTES), "null")
            env, renderer = change(registry.make(NOTES), bench.renderer)
            with pytest.raises(UserInputError) as error:
                await again(bench, stored, env, renderer)
            assert num_sandboxes(bench) == 0
            return stored, str(error.value)

    return asyncio.run(go())


def test_another_version_of_the_environment_is_refused(tmp_path):
    other = registry.make(NOTES, note_s=0.5)
    stored, error = refusal(tmp_path, lambda env, renderer: (other, renderer))
    assert stored.id in error
    assert stored.header.digests["env"][:12] in error
    assert other.spec.digest[:12] in error


def test_another_tokenizer_is_refused(tmp_path):
    write_nano(tmp_path / "other.json", [b"on", b"he"], {})
    other = Renderer(NanoTokenizer(tmp_path / "other.json"))
    stored, error = refusal(tmp_path / "run", lambda env, renderer: (env, other))
    assert f"its tokenizer digest is {stored.header.digests['tokenizer'][:12]}" in error
    assert other.digest[:12] in error


def test_a_trajectory_without_steps_is_refused(tmp_path):
    async def go():
        async with open_bench(tmp_path) as bench:
            queued = await bench.begin(registry.make(NOTES))
            broken = await bench.begin(registry.make(NOWHERE))
            await bench.claim("elsewhere")
            await bench.episode(await bench.claim(), registry.make(NOWHERE), "writer").run()
            for header in (queued, broken):
                env = registry.make(header.task.env_id)
                with pytest.raises(UserInputError, match="no committed step"):
                    await again(bench, header, env)

    asyncio.run(go())


def test_steps_are_checked_against_what_is_stored_not_against_themselves(tmp_path):
    """With one stored status, call or end changed, the very field is named."""

    async def go():
        async with open_bench(tmp_path) as bench:
            stored = await bench.play(registry.make(NOTES), "double")
            reader = StoreReader(bench.host.root)
            record = reader.state.live.record(stored.id)
            whole, step = record.steps[1], record.steps[1]
            error = replace(step.calls[0], status="error")
            planted = {
                "call 1 note: status: stored error": replace(step, calls=(error, step.calls[1])),
                "calls: stored 1, now 2": replace(step, calls=step.calls[:1]),
                "end: stored True, now False": replace(step, is_terminal=True),
                "tree_digest: stored 00": replace(step, tree_digest="0" * 64),
            }
            for difference, changed in planted.items():
                record.steps[1] = changed
                env = registry.make(NOTES)
                report = await replay(
                    reader, stored.id, env, bench.backend, env.sandbox_spec, bench.renderer
                )
                assert report.first_divergence.step == 1
                assert [d for d in report.first_divergence.differences if difference in d]
            record.steps[1] = whole

    asyncio.run(go())
