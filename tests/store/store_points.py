"""Compaction or garbage collection of copies of a store, each killed at another point.

    python -m tests.store.store_points compact|gc ROOT FOLDER

Copy N under FOLDER is killed (SIGKILL) right before call N of the operating system that makes
something durable, gives it a name or takes one away. The last copy is not killed. Prints N and what
the call was. The work is done in forks of this process, which itself starts no threads.
"""

import asyncio
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

from k3rl.blobs import BlobStore
from k3rl.store.compaction import Limits
from k3rl.store.recovery import RootLock, recover
from k3rl.store.upkeep import Policy, Upkeep
from tests.store.store_aging import POLICY

CALLS = ("fsync", "link", "rename", "unlink", "replace")


def kill_at(number, say):
    """Die right before call `number`, counted from 0."""
    counter = itertools.count()

    def counted(name, real):
        def call(*arguments, **options):
            if next(counter) == number:
                os.write(say, f"{number} {name}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def work(kind, root, number):
    lock = RootLock(root)
    state = recover(root, True)
    policy = Policy(Limits(min_batches=2)) if kind == "compact" else POLICY
    upkeep = Upkeep(root, state, BlobStore(root / "blobs"), policy, asyncio.Lock())
    kill_at(number, 1)
    asyncio.run(upkeep.compact() if kind == "compact" else upkeep.collect())
    lock.release()


def main(kind, root, folder):
    for number in itertools.count():
        copy = folder / str(number)
        shutil.copytree(root, copy)
        child = os.fork()
        if child == 0:
            work(kind, copy, number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            print("done" if status == 0 else f"failed {status}", flush=True)
            return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
