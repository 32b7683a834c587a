"""Backends for the tests that every one of them must pass, a Docker daemon, a Ray cluster."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.sandboxes.sandbox_helpers import HOSTS, Hosts, started

CONFINING_KINDS = ("bwrap", "docker", "landlock", pytest.param("remote", marks=pytest.mark.ray))
KINDS = (*CONFINING_KINDS, "process")
SCRIPT = Path(__file__).parents[2] / "sandboxes" / "docker_test_engine.sh"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder under /tmp that every user can use, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="k3rl-test-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """The address of a private daemon, which DOCKER_HOST names from now on."""
    if shutil.which("dockerd") is None:
        pytest.skip("dockerd is not installed")
    if os.geteuid() != 0:
        pytest.skip("dockerd needs root")
    folder = Path(tempfile.mkdtemp(prefix="k3rl-docker-", dir="/tmp"))
    folder.chmod(0o711)  # the socket's own mode is what keeps others out
    try:
        started = subprocess.run(
            [SCRIPT, "start", folder], capture_output=True, text=True, timeout=60
        )
        if started.returncode != 0:
            pytest.skip(f"no Docker daemon can be started here: {started.stderr.strip()}")
        address = started.stdout.strip().removeprefix("export DOCKER_HOST=")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", address)
            yield address
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True, timeout=60)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sandbox_hosts() -> Iterator[None]:
    """A private Ray cluster with the actor `HOSTS`."""
    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
    )
    try:
        hosts = ray.remote(Hosts).options(name=HOSTS, max_concurrency=1000).remote()
        yield
        del hosts
    finally:
        ray.shutdown()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of backend, with the daemon that it needs running."""
    return started(request.param, request)


@pytest.fixture(params=CONFINING_KINDS)
def confining(request: pytest.FixtureRequest) -> str:
    """One that confines."""
    return started(request.param, request)


@pytest.fixture(params=[kind for kind in KINDS if kind != "bwrap"])
def other(request: pytest.FixtureRequest) -> str:
    """One that is not the default."""
    return started(request.param, request)
