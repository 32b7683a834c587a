"""Sandboxes of an image that the spec names, built by our Dockerfile over a base made here."""

import io
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from k3rl.errors import CapabilityMissing
from k3rl.sandboxes.spec import Capability, SandboxSpec
from tests.sandboxes.sandbox_helpers import ANY, play, sh

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "sandboxes" / "Dockerfile"
BASE, IMAGE = "k3rl-test-base:1", "k3rl-test-tools:1"
PROGRAMS = ("sh", "bash", "cat", "ls", "id", "rm", "mkdir", "prlimit", "python3")
LEFT_OUT = ("dist-packages", "test", "idlelib", "ensurepip", "lib2to3", "__pycache__")
OWN = b"#!/bin/sh\necho only inside\n"


def base_tar() -> bytes:
    """A small system: some programs of the host, the libraries they load, and a tool of its own."""
    paths = [Path("/usr/bin", name).resolve() for name in PROGRAMS]
    library = Path("/usr/lib", paths[-1].name)
    loaded = [*paths, *library.glob("lib-dynload/*.so")]
    listed = subprocess.run(["ldd", *loaded], capture_output=True, text=True, check=True).stdout
    words = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", dereference=False) as tar:
        for folder in ("bin", "lib", "lib64"):
            info = tarfile.TarInfo(folder)
            info.type, info.linkname = tarfile.SYMTYPE, f"usr/{folder}"
            tar.addfile(info)
        for name, path in zip(PROGRAMS, paths, strict=True):
            tar.add(path, f"usr/bin/{name}")
        for word in sorted(words):
            tar.add(Path(word).resolve(), f"usr{word.removeprefix('/usr')}")
        tar.add(library, str(library)[1:], filter=lambda info: None if _is_left_out(info) else info)
        info = tarfile.TarInfo("opt/own/own-tool")
        info.size, info.mode = len(OWN), 0o755
        tar.addfile(info, io.BytesIO(OWN))
    return target.getvalue()


def _is_left_out(info: tarfile.TarInfo) -> bool:
    return Path(info.name).name in LEFT_OUT or info.name.endswith(".a")


@pytest.fixture(scope="module")
def image(docker_engine):
    from docker.api.client import APIClient

    api = APIClient(base_url=docker_engine, timeout=120)
    try:
        api.import_image_from_data(base_tar(), repository=BASE.split(":")[0], tag="1")
        args = {"BASE": BASE}
        with DOCKERFILE.open("rb") as file:
            said = list(api.build(fileobj=file, tag=IMAGE, buildargs=args, network_mode="none",
                                  rm=True, decode=True))  # fmt: skip
        assert "Successfully tagged" in str(said[-1]), said
        text = f'FROM {IMAGE}\nENV PATH=/opt/own:/usr/bin GREETING=hello\nENTRYPOINT ["false"]\n'
        list(api.build(fileobj=io.BytesIO(text.encode()), tag=IMAGE, rm=True, decode=True))
        volume = f"FROM {IMAGE}\nVOLUME /data\n"
        list(api.build(fileobj=io.BytesIO(volume.encode()), tag="k3rl-test-volume:1", decode=True))
        yield IMAGE
    finally:
        api.close()


def test_a_sandbox_has_the_programs_and_environment_of_its_image_alone(image, tmp_path):
    async def body(backend):
        spec = SandboxSpec(executables=("own-tool", "python3"), image=image)
        box = await backend.create(spec, {"a": b"1"})
        done = await sh(backend, box, "own-tool; echo $GREETING; cat a; touch b 2>&1 || echo > b")
        assert done.stdout.startswith(b"only inside\nhello\n1")
        assert (await sh(backend, box, "echo x > /usr/bin/new")).exit_code != 0
        assert (await sh(backend, box, "cat /proc/self/status")).stdout.count(
            b"NoNewPrivs:\t1"
        ) == 1
        assert (await sh(backend, box, "command -v grep")).exit_code != 0
        here = await backend.create(ANY)
        assert (await sh(backend, here, "command -v grep")).exit_code == 0
        assert (await sh(backend, here, "own-tool")).exit_code == 127

    play("docker", tmp_path, body)


def test_snapshots_move_between_images_and_forks_keep_theirs(image, tmp_path):
    async def body(backend):
        spec = replace(ANY, image=image)
        box = await backend.create(spec)
        await sh(backend, box, "own-tool > said")
        (twin,) = await backend.fork(box, 1)
        assert (await sh(backend, twin, "own-tool; cat said")).stdout == b"only inside\n" * 2
        snapshot = await backend.snapshot(box, {})
        other = await backend.restore(ANY, snapshot)
        assert (await sh(backend, other, "cat said; own-tool")).stdout == b"only inside\n"

    play("docker", tmp_path, body)


def test_an_image_or_program_that_is_missing_is_named(image, tmp_path):
    async def body(backend):
        for spec, said in (
            (SandboxSpec(image="k3rl-test-none:1"), "no image 'k3rl-test-none:1': docker pull"),
            (SandboxSpec(image="k3rl-test-volume:1"), "'k3rl-test-volume:1' declares volumes"),
            (SandboxSpec(image=image, executables=("sh", "grep")), "sandboxes: grep$"),
        ):
            with pytest.raises(CapabilityMissing, match=said):
                await backend.create(spec)

    play("docker", tmp_path, body)


def test_a_tag_that_moves_on_changes_nothing_for_a_backend(image, docker_engine, tmp_path):
    from docker.api.client import APIClient

    api = APIClient(base_url=docker_engine)

    async def body(backend):
        api.tag(image, "k3rl-test-moving", "1")
        spec = replace(ANY, image="k3rl-test-moving:1")
        box = await backend.create(spec)
        await sh(backend, box, "true")
        api.tag(BASE, "k3rl-test-moving", "1")
        assert (await sh(backend, await backend.create(spec), "own-tool")).exit_code == 0

    try:
        play("docker", tmp_path, body)
    finally:
        api.close()


@pytest.mark.parametrize("kind", ["bwrap", "process"])
def test_a_backend_without_images_refuses_them_by_name(kind, tmp_path):
    async def body(backend):
        assert Capability.IMAGES not in await backend.capabilities()
        with pytest.raises(CapabilityMissing, match="cannot enforce images here"):
            await backend.create(replace(ANY, image="k3rl-tools"))

    play(kind, tmp_path, body)


@pytest.mark.parametrize("each", [Capability.EGRESS_ALLOW_LIST, Capability.PROCESS_MEMORY])
def test_what_no_backend_has_is_refused_by_name(each, tmp_path):
    async def body(backend):
        with pytest.raises(CapabilityMissing, match=f"cannot enforce {each} here"):
            await backend.create(SandboxSpec(required=(each,)))

    play("bwrap", tmp_path, body)
