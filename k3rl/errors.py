"""Every error k3rl raises on purpose.

A message is one line that names the thing (file, key, id) and says what to do. What the policy
did wrong (a non-zero exit, a malformed tool call, a tool's own failure) is a result, never an
exception: see `ToolResult` and `Outcome` in `k3rl.types`.
"""

from __future__ import annotations


class K3rlError(Exception):
    """Base of all of them; the command line prints it as one line and exits with 2."""


class ConfigError(K3rlError):
    """A wrong key, type or value in a config: names the file and the key path."""


class UserInputError(K3rlError, ValueError):
    """A bad argument of a public function or command."""


class SandboxError(K3rlError):
    """The sandbox infrastructure failed. Never the exit status of a command inside it."""


class CapabilityMissing(SandboxError):
    """A sandbox was asked to enforce something that it cannot enforce on this machine."""


class SandboxLost(SandboxError):
    """A sandbox that existed is gone: closed, reaped, or its host died."""


class DeadlineExceeded(SandboxError):
    """A phase of a session that belongs to the machine took too long."""


class UncapturableTree(SandboxError):
    """The policy made a workspace that no snapshot can hold: its fault, not the machine's."""


class EngineError(K3rlError):
    """A rollout engine failed or was asked for a law or state it does not support."""


class StoreError(K3rlError):
    """The trajectory store cannot do what was asked: disk full, unknown id, gap in an append."""


class CorruptData(StoreError):
    """Bytes on disk are not what was written: names file, offset and field."""

    def __init__(self, file: str, offset: int, field: str, detail: str) -> None:
        """`offset` is in bytes from the start of `file`."""
        super().__init__(f"{file}: byte {offset}: {field}: {detail}")
        self.file, self.offset, self.field, self.detail = file, offset, field, detail

    def __reduce__(self) -> tuple[type[CorruptData], tuple[str, int, str, str]]:
        """Rebuild from the four fields: exceptions cross process boundaries by their arguments."""
        return (type(self), (self.file, self.offset, self.field, self.detail))


class SchemaTooNew(StoreError):
    """A file was written by a newer major schema than this version reads."""


class StoreFull(StoreError):
    """The store's disk has too little room to begin anything: make room; what runs goes on."""


class Fenced(StoreError):
    """A writer whose lease was taken over tried to write: it must stop."""


class EnvError(K3rlError):
    """An environment cannot be built or broke its contract."""


class GraderError(EnvError):
    """The grader itself failed; the trajectory gets no reward."""


class WeightsError(K3rlError):
    """A policy version is incomplete, has a wrong checksum, or would go back."""
