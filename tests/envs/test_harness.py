"""Harnesses: what the policy sees of them, what the environment notices, what runs draw."""

import asyncio
import json
from collections import Counter
from dataclasses import replace

import pytest

from k3rl import config as configs
from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.checker.case import Case
from k3rl.envs.checker.check import BAD, examine
from k3rl.envs.checker.suite import CHECKS
from k3rl.envs.harness.drawing import harness_of, harnesses
from k3rl.envs.harness.naming import BadCall, Naming
from k3rl.envs.harness.parts import (
    Context,
    ContextKind,
    Harness,
    Memory,
    NameCase,
    SubAgents,
    ToolStyle,
)
from k3rl.envs.harness.presets import PRESETS
from k3rl.envs.harness.scripted import harnessed
from k3rl.envs.harness.session import HarnessedEnv
from k3rl.envs.harness.sub_agents import RecordedSubAgents, SubAgentReport
from k3rl.envs.play import play
from k3rl.errors import ConfigError, EnvError, UserInputError
from k3rl.rollout.renderer import Renderer
from k3rl.rollout.tokenizer import NanoTokenizer
from k3rl.sandboxes.base import Sandbox
from k3rl.sandboxes.factory import open_backend
from k3rl.sections import HarnessConfig, Preset
from k3rl.types import Message, ToolCall, ToolSpec, ToolStatus, from_plain, philox, to_plain

HUNT = "k3rl/FileHunt-v0"
MATH = "k3rl/Reason-v0"
MADE_HERE = {check.name: check for check in CHECKS if check.name != "other processes agree"}
"""That one makes the environment by its spec alone, which knows no harness."""
IN_SHORT = (
    "bad calls are answered",
    "calls run in order",
    "sessions are single use",
    "resume is exact",
)
FULL = Harness(
    system_prompt="Be brief.",
    skills={"seek": "Find things\nLook twice."},
    memory=Memory(),
    sub_agents=SubAgents(max_count=1, tools=("cat",)),
)
"""Every tool of its own, no renaming."""


def wrap(harness: Harness, env_id: str = HUNT, **options) -> HarnessedEnv:
    return HarnessedEnv(registry.make(env_id), harness, **options)


def with_backend(tmp_path, use):
    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        try:
            return await use(backend)
        finally:
            await backend.aclose()

    return asyncio.run(main())


def judge(tmp_path, harness, name):
    """One check of the contract, on hunts in a harness."""
    env = wrap(harness)
    names = ("oracle", "random", "null")
    policies = {each: harnessed(registry.policy(HUNT, each), env) for each in names}

    def another():
        return open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "another", False)

    async def use(backend):
        case = Case(HUNT, lambda: wrap(harness), policies, {}, backend, another, num_tasks=3)
        return await examine(case, [MADE_HERE[name]])

    (found,) = with_backend(tmp_path, use)
    assert found.verdict not in BAD, found.detail


def session(tmp_path, harness, use, index=0, **options):
    """Run `use(env, task, opening)` in an open session."""

    async def go(backend):
        env = wrap(harness, **options)
        task = env.task("train", index)
        sandbox = Sandbox(backend, await backend.create(env.sandbox_spec, env.files(task)))
        opening = (await env.open(task, sandbox)).messages
        return await use(env, task, opening, sandbox)

    return with_backend(tmp_path, go)


def call(tool: str, index: int = 1, **arguments) -> ToolCall:
    return ToolCall(tool, arguments, index)


def say(*calls: ToolCall) -> Message:
    return Message("assistant", tool_calls=calls)


# The contract


@pytest.mark.sandbox
@pytest.mark.parametrize("name", MADE_HERE)
def test_contract_in_an_editor(tmp_path, name):
    judge(tmp_path, PRESETS["editor_agent"], name)


@pytest.mark.sandbox
@pytest.mark.parametrize("preset", ["none", "shell_agent", "patch_agent"])
@pytest.mark.parametrize("name", IN_SHORT)
def test_contract_in_the_other_presets(tmp_path, preset, name):
    judge(tmp_path, PRESETS[preset], name)


@pytest.mark.sandbox
@pytest.mark.parametrize("env_id", [HUNT, MATH])
def test_a_harness_that_changes_nothing_is_transparent(tmp_path, env_id):
    """Same tools, same messages, same tokens, same records and outcome, also for wrong calls."""

    async def go(backend):
        bare, wrapped = registry.make(env_id), wrap(Harness(), env_id)
        assert (wrapped.tools, wrapped.spec.digest) == (bare.tools, bare.spec.digest)
        renderer = Renderer(NanoTokenizer.shipped())
        for name in ("oracle", "random", "null"):
            task = bare.task("train", 3)
            policy = registry.policy(env_id, name)
            plain = await play(registry.make(env_id), task, policy, backend)
            same = await play(wrap(Harness(), env_id), task, policy, backend)
            tokens = [renderer.render(p.transcript, bare.tools) for p in (plain, same)]
            assert tokens[0].tolist() == tokens[1].tolist()
            assert plain.outcome == same.outcome
            assert [replace(r, wall_s=0.0) for r in plain.records] == [
                replace(r, wall_s=0.0) for r in same.records
            ]

    with_backend(tmp_path, go)


@pytest.mark.sandbox
@pytest.mark.parametrize("env_id", [HUNT, MATH])
def test_presets_look_different_and_score_the_same(tmp_path, env_id):
    async def go(backend):
        renderer = Renderer(NanoTokenizer.shipped())
        openings, num_tokens = set(), {}
        for name, harness in PRESETS.items():
            env = wrap(harness, env_id)
            policy = harnessed(registry.policy(env_id, "oracle"), env)
            for index in range(6):
                task = env.task("train", index)
                played = await play(wrap(harness, env_id), task, policy, backend)
                assert (played.outcome.reward, played.outcome.reward_parts["format"]) == (1.0, 1.0)
            opened = renderer.start(played.transcript[:2], env.tools)
            num_tokens[name] = len(opened)
            openings.add(tuple(opened.tolist()))
        assert len(openings) == len(PRESETS)
        assert max(num_tokens.values()) < 700, num_tokens

    with_backend(tmp_path, go)


# Names


def test_calls_come_in_under_shown_names_only():
    naming = Naming(registry.make(HUNT).tools, PRESETS["editor_agent"].tools)
    assert [spec.name for spec in naming.specs] == ["List", "Read", "Search", "Submit"]
    assert naming.specs[1].parameters["required"] == ["file_path"]
    own = naming.call_in(call("Read", file_path="a/b"))
    assert own == call("cat", path="a/b")
    assert naming.call_out(own) == call("Read", file_path="a/b")
    for wrong in (call("cat", path="a/b"), call("Read", path="a/b")):
        answered = naming.call_in(wrong)
        assert isinstance(answered, BadCall)
        assert answered.text.startswith("error: ")


def test_errors_speak_of_shown_names_and_outputs_are_left_alone():
    naming = Naming(registry.make(HUNT).tools, PRESETS["editor_agent"].tools)
    worded = naming.error_out("error: cat: missing argument path", ToolStatus.ERROR, "cat")
    assert worded == "error: Read: missing argument file_path"
    for text, status in (
        ("cat: no file", ToolStatus.ERROR),
        ("error: cat: missing argument path", ToolStatus.OK),
        ("error: my path and cat value", ToolStatus.ERROR),
        ("error: cat: of a program\nwith path", ToolStatus.ERROR),
    ):
        assert naming.error_out(text, status, "cat") == text
    assert naming.text_out("use `submit` to submit") == "use `Submit` to submit"


def test_a_shell_takes_command_lines():
    naming = Naming(registry.make(HUNT).tools, PRESETS["shell_agent"].tools)
    (spec,) = naming.specs
    assert spec.name == "bash"
    assert "grep PATTERN PATH" in spec.description
    own = call("grep", pattern="a 'b", path="c")
    assert naming.call_in(naming.call_out(own)) == own
    for line, word in (("cut a", "no command cut"), ("ls a b", "usage: ls PATH"), ("ls '", "quot")):
        answered = naming.call_in(call("bash", command=line))
        assert isinstance(answered, BadCall)
        assert word in answered.text


def test_a_shell_takes_what_is_no_scalar_as_json():
    schema = {
        "type": "object",
        "properties": {"items": {"type": "array"}, "any": True, "text": {"type": "string"}},
        "required": ["items"],
        "additionalProperties": True,
    }
    naming = Naming([ToolSpec("take", "Take", schema)], PRESETS["shell_agent"].tools)
    for arguments in ({"items": [1, "b c"], "any": {"x": None}, "text": "[1]"}, {"items": []}):
        own = call("take", **arguments)
        assert naming.call_in(naming.call_out(own)) == own
    camel = Naming([ToolSpec("take", "Take", schema)], PRESETS["editor_agent"].tools)
    own = call("take", items=[], further=1)
    assert camel.call_in(camel.call_out(own)) == own


def test_two_tools_of_one_name_are_refused():
    style = ToolStyle(names={"cat": "Open", "ls": "Open"})
    with pytest.raises(EnvError, match="different names"):
        wrap(Harness(tools=style))


def test_a_case_spells_what_no_table_names():
    style = ToolStyle(case=NameCase.CAMEL, prefix="x")
    env = wrap(replace(FULL, tools=style))
    shown = [spec.name for spec in env.tools]
    assert shown[-4:] == ["xReadSkill", "xWriteNotes", "xReadNotes", "xAssignTask"]


# The harness's own tools


@pytest.mark.sandbox
def test_notes_and_skills_live_in_the_state(tmp_path):
    async def use(env, task, opening, sandbox):
        assert opening[0] == Message("system", "Be brief.\nSkills: seek: Find things")
        step = await env.act(
            say(call("write_notes", 1, text="b first"), call("ls", 2, path="."),
                call("read_skill", 3, name="seek"), call("read_skill", 4, name="sek"))
        )  # fmt: skip
        texts = [message.content for message in step.messages]
        assert (texts[0], texts[2]) == ("noted", "Find things\nLook twice.")
        assert "NOTES" not in texts[1]
        assert step.records[3].status is ToolStatus.ERROR
        assert [message.index for message in step.messages] == [1, 2, 3, 4]
        state = json.loads(json.dumps(env.state()))
        again = wrap(FULL)
        assert (await again.open(task, sandbox, state)).messages == opening
        (answer,) = (await again.act(say(call("read_notes")))).messages
        assert answer.content == "b first"
        (long,) = (await again.act(say(call("write_notes", text="x" * 2001)))).messages
        assert long.content == "notes hold 2000 characters"
        assert (await again.act(say(call("read_notes")))).messages[0].content == "b first"
        assert (await again.grade()).reward_parts["format"] == 1.0
        await again.act(say(call("write_notes", txt="x")))
        assert (await again.grade()).reward_parts["format"] == 0.0

    session(tmp_path, FULL, use)


@pytest.mark.sandbox
def test_a_summary_opens_the_next_context(tmp_path):
    harness = replace(FULL, context=Context(ContextKind.COMPACTION, 0.5, "Sum up!"))

    async def use(env, task, opening, sandbox):
        assert [env.wants_summary(n, 100) for n in (49, 50)] == [False, True]
        with pytest.raises(EnvError, match="no summary"):
            env.next_context()
        await env.act(say(call("write_notes", text="n1")))
        assert env.ask_summary() == Message("user", "Sum up!")
        state = json.loads(json.dumps(env.state()))
        env = wrap(harness)
        await env.open(task, sandbox, state)
        step = await env.act(
            Message("assistant", "did it", tool_calls=(call("submit", value="1"),))
        )
        assert (step.messages, step.records, step.terminated) == ((), (), False)
        assert env.is_context_closed
        with pytest.raises(EnvError, match="summed up"):
            await env.act(say(call("read_notes")))
        state = json.loads(json.dumps(env.state()))
        env = wrap(harness)
        await env.open(task, sandbox, state)
        *before, summary = env.next_context().messages
        assert tuple(before) == opening
        assert summary == Message("user", "Summary so far:\ndid it\nNOTES.md:\nn1")
        assert not env.is_context_closed
        assert (await env.act(say(call("read_notes")))).messages[0].content == "n1"

    session(tmp_path, harness, use)


@pytest.mark.sandbox
def test_sub_agents_act_with_the_tools_they_are_given(tmp_path):
    jobs = []

    async def runner(job):
        jobs.append(job)
        file = await job.act(say(call("cat", path="nowhere")))
        other = await job.act(say(call("submit", value="1")))
        turns = (say(call("cat", path="nowhere")), Message("assistant", "found"))
        answers = [step.messages[0].content for step in (file, other)]
        return SubAgentReport(turns, "; ".join(answers), num_tokens=7)

    async def use(env, task, opening, sandbox):
        (answer,) = (await env.act(say(call("assign_task", task="look")))).messages
        assert answer.content.startswith("cat: nowhere: No such file")
        assert "no tool submit" in answer.content
        (job,) = jobs
        assert [spec.name for spec in job.tools] == ["cat"]
        assert job.messages[-1] == Message("user", "look")
        state = env.state()["harness"]
        assert (state["num_sub_agents"], state["num_sub_agent_tokens"]) == (1, 7)
        (again,) = (await env.act(say(call("assign_task", task="look")))).messages
        assert again.content == "all 1 sub-agents are used"
        assert env.state()["harness"]["sub_agents"] == []

    session(tmp_path, FULL, use, run_sub_agent=runner)
    reports = (SubAgentReport((say(call("cat", path="x")),), "told"),)

    async def recorded(env, task, opening, sandbox):
        (answer,) = (await env.act(say(call("assign_task", task="look")))).messages
        assert answer.content == "told"

    session(tmp_path, FULL, recorded, run_sub_agent=RecordedSubAgents(reports))


# Configs


def settings(**changed):
    return HarnessConfig.model_validate(changed).model_dump(mode="json")


def tasks(count=400):
    task = registry.make(HUNT).task("train", 0)
    return [replace(task, seed=seed) for seed in range(count)]


def test_presets_of_config_and_table_are_the_same():
    assert set(Preset.__args__) == set(PRESETS)


@pytest.mark.parametrize("harness", [*PRESETS.values(), FULL])
def test_json_round_trip_and_digest(harness):
    again = from_plain(Harness, json.loads(json.dumps(to_plain(harness))))
    assert again == harness
    assert again.digest == harness.digest
    assert replace(harness, max_turns=77).digest != harness.digest


def test_overrides_change_only_what_they_name():
    task = registry.make(HUNT).task("train", 0)
    preset = PRESETS["editor_agent"]
    plain = settings(preset="editor_agent", context={"fraction": 0.5}, memory=False, max_turns=3)
    changed = harness_of(plain, 0, task)
    assert changed.context == replace(preset.context, fraction=0.5)
    assert (changed.memory, changed.max_turns, changed.tools) == (None, 3, preset.tools)
    assert harness_of(settings(), 0, task) == Harness()


def test_groups_draw_by_the_weights_and_by_nothing_but_seed_and_task():
    plain = settings(
        randomize={
            "presets": {"shell_agent": 3.0, "editor_agent": 1.0},
            "variants": [{"weight": 1.0}, {"weight": 1.0, "max_turns": 5}],
        }
    )
    drawn = [harness_of(plain, 0, task) for task in tasks()]
    assert drawn == [harness_of(json.loads(json.dumps(plain)), 0, task) for task in tasks()]
    assert drawn != [harness_of(plain, 1, task) for task in tasks()]
    shells = sum(each.tools.shell is not None for each in drawn)
    assert 0.68 < shells / len(drawn) < 0.82
    turns = Counter(each.max_turns for each in drawn)
    assert 150 < turns[5] < 250
    assert {each.digest for each in drawn} == {each.digest for each in harnesses(plain)}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("harness.preset=vim", "harness.preset"),
        ("harness.context={fraction: 2.0}", "harness.context.fraction"),
        ("harness.randomize={presets: {vim: 1.0}}", "harness.randomize.presets.vim"),
        ("harness.randomize={variants: [{weight: 0.0}]}", "harness.randomize.variants.0.weight"),
        ("harness.tool=1", "harness.tools"),
    ],
)
def test_config_errors_name_the_key(override, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        configs.resolve({"envs": [{"id": HUNT}]}, "x.yaml", [override])


def test_a_fraction_is_between_0_and_1():
    with pytest.raises(UserInputError, match="fraction"):
        Context(fraction=1.0)


def test_a_scripted_summary_tells_the_whole_way():
    """The oracle goes on from its own summary as from the transcript."""
    env = wrap(PRESETS["editor_agent"])
    policy = harnessed(registry.policy(HUNT, "oracle"), env)
    task = env.task("train", 0)
    opening = registry.make(HUNT).observe(task).messages
    turn = policy(task, opening, philox(0))
    tool = turn.tool_calls[0]
    answered = [*opening, turn, Message("tool", "b/k7", tool=tool.tool, index=1)]
    summary = policy(task, [*answered, env.ask_summary()], philox(0))
    told = Message("user", f"Summary so far:\n{summary.content}\nTODO.md:\nx")
    assert policy(task, [*opening, told], philox(0)) == policy(task, answered, philox(0))
