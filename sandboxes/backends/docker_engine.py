"""A Docker daemon and the containers of one owner in it.

A container carries the name of its owner's scratch folder as a label. That is its lease: whoever
opens an engine removes the containers of owners that are dead.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3rl.errors import CapabilityMissing, SandboxError
from k3rl.sandboxes.backends.docker_image import REPOSITORY, Image, image_tag
from k3rl.sandboxes.files.trees import Identity
from k3rl.sandboxes.processes.orphans import DEATH_WAIT_S, is_gone
from k3rl.sandboxes.scratch import is_dead_owner

if TYPE_CHECKING:
    from docker.api.client import APIClient

OWNER_LABEL = "k3rl.sandbox.owner"
CONTROL = "control"
CONTROL_MOUNT = "/.k3rl-control"
TIMEOUT_S = 120.0
"""How long the daemon may take to answer a request."""
START_WAIT_S = 30.0
"""How long a started container's agent may take to connect."""
LOOK_S = 0.5
REMOVERS = 4
"""Threads that remove dead containers."""
GONE_STATUS = (404, 409)
"""No such container, or somebody else is removing it."""


class Engine:
    """A connection to the daemon that DOCKER_HOST names, or to the system's own."""

    def __init__(self, owner: str, tar: bytes) -> None:
        """Imports the image `tar` unless it is there, and removes what dead owners left. Blocks.

        Raises CapabilityMissing when no daemon answers or it refuses us.
        """
        self.owner, self._tar = owner, tar
        self.image = f"{REPOSITORY}:{image_tag(tar)}"
        self.api = _connect()
        self._removers = ThreadPoolExecutor(REMOVERS, "k3rl-docker")
        try:
            with errors("cannot be used"):
                self.ensure_image()
                self._reap(is_dead_owner)
        except BaseException:
            self.api.close()
            raise

    def ensure_image(self) -> None:
        """Import the image when the daemon lacks it."""
        from docker.errors import ImageNotFound

        try:
            self.api.inspect_image(self.image)
        except ImageNotFound:
            repository, _, tag = self.image.partition(":")
            self.api.import_image_from_data(self._tar, repository=repository, tag=tag)
            self.api.inspect_image(self.image)

    def look_up(self, name: str) -> Image:
        """An image of somebody else's making. Raises CapabilityMissing without it. Blocks."""
        from docker.errors import ImageNotFound

        with errors("cannot look at an image"):
            try:
                found = self.api.inspect_image(name)
            except ImageNotFound:
                remedy = f"docker pull {name}, or build it from sandboxes/Dockerfile"
                raise CapabilityMissing(f"Docker has no image {name!r}: {remedy}") from None
        if found["Config"].get("Volumes"):
            raise CapabilityMissing(
                f"Docker image {name!r} declares volumes, which nothing limits: build it without"
            )
        words = found["Config"].get("Env") or ()
        return Image(found["Id"], dict(word.split("=", 1) for word in words))

    def create(self, image: str, command: Sequence[str], **options: Any) -> str:
        """Create a container of ours and return its id."""
        from docker.errors import ImageNotFound

        with errors("cannot create a container"):
            try:
                return self._create(image, command, options)
            except ImageNotFound:  # somebody pruned it
                if image != self.image:
                    raise
                self.ensure_image()
                return self._create(image, command, options)

    def _create(self, image: str, command: Sequence[str], options: dict[str, Any]) -> str:
        labels = {OWNER_LABEL: self.owner}
        made = self.api.create_container(image, list(command), labels=labels, **options)
        return str(made["Id"])

    def discard(self, container: str) -> None:
        """Remove a container soon, in another thread; `close` waits for that."""
        self._removers.submit(self._remove, container)

    def _remove(self, container: str) -> None:
        from docker.errors import APIError

        try:
            with errors("cannot remove a container"):
                self.api.remove_container(container, v=True, force=True)
        except SandboxError as error:
            cause = error.__cause__
            if not (isinstance(cause, APIError) and cause.status_code in GONE_STATUS):
                raise

    def reap(self) -> None:
        """Remove the containers of dead owners. Blocks."""
        with errors("cannot list containers"):
            self._reap(is_dead_owner)

    def _reap(self, is_due: Callable[[str], bool]) -> list[SandboxError]:
        """Remove the containers of the owners that are due; returns what went wrong."""
        failures = []
        for container in self.api.containers(all=True, filters={"label": OWNER_LABEL}):
            if is_due(container["Labels"][OWNER_LABEL]):
                try:
                    self._remove(container["Id"])
                except SandboxError as error:
                    failures.append(error)
        return failures

    def close(self) -> None:
        """Wait until every container of the owner is removed. Blocks.

        Raises SandboxError for one that cannot be; the next opening tries again.
        """
        self._removers.shutdown()
        try:
            with errors("cannot list containers"):
                failures = self._reap(self.owner.__eq__)
        finally:
            self.api.close()
        if failures:
            raise failures[0]


class Container:
    """One container whose first process is an agent: the `Keeper` of a live sandbox."""

    def __init__(self, engine: Engine) -> None:
        """Nothing is started yet."""
        self.exit_fds: list[int] = []
        self.pid = -1
        self._engine = engine
        self._id = ""
        self._control: socket.socket | None = None

    def start(
        self,
        folder: Path,
        identity: Identity | None,
        image: str,
        command: Sequence[str],
        **options: Any,
    ) -> socket.socket:
        """Create and start it, and return the agent's connection. Blocks.

        `folder` is an empty one of the host, which the container sees at `CONTROL_MOUNT`. Raises
        SandboxError; `destroy` is due then all the same.
        """
        with _listening(folder, identity) as listener:
            self._id = self._engine.create(image, command, **options)
            with errors("cannot start a container"):
                self._engine.api.start(self._id)
            self._control = self._accept(listener)
        self._watch(self._control)
        return self._control

    def _accept(self, listener: socket.socket) -> socket.socket:
        limit = time.monotonic() + START_WAIT_S
        listener.settimeout(LOOK_S)
        while True:
            with suppress(TimeoutError):
                return listener.accept()[0]
            with errors("cannot look at a container"):
                state = self._engine.api.inspect_container(self._id)["State"]
                if not state["Running"]:
                    said = self._engine.api.logs(self._id, tail=1).decode(errors="replace").strip()
                    reason = said or state["Error"] or f"exit code {state['ExitCode']}"
                    raise SandboxError(f"the container's agent ended at once: {reason}")
            if time.monotonic() > limit:
                raise SandboxError(f"the container's agent said nothing within {START_WAIT_S} s")

    def _watch(self, control: socket.socket) -> None:
        data = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid = struct.unpack("3i", data)[0]
        if self.pid <= 0:
            raise CapabilityMissing(
                "the containers' processes are invisible from here: run k3rl where dockerd runs"
            )
        try:
            self.exit_fds = [os.pidfd_open(self.pid)]
            # While it is connected the number is its own.
            signal.pidfd_send_signal(self.exit_fds[0], 0)
            if control.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
                raise SandboxError("the container's agent died at once")
        except BlockingIOError:
            pass
        except OSError as error:
            raise SandboxError(f"the container's agent cannot be watched: {error}") from error

    def kill(self) -> None:
        """Kill the first process and with it all others."""
        for handle in self.exit_fds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def destroy(self) -> None:
        """Waits for the processes, not for the daemon to take note of it."""
        self.kill()
        if self._control is not None:
            self._control.close()
        while self.exit_fds:
            handle = self.exit_fds.pop()
            is_gone(handle, DEATH_WAIT_S)
            os.close(handle)
        if self._id:
            self._engine.discard(self._id)
            self._id = ""

    def complaint(self) -> str:
        """Only the daemon would know more."""
        return "its container was killed"


@contextmanager
def errors(what: str) -> Iterator[None]:
    """Turn what the SDK raises into a SandboxError of one line: "Docker <what>: ..."."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        reason = error.explanation or error.response.reason
        raise SandboxError(f"Docker {what}: {_line(reason)}") from error
    except (DockerException, RequestException) as error:
        raise SandboxError(f"Docker {what}: no daemon answers at {_address()}") from error


def _connect() -> APIClient:
    from docker.api.client import APIClient
    from docker.errors import DockerException
    from docker.utils import kwargs_from_env

    try:
        api = APIClient(timeout=TIMEOUT_S, version="auto", **kwargs_from_env())
    except DockerException as error:
        if "Permission denied" in str(error):
            remedy = "permission denied: join the group that owns the socket, or set DOCKER_HOST"
        else:
            remedy = f"{_line(error)}; start dockerd, or set DOCKER_HOST to one that runs"
        raise CapabilityMissing(f"no Docker daemon at {_address()}: {remedy}") from error
    # A connection is quick to make, and a kept one is a descriptor for each thread.
    api.headers["Connection"] = "close"
    return api


def _address() -> str:
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def _line(reason: object) -> str:
    text = str(reason)
    with suppress(ValueError):
        text = json.loads(text)["message"]
    return "; ".join(text.split("\n"))


@contextmanager
def _listening(folder: Path, identity: Identity | None) -> Iterator[socket.socket]:
    """A socket in `folder` for one connection of `identity`; no trace of it is left behind."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    # The path through the descriptor is short, as a unix socket's must be.
    place = f"/proc/self/fd/{handle}/{CONTROL}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(place)
            try:
                if identity is not None:
                    os.chown(place, identity.uid, identity.gid)
                os.chmod(place, 0o600)
                listener.listen(1)
                yield listener
            finally:
                os.unlink(place)
    finally:
        os.close(handle)
