"""Checks of what stands still: tasks, specs, tools, and how calls are answered."""

from __future__ import annotations

import json

from k3rl.envs.base import EnvSpec, ToolEnv
from k3rl.envs.checker.case import SPLITS, Broken, Case, Session, need, shorten
from k3rl.envs.checker.check import Check, Group
from k3rl.envs.checker.values import right_value, wrong_values
from k3rl.errors import UserInputError
from k3rl.types import (
    Message,
    Task,
    ToolCall,
    ToolSpec,
    ToolStatus,
    digest_bytes,
    from_plain,
    to_plain,
)

FAR_INDEX = 2**31 - 1


async def tasks_are_pure(case: Case) -> str:
    """Equal arguments give equal tasks and files, whatever was asked for before."""
    one, other = case.make(), case.make()
    indices = (*range(min(case.num_tasks, 4)), FAR_INDEX)
    for split in SPLITS:
        tasks = {index: one.task(split, index) for index in reversed(indices)}
        for index in indices:
            task, again = tasks[index], other.task(split, index)
            where = f"{split} {index}"
            need(task == again, f"{where}: two objects give two tasks")
            need(one.task(split, index) == task, f"{where}: asked twice, it is another task")
            need(task.split == split, f"{where}: the task says split {task.split}")
            need(task.env_id == one.spec.id, f"{where}: the task says {task.env_id}")
            plain = json.loads(json.dumps(to_plain(task)))
            need(from_plain(Task, plain) == task, f"{where}: does not survive JSON")
            need(dict(one.files(task)) == dict(other.files(again)), f"{where}: other files")
    for split, index in (("no such split", 0), ("train", -1)):
        _need_refusal(one, split, index)
    return f"{len(indices)} tasks of each split"


def _need_refusal(env: ToolEnv, split: str, index: int) -> None:
    try:
        env.task(split, index)
    except UserInputError:
        return
    raise Broken(f"task({split!r}, {index}) is not refused by a UserInputError") from None


async def splits_are_apart(case: Case) -> str:
    """No task of heldout is one of train, judged by seed, by files and by what is read first."""
    num = 2 * case.num_tasks
    seen: list[dict[str, str]] = []
    for split in SPLITS:
        tasks = case.tasks(split, num)
        env = case.make()
        shown = [
            {path: digest_bytes(data) for path, data in env.files(task).items()} for task in tasks
        ]
        openings = [await _opening(case, task) for task in tasks]
        contents = {
            json.dumps([files, opening], sort_keys=True): task.key
            for files, opening, task in zip(shown, openings, tasks, strict=True)
        }
        seen.append({**contents, **{task.key: task.key for task in tasks}})
    both = set(seen[0]) & set(seen[1])
    need(not both, f"in both splits: {', '.join(seen[0][each] for each in sorted(both))}")
    return f"{num} tasks of each split"


async def _opening(case: Case, task: Task) -> list[object]:
    async with case.session(task) as session:
        return [to_plain(message) for message in session.transcript]


async def spec_round_trips(case: Case) -> str:
    """The spec survives JSON, digest and all, and is the one that the registry holds."""
    spec = case.make().spec
    again = from_plain(EnvSpec, json.loads(json.dumps(to_plain(spec))))
    need(again == spec, f"{spec} comes back as {again}")
    need(again.digest == spec.digest, "its digest changes on the way through JSON")
    need(spec.id == case.env_id, f"it says {spec.id}")
    return f"digest {spec.digest[:12]}"


async def tools_are_declared(case: Case) -> str:
    """Names differ, descriptions say something, parameters are an object's JSON Schema."""
    one, other = case.make(), case.make()
    need(one.tools == other.tools, "two objects declare different tools")
    names = [tool.name for tool in one.tools]
    need(len(set(names)) == len(names), f"names come twice: {names}")
    for tool in one.tools:
        need(bool(tool.description.strip()), f"{tool.name}: no description")
        schema = tool.parameters
        need(schema.get("type") == "object", f"{tool.name}: its parameters are no object")
        unknown = set(schema.get("required", ())) - set(schema.get("properties", {}))
        need(not unknown, f"{tool.name}: requires undeclared {sorted(unknown)}")
        json.dumps(schema)
    return ", ".join(names) or "no tools"


def _bad_calls(tool: ToolSpec) -> list[tuple[str, ToolCall]]:
    """Calls that must be refused, each with what the answer must mention."""
    schema = tool.parameters
    properties = schema.get("properties", {})
    good = {name: right_value(inner, schema) for name, inner in properties.items()}
    bad = [
        ("nonsense", ToolCall(tool.name, {**good, "nonsense": 1}, 1)),
        ("JSON", ToolCall(tool.name, {}, 1, raw='{"broken')),
    ]
    for name, inner in properties.items():
        for value in wrong_values(inner, schema):
            bad.append((name, ToolCall(tool.name, {**good, name: value}, 1)))
    for name in schema.get("required", ()):
        fewer = {key: value for key, value in good.items() if key != name}
        bad.append((name, ToolCall(tool.name, fewer, 1)))
    return bad


async def bad_calls_are_answered(case: Case) -> str:
    """Unknown tools and arguments are answered in words, and the session goes on."""
    oracle = case.policy("oracle")
    async with case.session() as session:
        bad = [("", ToolCall("no_such_tool", {}, 1))]
        for tool in session.env.tools:
            bad += _bad_calls(tool)
        for mentioned, call in bad:
            message = await _refusal(session, call)
            said = message.content
            shown = f"{call.tool} {shorten(str(call.arguments))}"
            need(said.startswith("error:"), f"{shown}: answered by {shorten(said)}")
            need(mentioned in said, f"{shown}: {shorten(said)} does not name {mentioned}")
        session.transcript.append(message)
        await _need_recovery(session, oracle)
    return f"{len(bad)} calls"


async def _refusal(session: Session, call: ToolCall) -> Message:
    """The answer to a bad call, when it is an answer at all."""
    shown = f"{call.tool} {shorten(str(call.arguments))}"
    try:
        step = await session.env.act(Message("assistant", tool_calls=(call,)))
    except Exception as error:  # the very thing that must not happen
        raise Broken(f"{shown}: raises {error!r}") from None
    need(not step.terminated, f"{shown}: ends the session")
    need(len(step.messages) == len(step.records) == 1, f"{shown}: not answered once")
    (message,), (record,) = step.messages, step.records
    need(record.status is ToolStatus.ERROR, f"{shown}: its status is {record.status}")
    read = (message.role, message.tool, message.index)
    need(read == ("tool", call.tool, call.index), f"{shown}: answered as {read}")
    return message


async def _need_recovery(session: Session, oracle: object) -> None:
    outcome = await session.carry_on(oracle)  # type: ignore[arg-type]
    need(outcome.reward == 1.0, f"after it the oracle gets {outcome.reward}")
    need(outcome.reward_parts["format"] == 0.0, "the reward part format does not tell of it")


async def malformed_turns_are_answered(case: Case) -> str:
    """A turn that does not parse is answered with the reason, and the session goes on."""
    oracle = case.policy("oracle")
    reason = "tools block is not closed"
    async with case.session() as session:
        step = await session.env.act(Message("assistant", malformed=reason))
        need(not step.terminated, "it ends the session")
        need(step.records == (), "something is called")
        need(any(reason in each.content for each in step.messages), "the answer lacks the reason")
        session.transcript += step.messages
        await _need_recovery(session, oracle)
    return "answered, then solved"


async def calls_run_in_order(case: Case) -> str:
    """All calls of one message are answered in its order, whatever indices they carry."""
    calls = tuple(ToolCall(f"no_{number}", {}, number) for number in (3, 1, 2))
    async with case.session() as session:
        step = await session.env.act(Message("assistant", tool_calls=calls))
    answered = [(message.tool, message.index) for message in step.messages]
    need(answered == [(call.tool, call.index) for call in calls], f"answered: {answered}")
    need([record.call for record in step.records] == list(calls), "records in another order")
    return f"{len(calls)} calls of one message"


async def records_are_what_is_read(case: Case) -> str:
    """A record holds the digest of exactly the text that the policy reads."""
    num_records = 0
    for played in await case.play_all(case.tasks("train"), case.policy("oracle")):
        read = [message.content for message in played.transcript if message.role == "tool"]
        for record, content in zip(played.records, read, strict=False):
            data = content.encode()
            where = f"{record.call.tool}: the record of {shorten(content)}"
            need(record.output_digest == digest_bytes(data), f"{where} has another digest")
            need(content.startswith(record.output), f"{where} holds {shorten(record.output)}")
            num_records += 1
    return f"{num_records} records"


CHECKS = (
    Check("tasks are pure", Group.CONTRACT, tasks_are_pure),
    Check("splits share no task", Group.CONTRACT, splits_are_apart),
    Check("spec round-trips", Group.CONTRACT, spec_round_trips),
    Check("tools are declared", Group.CONTRACT, tools_are_declared),
    Check("bad calls are answered", Group.CONTRACT, bad_calls_are_answered),
    Check("malformed turns are answered", Group.CONTRACT, malformed_turns_are_answered),
    Check("calls run in order", Group.CONTRACT, calls_run_in_order),
    Check("records are what is read", Group.CONTRACT, records_are_what_is_read),
)
