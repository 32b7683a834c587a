import asyncio
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from k3rl.store.redis_server import EmbeddedServer


@pytest.fixture(scope="session")
def valkey(tmp_path_factory):
    """The url of one real server for all tests of the store; every service has its own prefix."""
    server = EmbeddedServer(tmp_path_factory.mktemp("valkey"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def memory(tmp_path_factory):
    """A folder where a sync costs nothing, for tests that sync very often; on disk if need be."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("memory")
        return
    with tempfile.TemporaryDirectory(prefix="k3rl-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def quick_path(memory):
    """Like `tmp_path`, in `memory`."""
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def open_store(tmp_path, valkey):
    """Opens a service on `tmp_path/store`; the same root every time."""
    from tests.store.store_builders import service

    names = itertools.count()

    def open_(**options):
        return service(tmp_path / "store", valkey, f"{tmp_path}-{next(names)}", **options)

    return open_
