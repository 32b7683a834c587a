"""What is the Docker backend's own: its confinement, its leases, and a daemon that is not there."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from k3rl.errors import CapabilityMissing, SandboxError
from k3rl.sandboxes.backends.docker_engine import OWNER_LABEL
from k3rl.sandboxes.processes.orphans import is_gone
from k3rl.sandboxes.spec import MIB, SandboxLimits, SandboxSpec
from tests.sandboxes.sandbox_helpers import ANY, daemon_group, play, sh

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "sandboxes" / "docker_test_engine.sh"
pytestmark = [pytest.mark.sandbox]


def containers(**filters: str) -> list[dict]:
    """What the daemon knows of our containers, dead ones too."""
    from docker.api.client import APIClient

    api = APIClient(base_url=os.environ["DOCKER_HOST"])
    try:
        return api.containers(all=True, filters={"label": OWNER_LABEL} | filters)
    finally:
        api.close()


@pytest.mark.usefixtures("docker_engine")
def test_one_container_runs_all_commands_and_sees_what_is_put(tmp_path):
    async def body(backend):
        box = await backend.create(ANY, {"a": b"1"})
        await sh(backend, box, "true")
        pid = backend._box(box).live.pid
        await backend.put(box, "b", b"2")
        await backend.snapshot(box, {})
        await backend.fork(box, 1)
        assert (await sh(backend, box, "cat a b")).stdout == b"12"
        assert backend._box(box).live.pid == pid
        assert len(containers()) == 1

    play("docker", tmp_path, body)


@pytest.mark.usefixtures("docker_engine")
def test_closing_removes_the_containers(tmp_path):
    async def body(backend):
        boxes = [await backend.create(ANY) for _ in range(3)]
        await asyncio.gather(*(sh(backend, box, "true") for box in boxes))
        found = containers(label=f"{OWNER_LABEL}={backend.scratch.owner.name}")
        assert len([row for row in found if row["State"] == "running"]) == 3

    play("docker", tmp_path, body)
    assert containers() == []


@pytest.mark.usefixtures("docker_engine")
def test_a_container_that_cannot_start_says_why(tmp_path):
    too_small = replace(ANY, limits=SandboxLimits(address_space_bytes=2 * MIB))
    too_few = replace(ANY, limits=SandboxLimits(total_memory_bytes=1))

    async def body(backend):
        for spec, said in (
            (too_small, "the container's agent ended at once: ."),
            (too_few, "Docker cannot create a container: .*memory"),
        ):
            box = await backend.create(spec)
            with pytest.raises(SandboxError, match=said) as caught:
                await sh(backend, box, "true")
            assert "\n" not in str(caught.value)

    play("docker", tmp_path, body)
    assert containers() == []


@pytest.mark.usefixtures("docker_engine")
def test_an_image_that_was_pruned_is_made_again(tmp_path):
    async def body(backend):
        box = await backend.create(ANY)
        engine = backend._engine
        engine.api.remove_image(engine.image, force=True)
        assert (await sh(backend, box, "echo here")).stdout == b"here\n"

    play("docker", tmp_path, body)


KILLED = """
import asyncio, sys
from pathlib import Path
from k3rl.blobs import BlobStore
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.spec import SandboxSpec
from k3rl.sandboxes.factory import open_backend
async def main():
    folder = Path(sys.argv[1])
    backend = open_backend("docker", BlobStore(folder / "blobs"), folder / "scratch")
    box = await backend.create(SandboxSpec(required=()))
    async for event in backend.exec(box, ExecRequest(
        ("sh", "-c", "echo up; setsid sleep 60 & sleep 60"), deadline_s=60)):
        print(backend._box(box).live.pid, flush=True)
asyncio.run(main())
"""


@pytest.mark.usefixtures("docker_engine")
def test_what_a_killed_owner_leaves_is_dead_and_then_removed(tmp_path):
    argv = [sys.executable, "-c", KILLED, str(tmp_path)]
    owner = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE)
    init = os.pidfd_open(int(owner.stdout.readline()))

    async def body(backend):
        await backend.capabilities()  # a living owner's containers are left alone

    async def opened_later(backend):
        await backend.capabilities()

    try:
        play("docker", tmp_path, body)
        assert [row["State"] for row in containers()] == ["running"]
        owner.kill()
        owner.wait()
        assert is_gone(init, 5)  # without its owner the agent ends, and with it all the rest
        assert len(containers()) == 1
        play("docker", tmp_path, opened_later)
        assert containers() == []
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        os.close(init)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("unix:///nowhere/docker.sock", "no Docker daemon at unix:///nowhere/docker.sock: .*start"),
        ("tcp://127.0.0.1:1", "no Docker daemon at tcp://127.0.0.1:1: .*start dockerd"),
    ],
)
def test_without_a_daemon_the_error_says_what_to_do(address, said, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", address)

    async def body(backend):
        with pytest.raises(CapabilityMissing, match=said) as caught:
            await backend.create(SandboxSpec())
        assert "\n" not in str(caught.value)

    play("docker", tmp_path, body)


def test_a_daemon_that_goes_away_is_named(docker_engine, tmp_path, monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="k3rl-docker-", dir="/tmp"))
    try:
        subprocess.run([SCRIPT, "start", folder], check=True, capture_output=True, timeout=60)
        address = f"unix://{folder}/docker.sock"
        monkeypatch.setenv("DOCKER_HOST", address)

        async def body(backend):
            box = await backend.create(ANY, {"a": b"1"})
            await sh(backend, box, "true")
            await asyncio.to_thread(subprocess.run, [SCRIPT, "stop", folder], check=True)
            with pytest.raises(SandboxError, match=f"no daemon answers at {address}") as caught:
                await sh(backend, box, "true")
            assert "\n" not in str(caught.value)
            assert await backend.get(box, "a") == b"1"

        play("docker", tmp_path, body)
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True, timeout=60)
        shutil.rmtree(folder)
    assert os.environ["DOCKER_HOST"] != docker_engine


def test_the_engine_script_refuses_without_a_daemon_program(tmp_path):
    for name in ("bash", "mkdir", "dirname", "realpath", "id"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [shutil.which("bash"), SCRIPT, "start", tmp_path / "engine"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "docker_test_engine: dockerd is not installed: apt-get install docker.io\n"
    )


ORDINARY = """
import asyncio, concurrent.futures.thread, json, os, sys
from pathlib import Path
import docker, docker.utils, docker.types
from docker.api.client import APIClient
from k3rl.blobs import BlobStore
from k3rl.errors import K3rlError
from k3rl.sandboxes import factory
from k3rl.sandboxes.base import ExecRequest, run
from k3rl.sandboxes.spec import SandboxSpec
# What it imports late must be there before the user becomes one who may not read it.
APIClient(base_url=os.environ["DOCKER_HOST"]).close()
folder, groups = Path(sys.argv[1]), json.loads(sys.argv[2])
os.setgroups(groups); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
async def main():
    backend = factory.open_backend("docker", BlobStore(folder / "blobs"), folder / "scratch")
    try:
        box = await backend.create(SandboxSpec(), {"a": b"1"})
        script = "cat a; id -u; touch made; stat -c %u made"
        print((await run(backend, box, ExecRequest(("sh", "-c", script)))).stdout.decode())
        print(await backend.tree_digest(box) == (await backend.snapshot(box, {})).tree_digest)
    except K3rlError as error:
        print(type(error).__name__, error)
    finally:
        await backend.aclose()
asyncio.run(main())
"""


def as_ordinary_user(folder: Path, groups: list[int]) -> list[str]:
    """What the script prints, by words, run as somebody who is in these groups."""
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY, str(folder), json.dumps(groups)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_ordinary_user_in_the_daemons_group_gets_sandboxes(docker_engine, open_folder):
    group = daemon_group(docker_engine.removeprefix("unix://"))
    assert as_ordinary_user(open_folder, [group]) == ["154321", "54321", "True"]


def test_an_ordinary_user_who_may_not_use_the_daemon_is_told_so(docker_engine, open_folder):
    said = " ".join(as_ordinary_user(open_folder, []))
    assert said == (
        f"CapabilityMissing no Docker daemon at {docker_engine}: permission denied: join the group "
        "that owns the socket, or set DOCKER_HOST"
    )
