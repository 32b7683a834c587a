"""Replay a stored trajectory: run every tool call again from its first snapshot and compare.

The policy's turns are read from the stored token ids; the environment session, its tools and a
fresh sandbox are the real ones, on the same path as a live episode. Per step the outputs the policy
read and the tree_digest of the workspace must be identical.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3rl.envs.base import StepResult, ToolEnv
from k3rl.envs.harness.session import HarnessedEnv, recorded_reports, was_summary
from k3rl.envs.harness.sub_agents import RecordedSubAgents
from k3rl.errors import UserInputError
from k3rl.rollout.renderer import Renderer
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.store.protocol import Ref, check_digests
from k3rl.store.reader import StoreReader
from k3rl.types import Digest, Int32Array, Step, Trajectory


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """One step, replayed."""

    step: int
    num_calls: int
    differences: tuple[str, ...]
    """Empty: identical. Else one line each: what was stored, what came out."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A trajectory, replayed."""

    trajectory: Trajectory
    verdicts: tuple[StepVerdict, ...]
    """One per step, up to the one where the replayed world ended."""

    @property
    def is_identical(self) -> bool:
        """Every output and every tree_digest came out as stored."""
        return not any(verdict.differences for verdict in self.verdicts)

    @property
    def first_divergence(self) -> StepVerdict | None:
        """The first step that differs."""
        return next((verdict for verdict in self.verdicts if verdict.differences), None)


async def replay(
    reader: StoreReader,
    trajectory_id: str,
    env: ToolEnv,
    backend: SandboxBackend,
    spec: SandboxSpec,
    renderer: Renderer,
) -> ReplayReport:
    """Re-run `trajectory_id` step by step in a fresh sandbox.

    Raises UserInputError when the trajectory has no committed step, or was made with another
    environment or tokenizer than the ones given.
    """
    trajectory = reader.get(trajectory_id)
    if not trajectory.steps:
        raise UserInputError(f"trajectory {trajectory.id} has no committed step to replay")
    harness = {"harness": env.harness.digest} if isinstance(env, HarnessedEnv) else {}
    present = {"env": env.spec.digest, "tokenizer": renderer.digest}
    check_digests(trajectory.header, present | harness)
    opening, *steps = trajectory.steps
    assert opening.snapshot_after is not None
    contexts = [
        reader.read(Ref(trajectory.id, context=context)).token_ids
        for context in range(trajectory.num_contexts)
    ]
    sandbox_id = await backend.restore(spec, reader.snapshot(opening.snapshot_after))
    sandbox = Sandbox(backend, sandbox_id)
    verdicts = []
    try:
        await env.open(trajectory.header.task, sandbox, opening.env_state)
        verdicts.append(_verdict(opening, None, await backend.tree_digest(sandbox_id)))
        for step in steps:
            tokens = contexts[step.context]
            result, changed = None, ""
            if step.finish_reason is None:
                changed = _open_context(env, trajectory, step, tokens, renderer)
            else:
                turn = tokens[step.token_start : _turn_end(step, tokens, renderer)]
                _prepare(env, trajectory, step)
                result = await env.act(renderer.parse_turn(turn))
            tree_digest = await backend.tree_digest(sandbox_id)
            verdicts.append(_verdict(step, result, tree_digest, changed))
            if result is not None and result.terminated:
                break
    finally:
        await env.close()
        await backend.close(sandbox_id)
    return ReplayReport(trajectory, tuple(verdicts))


def _open_context(
    env: ToolEnv, trajectory: Trajectory, step: Step, tokens: Int32Array, renderer: Renderer
) -> str:
    """Open the context that a step without a turn begins; says how its opening differs."""
    if not isinstance(env, HarnessedEnv) or not env.is_context_closed:
        return "opening: stored a new context, now none is opened"
    level = trajectory.header.key.level
    ids = renderer.start(env.next_context().messages, env.tools, level)
    stored = tokens[: step.token_end]
    if np.array_equal(ids, stored):
        return ""
    return f"opening: stored {len(stored)} tokens, now {len(ids)} or others"


def _prepare(env: ToolEnv, trajectory: Trajectory, step: Step) -> None:
    """What a session is told before the turn of `step`: of summaries, and what sub-agents did."""
    if not isinstance(env, HarnessedEnv):
        return
    env.run_sub_agent = RecordedSubAgents(recorded_reports(step.env_state))
    if was_summary(step.env_state):
        env.ask_summary()


def _turn_end(step: Step, tokens: Int32Array, renderer: Renderer) -> int:
    """Where the policy's part of a step ends: behind its stop id, or at the step's end."""
    ids = tokens[step.token_start : step.token_end]
    stops = np.flatnonzero(np.isin(ids, renderer.stop_ids))
    return step.token_start + int(stops[0]) + 1 if len(stops) else step.token_end


def _verdict(
    step: Step, result: StepResult | None, tree_digest: Digest, changed: str = ""
) -> StepVerdict:
    differences = [changed] if changed else []
    if step.tree_digest != tree_digest:
        differences.append(f"tree_digest: stored {step.tree_digest}, now {tree_digest}")
    records = result.records if result else ()
    if len(records) != len(step.calls):
        differences.append(f"calls: stored {len(step.calls)}, now {len(records)}")
    for stored, now in zip(step.calls, records, strict=False):
        where = f"call {stored.call.index} {stored.call.tool}"
        if stored.status != now.status:
            differences.append(f"{where}: status: stored {stored.status}, now {now.status}")
        if stored.output_digest != now.output_digest:
            differences.append(f"{where}: output: stored {stored.output!r}, now {now.output!r}")
    if result and result.terminated != step.is_terminal:
        differences.append(f"end: stored {step.is_terminal}, now {result.terminated}")
    return StepVerdict(step.index, len(step.calls), tuple(differences))
