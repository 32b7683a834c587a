"""A sound environment, and one for every way of being broken that the checker must see.

Each broken one is the sound one with a single fault; `FAULTS` names the check that is to find it.
"""

import itertools
import os
import random as global_random
import time
from dataclasses import dataclass, field, replace

from k3rl.envs.base import Normaliser, Observation
from k3rl.envs.session import SessionState, ToolSession, draw_seed
from k3rl.envs.tools import Tool, ToolOutput, command_output, run_command
from k3rl.errors import SandboxError, UserInputError
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import Message, Task, TaskLimits, ToolCall, philox, to_plain

ID = "test/Sound-v0"
HERE = "tests.envs.broken_envs"
SECONDS = Normaliser(
    "seconds",
    r"in \d+\.\d+ s",
    "in 0 s",
    ("3 in 0.1 s", "3 in 0.2 s"),
    ("3 in 0.1 s", "4 in 0.1 s"),
)


def numbers(seed):
    return [int(number) for number in philox(seed, "sum").integers(1000, 5000, 3)]


class Sound(ToolSession):
    """Add two numbers of a file; the third is not asked for."""

    sandbox_spec = SandboxSpec(environment={"LC_ALL": "C"}, executables=("cat",))
    normalisers = (SECONDS,)

    def __init__(self, spec, extra=()):
        super().__init__(spec)

    def make_tools(self):
        return tuple(Tool.of(tool) for tool in (self.look, self.note))

    def task(self, split, index):
        seed = draw_seed(self.spec.id, split, index, numbers)
        limits = TaskLimits(max_turns=5)
        return Task(self.spec.id, seed, split, {"kind": "sum", "words": ["sum"]}, limits)

    def files(self, task):
        left, right, serial = numbers(task.seed)
        return {"numbers": f"{left} + {right}, serial {serial}\n".encode()}

    def observe(self, task):
        return Observation((Message("user", "Add the numbers."),))

    def is_correct(self, task, answer):
        return answer.strip() == right_answer(task)

    async def judge(self, task):
        """By the answer, and by what a fork of the final state still holds."""
        parts = dict(await super().judge(task))
        async with self.final_fork() as fork:
            await fork.put("hidden", b"+")
            found = await fork.run("cat", "hidden", "numbers")
        parts["kept"] = float(found.stdout == b"+" + self.files(task)["numbers"])
        return parts

    async def look(self, path: str):
        """Show a file."""
        begun = time.perf_counter()
        self.progress.memory.setdefault("seen", []).append(path)
        output = await self.show(path)
        return replace(output, content=f"{output.content}\nin {time.perf_counter() - begun:.9f} s")

    async def show(self, path):
        return command_output(await run_command(self.sandbox, "cat", "--", "./" + path[:99]))

    async def note(self, text: str, times: int = 1, share: float = 1.0, is_kept: bool = False):
        """Write nothing down."""
        return "noted"


def right_answer(task):
    left, right, _ = numbers(task.seed)
    return str(left + right)


def look(path):
    return Message("assistant", tool_calls=(ToolCall("look", {"path": path}, 1),))


def oracle(task, transcript, rng):
    for message in transcript:
        if message.role == "tool" and " + " in message.content:
            left, _, rest = message.content.partition(" + ")
            return Message("assistant", str(int(left) + int(rest.partition(",")[0])))
    return look("numbers")


def random(task, transcript, rng):
    return look("nothing") if rng.random() < 0.6 else Message("assistant", str(rng.integers(9999)))


def null(task, transcript, rng):
    return Message("assistant", "")


def all_numbers(task, transcript, rng):
    return Message("assistant", " ".join(str(number) for number in range(2000, 10_000)))


class ImpureTask(Sound):
    def __init__(self, spec):
        super().__init__(spec)
        self.num_asked = itertools.count()

    def task(self, split, index):
        task = super().task(split, index)
        return replace(task, metadata={**task.metadata, "asked": next(self.num_asked)})


class SameTasksInBothSplits(Sound):
    def task(self, split, index):
        task = super().task(split, index)
        return replace(task, seed=super().task("train", index).seed)


class SpecThatJsonChanges(Sound):
    def __init__(self, spec, extra=()):
        super().__init__(replace(spec, kwargs={"extra": (1, 2)}))


class ToolDeclaredTwice(Sound):
    def __init__(self, spec):
        super().__init__(spec)
        self.tools += self.tools[:1]


class RaisesAtBadArguments(Sound):
    async def act(self, message):
        for call in message.tool_calls:
            if None in call.arguments.values():
                raise TypeError("None")
        return await super().act(message)


class AnswersBadArgumentsByRunning(Sound):
    async def act(self, message):
        calls = tuple(
            replace(call, arguments={k: v for k, v in call.arguments.items() if k != "nonsense"})
            for call in message.tool_calls
        )
        return await super().act(replace(message, tool_calls=calls))


class EndsAtMalformedTurns(Sound):
    async def act(self, message):
        step = await super().act(message)
        if message.malformed is not None:
            self.finish(None)
        return replace(step, terminated=self.progress.is_over)


class SortsCalls(Sound):
    async def act(self, message):
        calls = sorted(message.tool_calls, key=lambda call: call.index)
        return await super().act(replace(message, tool_calls=tuple(calls)))


class RecordsSomethingElse(Sound):
    async def act(self, message):
        step = await super().act(message)
        records = tuple(replace(each, output_digest="0" * 64) for each in step.records)
        return replace(step, records=records)


class OpensTwice(Sound):
    async def open(self, task, sandbox, state=None):
        self._task = None
        return await super().open(task, sandbox, state)


class ForgetsTurns(Sound):
    def state(self):
        return to_plain(SessionState())


class TakesAnyState(Sound):
    async def open(self, task, sandbox, state=None):
        try:
            return await super().open(task, sandbox, state)
        except UserInputError:
            if task.env_id != self.spec.id:
                raise
            return await super().open(task, sandbox)


def counting_oracle(task, transcript, rng):
    """Goes by how many turns there were, not by what they were."""
    is_first = all(message.role != "assistant" for message in transcript)
    answer = [m.content for m in transcript if m.role == "tool" and " + " in m.content]
    if is_first or (answer and "+" in answer[0]):
        return oracle(task, transcript, rng)
    return Message("assistant", "lost")


class SharesTheOpenTask(Sound):
    opened = None

    async def open(self, task, sandbox, state=None):
        type(self).opened = task
        return await super().open(task, sandbox, state)

    def is_correct(self, task, answer):
        return super().is_correct(type(self).opened, answer)


class CachesTasks(Sound):
    def __init__(self, spec):
        super().__init__(spec)
        self.made = {}

    def task(self, split, index):
        if (split, index) not in self.made:
            self.made[split, index] = super().task(split, index)
        return self.made[split, index]


class HandsOutItsState(Sound):
    def state(self):
        return {**super().state(), "memory": self.progress.memory}


class ReusesItsMessages(Sound):
    def __init__(self, spec):
        super().__init__(spec)
        self.buffer = []

    async def act(self, message):
        step = await super().act(message)
        self.buffer[:] = step.messages
        return replace(step, messages=self.buffer)


class AnswersForALostSandbox(Sound):
    async def show(self, path):
        try:
            return await super().show(path)
        except SandboxError:
            return ToolOutput("error: gone")


class RewardsALostSandbox(Sound):
    async def judge(self, task):
        try:
            return await super().judge(task)
        except SandboxError:
            return {"correct": 0.0}


class OpensOutOfSpace(Sound):
    def observe(self, task):
        return Observation((*super().observe(task).messages, Message("developer", "of no role")))


class TellsTheTime(Sound):
    async def show(self, path):
        output = await super().show(path)
        return replace(output, content=f"{output.content} at {time.time()}")


class DrawsGlobally(Sound):
    async def show(self, path):
        output = await super().show(path)
        return replace(output, content=f"{output.content} {global_random.random()}")


class RemembersOtherSessions(Sound):
    num_shown = itertools.count()

    async def show(self, path):
        output = await super().show(path)
        return replace(output, content=f"{output.content} no. {next(self.num_shown)}")


class TellsItsProcess(Sound):
    def observe(self, task):
        return Observation((Message("user", f"Add the numbers. I am {os.getpid()}."),))


class TellsASet(Sound):
    async def show(self, path):
        output = await super().show(path)
        words = {"north", "south", "east", "west", "up", "down", "left", "right"}
        return replace(output, content=f"{output.content} {' '.join(words)}")


class GradesByCounting(Sound):
    num_graded = 0

    async def judge(self, task):
        self.num_graded += 1
        return {**await super().judge(task), "graded": float(self.num_graded)}


class HeldoutCannotBeSolved(Sound):
    def is_correct(self, task, answer):
        return super().is_correct(task, answer) and task.split != "heldout"


class RewardsSilence(Sound):
    def is_correct(self, task, answer):
        return super().is_correct(task, answer) or (task.split == "heldout" and not answer)


class GraderRaises(Sound):
    def is_correct(self, task, answer):
        if "\0" in answer:
            raise ValueError("NUL")
        return super().is_correct(task, answer)


class RewardIsNotItsParts(Sound):
    async def grade(self):
        outcome = await super().grade()
        return outcome if self.progress.is_over else replace(outcome, reward=0.1)


class RewardsACheat(Sound):
    def is_correct(self, task, answer):
        return right_answer(task) in answer.split()


class ManyNormalisers(Sound):
    normalisers = tuple(replace(SECONDS, name=f"seconds {number}") for number in range(6))


class HidesItsPlantedChange(Sound):
    normalisers = (replace(SECONDS, pattern=r"(\d )?in \d+\.\d+ s"),)


class DoesNotHide(Sound):
    normalisers = (SECONDS, replace(SECONDS, name="other", pattern="nowhere"))


class HidesWhatTasksAre(Sound):
    normalisers = (
        SECONDS,
        Normaliser("serial", r"serial \d+", "serial", ("serial 1", "serial 2"), ("1", "2")),
    )


class TellsInThePrompt(Sound):
    def observe(self, task):
        said = f"Add the numbers. (For us: {right_answer(task)}.)"
        return Observation((Message("user", said),))


class TellsInTheMetadata(Sound):
    def task(self, split, index):
        task = super().task(split, index)
        answer = {"grader": {"wants": [int(right_answer(task))]}}
        return replace(task, metadata={**task.metadata, **answer})


class TellsInAFile(Sound):
    def files(self, task):
        return {**super().files(task), ".solution": right_answer(task).encode() + b"\n"}


class GradesInPlace(Sound):
    async def judge(self, task):
        await self.sandbox.put("hidden", b"+")
        return await super().judge(task)


class LeavesAFork(Sound):
    async def judge(self, task):
        await self.sandbox.backend.fork(self.sandbox.id, 1)
        return await super().judge(task)


@dataclass(frozen=True)
class Fault:
    """A broken environment and who is to find it."""

    cls: type
    check: str
    also: frozenset = frozenset()
    """Other checks that cannot help seeing it."""
    policies: dict = field(default_factory=dict)
    """In place of the sound ones; None: not declared."""

    @property
    def name(self):
        changed = [f"{k}-{v.__name__ if v else None}" for k, v in self.policies.items()]
        return "-".join([self.cls.__name__, *changed])


TWICE = frozenset(
    {"resume is exact", "sessions do not mix", "other processes agree", "plays are deterministic"}
)
SOUND_POLICIES = {"oracle": oracle, "random": random, "null": null}
FAULTS = (
    Fault(ImpureTask, "tasks are pure", frozenset({"nothing is shared"})),
    Fault(SameTasksInBothSplits, "splits share no task"),
    Fault(SpecThatJsonChanges, "spec round-trips"),
    Fault(ToolDeclaredTwice, "tools are declared"),
    Fault(RaisesAtBadArguments, "bad calls are answered"),
    Fault(AnswersBadArgumentsByRunning, "bad calls are answered"),
    Fault(EndsAtMalformedTurns, "malformed turns are answered"),
    Fault(SortsCalls, "calls run in order"),
    Fault(RecordsSomethingElse, "records are what is read"),
    Fault(OpensTwice, "sessions are single use"),
    Fault(ForgetsTurns, "resume is exact"),
    Fault(TakesAnyState, "bad state is refused"),
    Fault(Sound, "oracle takes over anywhere", policies={"oracle": counting_oracle}),
    Fault(SharesTheOpenTask, "sessions do not mix", frozenset({"*"})),
    Fault(CachesTasks, "nothing is shared"),
    Fault(HandsOutItsState, "nothing is shared"),
    Fault(ReusesItsMessages, "observations stay as they were", frozenset({"gymnasium agrees"})),
    Fault(AnswersForALostSandbox, "lost sandboxes are raised"),
    Fault(RewardsALostSandbox, "lost sandboxes are raised"),
    Fault(OpensOutOfSpace, "gymnasium agrees"),
    Fault(TellsTheTime, "plays are deterministic", TWICE),
    Fault(DrawsGlobally, "plays are deterministic", TWICE),
    Fault(RemembersOtherSessions, "plays are deterministic", TWICE),
    Fault(TellsItsProcess, "other processes agree"),
    Fault(TellsASet, "other processes agree"),
    Fault(GradesByCounting, "grading is repeatable"),
    Fault(HeldoutCannotBeSolved, "oracle is right"),
    Fault(Sound, "oracle is right", policies={"oracle": None}),
    Fault(RewardsSilence, "null gets nothing"),
    Fault(Sound, "random is below the oracle", policies={"random": oracle}),
    Fault(GraderRaises, "every end is graded"),
    Fault(RewardIsNotItsParts, "every end is graded"),
    Fault(RewardsACheat, "known cheats get nothing"),
    Fault(ManyNormalisers, "normalisers are few"),
    Fault(HidesItsPlantedChange, "planted changes stay"),
    Fault(DoesNotHide, "planted changes stay"),
    Fault(HidesWhatTasksAre, "outputs stay apart"),
    Fault(TellsInThePrompt, "answers are not shown"),
    Fault(TellsInTheMetadata, "answers are not shown"),
    Fault(TellsInAFile, "answers are not shown"),
    Fault(GradesInPlace, "grading leaves no trace"),
    Fault(LeavesAFork, "sandboxes are closed"),
)
