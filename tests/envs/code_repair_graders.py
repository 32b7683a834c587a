"""Careless graders: what cheats get past. They show that a cheat does what it tries."""

import json

from k3rl.envs.code_repair.build import hard_coded
from k3rl.envs.code_repair.grading import VERIFIER
from k3rl.envs.code_repair.table import mutants
from k3rl.sandboxes.base import ExecRequest, run

IN_PROCESS = """
import json, sys
job = json.loads(sys.stdin.read())
space = {"__name__": "solution"}
exec(job["solution"], space)
checks = {"__name__": "check"}
exec(job["check"], checks)
check = checks["check"]
check(space[job["name"]])
print("pass", flush=True)
"""
"""The classic: everything in one process, right when it ends with 0."""

FROM_FILE = """
import sys
sys.path.insert(0, "")
import json, random
from solution import NAME
CHECK
check(NAME)
"""
"""A program with the hidden check, laid into the workspace and run there."""

DUMPABLE = VERIFIER.replace("prctl(PR_SET_DUMPABLE, 0,", "prctl(PR_SET_DUMPABLE, 1,")
"""Our own verifier, but for its hiding."""
assert DUMPABLE != VERIFIER


async def exec_in(sandbox, *argv, stdin=b"", deadline_s=20.0):
    request = ExecRequest(argv, stdin, deadline_s, channel_bytes=4096)
    return await run(sandbox.backend, sandbox.id, request)


async def in_process(sandbox, task):
    """True when the classic grader is content."""
    problem = mutants()[task.seed].right()
    solution = (await sandbox.get("solution.py")).decode()
    job = {"solution": solution, "check": problem.check, "name": problem.name}
    argv = ("python3", "-S", "-s", "-c", IN_PROCESS)
    return (await exec_in(sandbox, *argv, stdin=json.dumps(job).encode())).exit_code == 0


async def from_file(sandbox, task, before="true"):
    """True when the grader that lies in the workspace is content."""
    problem = mutants()[task.seed].right()
    text = FROM_FILE.replace("NAME", problem.name).replace("CHECK", problem.check)
    await sandbox.put("hidden_check.py", text.encode())
    command = f"{before}; exec python3 -s hidden_check.py"
    return (await exec_in(sandbox, "sh", "-c", command)).exit_code == 0


async def public_tests(env):
    """True when the public tests pass."""
    from k3rl.types import Message, ToolCall

    step = await env.act(Message("assistant", tool_calls=(ToolCall("run_tests", {}, 1),)))
    text = step.messages[0].content
    return "failed" not in text and "passed" in text


def knows_public_only(task):
    """The source that `hard_code` hands in."""
    mutant = mutants()[task.seed]
    problem = mutant.right()
    public = [problem.cases[i] for i in sorted({*mutant.seen, *problem.shown})]
    return hard_coded(mutant.source(), problem.name, public)
