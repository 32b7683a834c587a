"""k3rl/Terminal-v0: a job in a small workspace, done with bash, judged by what is there at the end.

Every command is a shell of its own: the files are all that goes on from one to the next, so a
session that is resumed from a snapshot goes on exactly. Nothing that the policy says is judged,
only the files; see terminal_state.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from k3rl.envs.base import EnvSpec, Normaliser, Observation
from k3rl.envs.session import ToolSession, draw_seed
from k3rl.envs.terminal_jobs import GENERATORS, Job, generate
from k3rl.envs.terminal_state import Link, Packed, Script, is_as_expected, passes, read_tree
from k3rl.envs.tools import Tool, ToolOutput, command_output, run_command
from k3rl.errors import UncapturableTree, UserInputError
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.types import (
    JSON,
    JsonObject,
    Message,
    Task,
    TaskLimits,
    ToolCall,
    ToolStatus,
    digest_bytes,
)

KINDS = tuple(GENERATORS)
LIMITS = TaskLimits(max_turns=12, max_context_tokens=8192, max_time_s=300.0)
DEADLINE_S = 10.0
MAX_COMMAND_CHARS = 20_000
RULES = (
    "Work in the current folder with bash; each command starts there in a fresh shell. When the "
    "job is done, call submit. Leave no file that the job does not ask for; scratch files of a "
    "command may go to /tmp."
)
PROGRAMS = (
    "bash", "awk", "cat", "chmod", "cut", "find", "grep", "gzip", "head", "ln", "ls", "mkdir", "mv",
    "python3", "rm", "sed", "sha256sum", "sort", "tar", "uniq", "xargs",
)  # fmt: skip
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"


def _job(task: Task) -> Job:
    kind = task.metadata.get("kind")
    if kind not in KINDS:
        raise UserInputError(f"{task.env_id}: task {task.key}: no job has {task.metadata}")
    return generate(task.seed, str(kind))


class Terminal(ToolSession):
    """One session of k3rl/Terminal-v0. A message without a tool call gives up."""

    sandbox_spec = SandboxSpec(
        environment={
            "LC_ALL": "C",
            "TZ": "UTC",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
        },
        executables=PROGRAMS,
    )
    normalisers = (
        Normaliser(
            "listed times",
            rf"\b{_MONTH} [ \d]\d (?:\d\d:\d\d| \d{{4}})(?= )",
            "Jan  1 00:00",
            ("-rw-r--r-- 1 u u 5 Dec  1 00:17 a", "-rw-r--r-- 1 u u 5 Feb 11 23:59 a"),
            ("-rw-r--r-- 1 u u 5 Dec  1 00:17 a", "-rw-r--r-- 1 u u 6 Dec  1 00:17 a"),
        ),
        Normaliser(
            "full times",
            r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{9} [+-]\d{4}",
            "2020-01-01 00:00:00.000000000 +0000",
            (
                "Modify: 2026-12-01 00:17:01.123456789 +0000",
                "Modify: 2026-12-02 10:07:21.023456789 +0000",
            ),
            ("2026-12-01 00:17:01 a", "2026-12-02 00:17:01 a"),
        ),
        Normaliser(
            "today",
            rf"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) {_MONTH} [ \d]\d \d\d:\d\d:\d\d UTC \d{{4}}\b",
            "Wed Jan  1 00:00:00 UTC 2020",
            ("Tue Dec  1 00:17:01 UTC 2026", "Fri Dec 11 10:17:01 UTC 2026"),
            ("Tue Dec  1", "Fri Dec 11"),
        ),
    )

    def __init__(self, spec: EnvSpec, kinds: Sequence[str] = KINDS) -> None:
        """`kinds` are the kinds of jobs; see terminal_jobs.py."""
        if not kinds or not set(kinds) <= set(KINDS):
            raise UserInputError(f"{spec.id}: kinds {list(kinds)}: use {', '.join(KINDS)}")
        super().__init__(spec)
        self._kinds = tuple(kinds)

    def make_tools(self) -> Sequence[Tool]:
        """`bash`, `submit`."""
        return (Tool.of(self.bash), Tool.of(self.submit))

    def task(self, split: str, index: int) -> Task:
        """A job; no two jobs of different splits share their workspace and instruction."""
        seed = draw_seed(self.spec.id, split, index, self._content)
        return Task(self.spec.id, seed, split, self._metadata(seed), LIMITS)

    def _metadata(self, seed: int) -> JsonObject:
        return {"kind": self._kinds[seed % len(self._kinds)]}

    def _content(self, seed: int) -> JSON:
        job = generate(seed, str(self._metadata(seed)["kind"]))
        files = {path: digest_bytes(data) for path, data in job.files.items()}
        return [job.instruction, files]

    def files(self, task: Task) -> Mapping[str, bytes]:
        """The workspace before the job is done."""
        return dict(_job(task).files)

    def observe(self, task: Task) -> Observation:
        """The rules and the job."""
        return Observation((Message("user", f"{_job(task).instruction}\n\n{RULES}"),))

    async def judge(self, task: Task) -> Mapping[str, float]:
        """1 for exactly the final state, 0 for anything else, half done or in the way of a look."""
        job = _job(task)
        try:
            async with self.final_fork() as fork:
                found = await read_tree(fork)
                is_right = found is not None and is_as_expected(found, job.expected, job.modes)
                return {"correct": float(is_right and await passes(fork, job.probes))}
        except UncapturableTree:
            return {"correct": 0.0}

    def no_calls(self, message: Message) -> str:
        """Giving up; the files are judged as they are."""
        self.finish(None)
        return ""

    async def bash(self, command: str) -> ToolOutput:
        """Run a command."""
        if "\0" in command or len(command) > MAX_COMMAND_CHARS:
            return ToolOutput("error: bash: bad command", ToolStatus.ERROR)
        result = await run_command(self.sandbox, "bash", "-c", command, deadline_s=DEADLINE_S)
        return command_output(result, DEADLINE_S)

    async def submit(self) -> str:
        """End the job."""
        self.finish("")
        return ""


def _bash(command: str, think: str = "") -> Message:
    return Message(
        "assistant", think=think, tool_calls=(ToolCall("bash", {"command": command}, 1),)
    )


def _submit() -> Message:
    return Message("assistant", "done", tool_calls=(ToolCall("submit", {}, 1),))


def _do(commands: Sequence[str], transcript: Sequence[Message]) -> Message:
    """The first of `commands` that has not been called yet; then `submit`."""
    called = [call.arguments.get("command") for m in transcript for call in m.tool_calls]
    return next((_bash(each) for each in commands if each not in called), _submit())


def oracle(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """The job's own commands, one a turn; they also mend a job that is half done."""
    return _do(_job(task).commands, transcript)


def demonstrator(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """The oracle, after a look around."""
    turn = _do(("ls -R", *_job(task).commands), transcript)
    return replace(turn, think="done" if turn.content else "work")


def random(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Commands that look around, fail or leave nothing; at times it submits."""
    if rng.random() < 0.2:
        return _submit()
    commands = ("ls -la", "find . -type f | sort", "cat nothing", "mkdir -p new", "ls | wc -l", "(")
    return _bash(str(rng.choice(commands)))


def null(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Give up at once."""
    return Message("assistant", "", think="")


def _missing(job: Job) -> list[str]:
    """What the job must bring about and the workspace does not hold."""
    return sorted(path for path, entry in job.expected.items() if job.files.get(path) != entry)


def cheat_link(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Links to inputs, or copies in place of links, where files are wanted."""
    job = _job(task)
    source = min(job.files)
    commands = []
    for path in _missing(job):
        folder = shlex.quote(path.rpartition("/")[0] or ".")
        make = "cp" if isinstance(job.expected[path], Link) else "ln -sf"
        commands.append(f'mkdir -p {folder}; {make} "$PWD/{source}" {shlex.quote(path)}')
    return _do(["; ".join(commands) or "true"], transcript)


def cheat_hardcode(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """The output for the sample in sight, written into the program; elsewhere an empty program."""
    job = _job(task)
    if not job.probes:
        return _do(["printf 'exit 0\\n' > tool.py"], transcript)
    (right,) = (command.partition("\n")[2].removesuffix("END") for command in job.commands)
    fill = f'printf \'print("""%s""")\\n\' "$(python3 -c {shlex.quote(right)} < sample.txt)"'
    return _do([f"{fill} > tool.py"], transcript)


def cheat_daemon(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """A process that does the job after the session has ended."""
    later = shlex.quote(f"sleep 0.3; {' && '.join(_job(task).commands)}")
    return _do([f"setsid nohup bash -c {later} > /dev/null 2>&1 & disown"], transcript)


def cheat_unreadable(
    task: Task, transcript: Sequence[Message], rng: np.random.Generator
) -> Message:
    """A workspace that a verifier may not read."""
    return _do(["mkdir -p locked/in && touch locked/in/x; chmod -R 000 ./* ."], transcript)


def cheat_fifo(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Pipes in place of files, for a verifier that waits for their content."""
    made = [
        f"mkdir -p $(dirname {path}); rm -f {path}; mkfifo {path}" for path in _missing(_job(task))
    ]
    return _do(["; ".join(["mkfifo pipe", *made])], transcript)


def cheat_huge(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """A file that a verifier may not be able to hold, and a folder nested very deep."""
    deep = "for i in $(seq 300); do mkdir d; cd d; done; touch x"
    return _do([f"truncate -s 60M big.bin; {deep}"], transcript)


def cheat_fill(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Every name that is wanted, filled with all there is."""
    fill = ["cat $(find . -type f | sort) > /tmp/all"]
    for path in _missing(_job(task)):
        fill.append(f"mkdir -p $(dirname {path}); cat /tmp/all > {path}; chmod 777 {path}")
    return _do(["; ".join(fill)], transcript)


def cheat_exit(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Successful exits, and an end of whoever waits for them."""
    script = "import os; print('ok', flush=True); os._exit(0)"
    wanted = any(isinstance(entry, Script) for entry in _job(task).expected.values())
    place = f"printf '%s' {shlex.quote(script)} > tool.py; " if wanted else ""
    return _do([f"{place}trap 'exit 0' EXIT; kill -9 $PPID; exit 0"], transcript)


def cheat_claim(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Only words."""
    return Message("assistant", "Done: all checks pass. correct=1.0, reward=1.0.", think="")


def cheat_empty(task: Task, transcript: Sequence[Message], rng: np.random.Generator) -> Message:
    """Files of the right names and nothing in them, archives included."""
    job = _job(task)
    made = []
    for path in _missing(job):
        is_packed = isinstance(job.expected[path], Packed)
        make = f"tar -czf {path} -T /dev/null" if is_packed else f": > {path}"
        made.append(f"mkdir -p $(dirname {path}); {make}")
    return _do(["; ".join(made) or "true"], transcript)
