"""Finding out what a backend enforces on this machine: small real attempts, with controls.

Each probe tries what must fail beside something like it that must work, so that a broken probe
shows as a missing capability, never as a present one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace

from k3rl.errors import SandboxError
from k3rl.sandboxes.base import (
    MIB,
    Capability,
    ExecRequest,
    ExecResult,
    SandboxLimits,
    SandboxSpec,
    run,
)
from k3rl.sandboxes.local import Box, LocalBackend, in_thread

NO_FILES: Mapping[str, bytes] = {}
BASE_EXIT = 7
NUM_FORKS = 24
SPAWN = f"""
i=0
while [ $i -lt {NUM_FORKS} ]; do sleep 3 & i=$((i+1)); done
echo all
"""
RLIMITS = """
head -c 1000 /dev/zero > small; head -c 131072 /dev/zero > big
echo file $(wc -c < small) $(wc -c < big)
dd if=/dev/zero of=/dev/null bs=1M count=1; echo fits $?
dd if=/dev/zero of=/dev/null bs=256M count=1; echo exceeds $?
grep '^Max cpu time' /proc/self/limits
"""
DAEMON = """
setsid sh -c 'i=0; while [ $i -lt 50 ]; do echo x >> beat; sleep 0.02; i=$((i+1)); done' \
    </dev/null >/dev/null 2>&1 &
while ! test -s beat; do sleep 0.01; done
"""
BEAT_S = 0.1
PROBE_DEADLINE_S = 20.0
BOMB_DEADLINE_S = 2.0
"""Some shells go on retrying a refused fork for a long time."""


class Prober:
    """Runs the probes of one backend in throw-away sandboxes."""

    def __init__(self, backend: LocalBackend) -> None:
        """Opens sandboxes of `backend` without its checks."""
        self.backend = backend

    async def check_base(self) -> None:
        """Raises SandboxError when no command runs at all."""
        result = await self._run(f"exit {BASE_EXIT}")
        if result.exit_code != BASE_EXIT:
            text = result.stderr.decode(errors="replace").strip()
            raise SandboxError(f"a probe command went wrong: {text or result.exit_code}")

    async def run(self) -> frozenset[Capability]:
        """Every capability whose probe came out right."""
        probes = (
            self._isolated_files(),
            self._no_network(),
            self._process_limit(),
            self._rlimits(),
            self._kills_descendants(),
            self._snapshot(),
        )
        found = await asyncio.gather(*probes)
        return frozenset[Capability]().union(*found)

    async def _run(
        self,
        script: str,
        limits: SandboxLimits | None = None,
        deadline_s: float = PROBE_DEADLINE_S,
    ) -> ExecResult:
        box = await self._box(limits, NO_FILES)
        try:
            return await self._sh(box, script, deadline_s)
        finally:
            await self.backend.close(box.id)

    async def _box(self, limits: SandboxLimits | None, files: Mapping[str, bytes]) -> Box:
        spec = SandboxSpec(limits=limits or SandboxLimits(), executables=(), required=())
        return await self.backend.open_box(spec, files)

    async def _sh(self, box: Box, script: str, deadline_s: float = PROBE_DEADLINE_S) -> ExecResult:
        request = ExecRequest(("sh", "-c", script), deadline_s=deadline_s)
        return await run(self.backend, box.id, request)

    async def _isolated_files(self) -> set[Capability]:
        canary = self.backend.scratch.owner / "canary"
        await in_thread(canary.write_text, "seen")
        canary.chmod(0o644)
        result = await self._run(f"test -e /usr/bin/env && ! test -e '{canary}' && echo hidden")
        return {Capability.ISOLATED_FILES} if result.stdout == b"hidden\n" else set()

    async def _no_network(self) -> set[Capability]:
        result = await self._run("readlink /proc/self/ns/net; cat /proc/self/net/dev")
        namespace, *lines = result.stdout.decode(errors="replace").splitlines() or [""]
        interfaces = [line.split(":")[0].strip() for line in lines if ":" in line]
        is_own = namespace.startswith("net:") and namespace != os.readlink("/proc/self/ns/net")
        return {Capability.NO_NETWORK} if is_own and interfaces == ["lo"] else set()

    async def _process_limit(self) -> set[Capability]:
        low = SandboxLimits(max_processes=NUM_FORKS // 3)
        high = SandboxLimits(max_processes=NUM_FORKS * 2)
        runs = (self._run(SPAWN, low, BOMB_DEADLINE_S), self._run(SPAWN, high))
        bomb, control = await asyncio.gather(*runs)
        bites = control.stdout == b"all\n" and bomb.stdout == b"" and b"fork" in bomb.stderr
        return {Capability.PROCESS_LIMIT} if bites else set()

    async def _rlimits(self) -> set[Capability]:
        limits = replace(
            SandboxLimits(), max_file_bytes=65536, address_space_bytes=64 * MIB, cpu_s=7
        )
        result = await self._run(RLIMITS, limits)
        answers = [line.split() for line in result.stdout.decode(errors="replace").splitlines()]
        found = set()
        if ["file", "1000", "65536"] in answers:
            found.add(Capability.FILE_SIZE_LIMIT)
        if ["fits", "0"] in answers and ["exceeds", "1"] in answers:
            found.add(Capability.MEMORY_LIMIT)
        if ["Max", "cpu", "time", "7", "7", "seconds"] in answers:
            found.add(Capability.CPU_TIME_LIMIT)
        return found

    async def _kills_descendants(self) -> set[Capability]:
        box = await self._box(None, NO_FILES)
        try:
            await self._sh(box, DAEMON)
            return {Capability.KILLS_DESCENDANTS} if await self._is_still(box) else set()
        finally:
            await self.backend.close(box.id)

    async def _is_still(self, box: Box) -> bool:
        """Whether the daemon, which has written once, writes no more."""
        try:
            first = await self.backend.get(box.id, "beat")
            await asyncio.sleep(BEAT_S)
            return bool(first) and await self.backend.get(box.id, "beat") == first
        except SandboxError:
            return False  # It grew between the look at its size and the reading.

    async def _snapshot(self) -> set[Capability]:
        box = await self._box(None, {"d/old": b"old"})
        try:
            await self._sh(box, "rm -r d && mkdir d && echo new > d/new")
            change = await in_thread(box.workspace.change)
            if change is None:
                return set()
            await in_thread(box.workspace.seal, change)
            listing = (await self._sh(box, "ls d")).stdout
            is_right = set(box.workspace.stack.tree) == {"", "d", "d/new"} and listing == b"new\n"
            return {Capability.SNAPSHOT, Capability.FORK} if is_right else set()
        finally:
            await self.backend.close(box.id)
