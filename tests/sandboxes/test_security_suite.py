"""The security suite on every backend, as root and as an ordinary user; and that it can fail."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3rl.sandboxes import disk
from k3rl.sandboxes.backends import bwrap
from k3rl.sandboxes.conformance.check import BAD, Check, Verdict, examine
from k3rl.sandboxes.conformance.ground import Untried
from k3rl.sandboxes.conformance.suite import CHECKS
from k3rl.sandboxes.processes.limits import limited
from k3rl.sandboxes.spec import Capability, SandboxLimits
from tests.sandboxes.sandbox_helpers import daemon_group, play, reachable_bwrap, started

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.sandbox]


def asked(*capabilities):
    """The names of the checks that need one of these."""
    return {check.name for check in CHECKS if check.needs in capabilities}


def named(findings, verdict):
    return {name for name, found, _ in findings if found == verdict}


def bad(findings):
    return [row for row in findings if row[1] in BAD]


def examined(kind, folder, checks=CHECKS, change=lambda backend: None):
    """(name, verdict, detail) of each check on a backend."""

    async def body(backend):
        change(backend)
        found = await examine(backend, checks)
        rows.extend((each.name, each.verdict, each.detail) for each in found)

    rows = []
    play(kind, folder, body)
    return rows


def test_there_are_enough_checks_each_with_a_name_of_its_own():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) >= 45
    assert len([check for check in CHECKS if check.needs is not None]) >= 45
    assert max(map(len, names)) <= 48  # the table has 80 columns


WITHOUT_NAMESPACES = (Capability.ISOLATED_PROCESSES, Capability.PRIVATE_TMP)


def test_a_confining_backend_holds_every_check(confining, tmp_path):
    """What differs: Landlock has no namespaces, and a remote backend no second one like it."""
    findings = examined(confining, tmp_path)
    assert bad(findings) == []
    unclaimed = asked(*WITHOUT_NAMESPACES) if confining == "landlock" else set()
    unclaimed |= asked(Capability.TOTAL_MEMORY_LIMIT)  # where no control group can be made
    assert named(findings, Verdict.NOT_CLAIMED) <= unclaimed
    untried = {"full disk"} if os.geteuid() != 0 else set()
    untried |= (
        {"full disk", "dead owner", "unusable scratch folder"} if confining == "remote" else set()
    )
    assert named(findings, Verdict.UNTRIED) == untried


def test_the_unconfined_backend_holds_what_it_claims_and_nothing_else_is_passed(tmp_path):
    findings = examined("process", tmp_path)
    assert bad(findings) == []
    claimed = {Capability.MEMORY_LIMIT, Capability.CPU_TIME_LIMIT, Capability.FILE_SIZE_LIMIT}
    claimed |= {Capability.SNAPSHOT, Capability.FORK, None}
    assert named(findings, Verdict.NOT_CLAIMED) == asked(*set(Capability) - claimed)


AS_ORDINARY_USER = """
import asyncio, concurrent.futures.thread, json, os, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.backends.bwrap import BwrapBackend
from k3rl.sandboxes.conformance.check import examine
from k3rl.sandboxes.conformance.suite import CHECKS
from k3rl.sandboxes.factory import open_backend
folder, program, groups = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
if sys.argv[4] == "docker":
    # What it imports late must be there before the user becomes one who may not read it.
    import docker.types, docker.utils
    from docker.api.client import APIClient
    APIClient(base_url=os.environ["DOCKER_HOST"]).close()
os.setgroups(groups); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
async def main():
    blobs, scratch = BlobStore(folder / "blobs"), folder / "scratch"
    if sys.argv[4] == "bwrap":
        backend = BwrapBackend(blobs, scratch, program)
    else:
        backend = open_backend(sys.argv[4], blobs, scratch)
    try:
        found = await examine(backend, CHECKS)
    finally:
        await backend.aclose()
    print(json.dumps([(each.name, each.verdict, each.detail) for each in found]))
asyncio.run(main())
"""
INTERRUPTED = pytest.param(
    "landlock",
    marks=pytest.mark.xfail(reason="a fork that its filter asks about can fail with EINTR"),
)
UNREADABLE = {"dead owner"}
"""Needs a program of k3rl's own, which that user may not read here."""


@pytest.mark.skipif(os.geteuid() != 0, reason="then the suite above has run as an ordinary user")
@pytest.mark.parametrize(
    "kind", ["bwrap", INTERRUPTED, pytest.param("docker", marks=pytest.mark.slow)]
)
def test_it_holds_for_an_ordinary_user_too(kind, request, open_folder):
    """What differs: no control groups of one's own, and no small file system to fill."""
    started(kind, request)
    groups = []
    if kind == "docker":
        groups = [daemon_group(os.environ["DOCKER_HOST"].removeprefix("unix://"))]
    argv = [AS_ORDINARY_USER, open_folder, reachable_bwrap(open_folder), json.dumps(groups), kind]
    done = subprocess.run(
        [sys.executable, "-c", *map(str, argv)], cwd=REPOSITORY, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    findings = json.loads(done.stdout)
    assert bad(findings) == []
    unclaimed = named(findings, Verdict.NOT_CLAIMED)
    groups = {"bwrap": (), "landlock": WITHOUT_NAMESPACES}
    if kind in groups:
        assert unclaimed == asked(Capability.TOTAL_MEMORY_LIMIT, *groups[kind])
    else:
        assert unclaimed == set()  # the daemon makes control groups
    assert named(findings, Verdict.UNTRIED) == {"full disk"} | UNREADABLE


# That it can fail.


def weakened(kind, folder, names, change=lambda backend: None):
    """The verdicts of some checks on a backend that claims everything all the same."""

    def claim(backend):
        backend._capabilities = frozenset(Capability)
        change(backend)

    checks = [check for check in CHECKS if check.name in names]
    assert len(checks) == len(names)
    return {name: verdict for name, verdict, _ in examined(kind, folder, checks, claim)}


def all_breached(names):
    return dict.fromkeys(names, Verdict.BREACHED)


def test_a_network_is_seen(tmp_path, monkeypatch):
    options = [word for word in bwrap.NAMESPACE_OPTIONS if word != "--unshare-net"]
    monkeypatch.setattr(bwrap, "NAMESPACE_OPTIONS", options)
    names = {"tcp4 server of the host", "udp4 server of the host", "interfaces and routes"}
    names |= {"abstract unix socket of the host"}
    assert weakened("bwrap", tmp_path, names) == all_breached(names)


def test_a_missing_filter_is_seen(tmp_path):
    def unfiltered(backend):
        backend._program = None

    names = {"keyrings", "rarely used system calls"}
    assert weakened("bwrap", tmp_path, names, unfiltered) == all_breached(names)


def test_a_folder_of_the_host_is_seen(tmp_path):
    def open_up(backend):
        backend._base += ["--ro-bind", "/var", "/var"]

    names = {"files of the host"}
    assert weakened("bwrap", tmp_path, names, open_up) == all_breached(names)


def test_missing_limits_are_seen(tmp_path, monkeypatch):
    loose = SandboxLimits(1000, 1000, 1 << 50, 1 << 46)
    monkeypatch.setattr(
        bwrap, "limited", lambda limits, *rest, **named: limited(loose, *rest, **named)
    )
    monkeypatch.setattr(disk, "LOOK_S", 3600.0)

    def without_groups(backend):
        backend._cgroups = None

    names = {"fork bomb", "open files", "sparse file of 100 GB", "memory of one process"}
    names |= {"disk filled by files"}
    assert weakened("bwrap", tmp_path, names, without_groups) == all_breached(names)


def test_processes_of_the_host_and_what_outlives_a_command_are_seen(tmp_path):
    names = {"secrets of the host's processes", "signals to the host", "environment"}
    names |= {"setsid daemon, after the end", "left in /tmp and /dev/shm", "host name"}
    expected = all_breached(names) | {"environment": Verdict.HELD}
    try:
        assert weakened("process", tmp_path, names) == expected
    finally:
        for folder in (Path("/tmp"), Path("/dev/shm")):
            for left in folder.glob("k3rl-token-*"):
                shutil.rmtree(left)


async def nothing(ground):
    return ""


async def something(ground):
    return "it got through"


async def untried(ground):
    raise Untried("no means")


async def wrong(ground):
    raise KeyError("a slip of the suite")


def test_verdicts(tmp_path):
    checks = [
        Check("held", None, nothing, something),
        Check("breached", None, something, something),
        Check("blind", None, nothing, nothing),
        Check("untried", None, nothing, untried),
        Check("failed", None, wrong, something),
        Check("failed control", None, nothing, wrong),
        Check("not claimed", Capability.NO_NETWORK, nothing, something),
        Check("alone", None, nothing, something, is_alone=True),
    ]
    findings = examined("process", tmp_path, checks)
    assert findings == [
        ("held", Verdict.HELD, "it got through"),
        ("breached", Verdict.BREACHED, "it got through"),
        ("blind", Verdict.BLIND, "the control was contained too"),
        ("untried", Verdict.UNTRIED, "no means"),
        ("failed", Verdict.FAILED, "KeyError: 'a slip of the suite'"),
        ("failed control", Verdict.FAILED, "KeyError: 'a slip of the suite'"),
        ("not claimed", Verdict.NOT_CLAIMED, ""),
        ("alone", Verdict.HELD, "it got through"),
    ]
