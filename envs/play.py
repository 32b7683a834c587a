"""Play one task with a scripted policy: an episode in messages, without tokens or a store.

For oracle transcripts, checks of an environment, and trying one out by hand. Without tokens no
context fills up: a harness's compaction never comes, and nobody plays sub-agents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3rl.envs.base import ScriptedPolicy, ToolEnv
from k3rl.envs.harness.session import turn_limit
from k3rl.sandboxes.base import Sandbox, SandboxBackend
from k3rl.types import (
    Message,
    Outcome,
    OutcomeKind,
    Task,
    ToolRecord,
    TruncationCause,
    philox,
)


@dataclass(frozen=True, slots=True)
class Played:
    """A finished play."""

    task: Task
    transcript: tuple[Message, ...]
    """The opening, then turns and what they caused, as the policy read them."""
    records: tuple[ToolRecord, ...]
    outcome: Outcome


def cut_off(outcome: Outcome, cause: TruncationCause) -> Outcome:
    """The outcome of a session that a limit ended: graded on its final state, named truncated."""
    return replace(outcome, kind=OutcomeKind.TRUNCATED, cause=cause)


async def play(
    env: ToolEnv, task: Task, policy: ScriptedPolicy, backend: SandboxBackend, seed: int = 0
) -> Played:
    """Play `task` in a fresh sandbox to its end or its turn limit; uses up `env`.

    Turn t draws from `philox(seed, task.key, t)`, so equal arguments give equal transcripts.
    Raises SandboxError when the infrastructure fails.
    """
    sandbox = Sandbox(backend, await backend.create(env.sandbox_spec, env.files(task)))
    try:
        transcript = list((await env.open(task, sandbox)).messages)
        records: list[ToolRecord] = []
        terminated = False
        for turn in range(turn_limit(env, task)):
            message = policy(task, tuple(transcript), philox(seed, task.key, turn))
            step = await env.act(message)
            transcript += [message, *step.messages]
            records += step.records
            terminated = step.terminated
            if terminated:
                break
        outcome = await env.grade()
        if not terminated:
            outcome = cut_off(outcome, TruncationCause.TURNS)
        return Played(task, tuple(transcript), tuple(records), outcome)
    finally:
        await env.close()
        await backend.close(sandbox.id)
