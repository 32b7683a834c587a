"""What a final state is worth: runs the trusted verifier in a fork and reads its verdict.

What the policy's code does to its own grading (hang, kill, exhaust, lie) gives 0. A verifier that
fails before it has started that code, or that ends well without a verdict, is a GraderError.
"""

from __future__ import annotations

import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3rl.envs.code_repair.problems import Problem
from k3rl.errors import GraderError
from k3rl.sandboxes.base import ExecRequest, ExecResult, Sandbox, run
from k3rl.types import JsonObject

VERIFIER = Path(__file__).with_name("verifier.py").read_text()
PYTHON = ("python3", "-I", "-S", "-c")
"""Without the environment, the user's and the site's packages, and the present folder."""
LIMIT_S = 8.0
"""Wall time of one function's check; one that is right takes a hundredth of it."""
CPU_S = 4
DEADLINE_S = 12.0
"""Wall time of a whole verification beyond that of one check."""
CHANNEL_BYTES = 4096
MAX_DETAIL_CHARS = 200


@dataclass(frozen=True, slots=True)
class Part:
    """One function that must hold."""

    problem: Problem
    module: str
    """Where the workspace defines it."""

    def job(self) -> JsonObject:
        """As the verifier reads it."""
        problem = self.problem
        return {
            "name": problem.name,
            "module": self.module,
            "reference": problem.source,
            "check": problem.check,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier found."""

    is_right: bool
    reason: str
    """Why not."""


def _open_folder() -> bytes:
    """An archive of one member: the workspace's own folder, with the usual permissions."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo(".")
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(member)
    return buffer.getvalue()


OPEN_FOLDER = _open_folder()


async def let_in(sandbox: Sandbox) -> None:
    """Let commands into a workspace whose folder the policy has closed to all."""

    async def chunks() -> AsyncIterator[bytes]:
        yield OPEN_FOLDER

    await sandbox.backend.put_tree(sandbox.id, ".", chunks())


async def verify(
    sandbox: Sandbox,
    parts: Sequence[Part],
    paths: Sequence[str],
    program: str | None = None,
    limit_s: float = LIMIT_S,
    cpu_s: int = CPU_S,
) -> Verdict:
    """Judge the workspace of a sandbox in which nothing else runs.

    `paths` are the files that must be plain ones. The hidden checks go in on the standard input
    and touch no disk. `program` is the verifier, unless another is tried. Raises GraderError when
    it fails before it has started the policy's code, or says nothing that is a verdict.
    """
    nonce = secrets.token_hex(16)
    job = {
        "nonce": nonce,
        "paths": list(paths),
        "parts": [part.job() for part in parts],
        "limit_s": limit_s,
        "cpu_s": cpu_s,
    }
    request = ExecRequest(
        (*PYTHON, program or VERIFIER),
        repr(job).encode(),
        DEADLINE_S + limit_s,
        max_output_bytes=CHANNEL_BYTES,
        channel_bytes=CHANNEL_BYTES,
    )
    return read_verdict(await run(sandbox.backend, sandbox.id, request), nonce)


def read_verdict(result: ExecResult, nonce: str) -> Verdict:
    """What an ended verifier says. Raises GraderError."""
    lines = result.channel.decode(errors="replace").splitlines()
    words = [line.split(" ", 2) for line in lines if line.startswith(f"{nonce} ")]
    if not words or words[0][1:] != ["ready"]:
        raise GraderError(f"k3rl/CodeRepair-v0: the verifier did not start: {_detail(result)}")
    verdict = words[1] if len(words) == 2 else ["", ""]
    if verdict[1] in ("pass", "fail"):
        return Verdict(verdict[1] == "pass", "".join(verdict[2:]))
    if result.exit_code != 0:
        how = "timed out" if result.timed_out else f"ended with {result.exit_code}"
        return Verdict(False, f"the verifier {how} while the code ran")
    raise GraderError(f"k3rl/CodeRepair-v0: the verifier gave no verdict: {_detail(result)}")


def _detail(result: ExecResult) -> str:
    """The last line that it said, and how it ended."""
    last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
    return f"{how}: {last[-MAX_DETAIL_CHARS:] or 'no message'}"
