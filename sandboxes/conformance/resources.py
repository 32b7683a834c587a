"""Bombs of memory, of files and of disk; every one of them ends by itself."""

from __future__ import annotations

import secrets
from functools import partial

from k3rl.sandboxes.base import ExecResult
from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import Ground, Place
from k3rl.sandboxes.spec import MIB, Capability

ALL = b"all\n"
KILLED = 137
ALLOCATE = "data = b'x' * (400 << 20); print('all')"


async def process_memory(ground: Ground, most: int = 256 * MIB) -> str:
    """More memory than one process may have."""
    async with ground.place(address_space_bytes=most) as place:
        result = await place.python(ALLOCATE)
    return "it had 400 MiB" if result.stdout == ALL else ""


CROWD = """
import os
go, hold = os.pipe()
pids = []
for _ in range(8):
    told, tell = os.pipe()
    pids.append(os.fork())
    if not pids[-1]:
        os.close(hold)
        data = b"x" * (32 << 20)
        os.write(tell, b"x")
        os.read(go, 1)
        os._exit(0)
    os.close(tell)
    os.read(told, 1)
os.close(hold)
print("all" if all(os.waitpid(pid, 0)[1] == 0 for pid in pids) else "some")
"""
"""Eight processes of 32 MiB at the same time, each within the limit of one."""
FILL_BOTH = """
head -c 60M /dev/zero > /dev/shm/a && head -c 60M /dev/zero > /tmp/b && sleep 0.1 && echo all
"""


async def total_memory(ground: Ground, how: str, most: int = 96 * MIB) -> str:
    """More memory than a whole sandbox may have."""
    async with ground.place(total_memory_bytes=most) as place:
        result = await (place.python(CROWD) if how == "processes" else place.sh(FILL_BOTH))
        after = await place.sh("echo fine")
    if after.stdout != b"fine\n":
        return f"no command runs afterwards: {after}"
    return "it had all of it" if result.stdout == ALL else ""


async def full_tmp(ground: Ground, folder: str, most: int = MIB) -> str:
    """More than a private file system of memory may hold."""
    async with ground.place(tmp_bytes=most) as place:
        script = f"head -c 4M /dev/zero > {folder}/big; stat -c %s {folder}/big"
        size = int((await place.sh(script)).stdout)
    return f"{size} bytes" if size > MIB else ""


LEAVE = """
import os, sys
for folder in sys.argv[2:]:
    os.makedirs(f"{folder}/{sys.argv[1]}/deep")
    os.chmod(f"{folder}/{sys.argv[1]}", 0o500)
"""


async def left_over(ground: Ground, *folders: str) -> str:
    """Files that a command leaves for the next one outside the workspace."""
    token = ground.new_token()
    async with ground.place() as place:
        made = await place.python(LEAVE, token, *folders)
        found = await place.sh(f"ls -A {' '.join(folders)} | grep {token}")
    return made.stderr.decode() or found.stdout.decode().strip().replace("\n", "; ")


OBJECTS = """
key = int(sys.argv[2])
queue = f"/left-{key}".encode()
create = 0o1666 if sys.argv[1] == "create" else 0
if sys.argv[3] == "queue":
    flags = (os.O_CREAT if create else 0) | os.O_RDWR
    attempt("a message queue", call, libc.mq_open, queue, flags, 0o666, None)
else:
    attempt("shared memory", call, libc.shmget, key, 4096 if create else 0, create)
    attempt("a semaphore", call, libc.semget, key, 1 if create else 0, create)
    attempt("a message queue", call, libc.msgget, key, create)
if create:
    through.clear()
"""
REMOVE_OBJECTS = """
key = int(sys.argv[1])
libc.shmctl(libc.shmget(key, 0, 0), 0, None)
libc.semctl(libc.semget(key, 0, 0), 0, 0)
libc.msgctl(libc.msgget(key, 0), 0, None)
libc.mq_unlink(f"/left-{key}".encode())
"""


async def left_objects(ground: Ground, kind: str) -> str:
    """System V objects or a POSIX queue that a command leaves for the next one."""
    async with ground.place() as place:
        key = new_key()
        await place.attempts(OBJECTS, "create", key, kind)
        return await place.attempts(OBJECTS, "find", key, kind)


async def left_objects_on_host(ground: Ground, kind: str) -> str:
    """The control: two processes of the host, one after the other."""
    key = new_key()
    try:
        await ground.on_host(OBJECTS, "create", key, kind)
        return await ground.on_host(OBJECTS, "find", key, kind)
    finally:
        await ground.on_host(REMOVE_OBJECTS, key)


def new_key() -> str:
    """The key of a System V object that nobody else has."""
    return str(secrets.randbits(30) | 1)


async def large_file(ground: Ground, script: str, most: int = MIB) -> str:
    """A file that is larger than one may be."""
    async with ground.place(max_file_bytes=most) as place:
        size = int((await place.sh(f"{script}; stat -c %s big || echo 0")).stdout)
    return f"{size} bytes" if size > MIB else ""


OPEN = "open = [open('/dev/null') for _ in range(60)]; print('all')"


async def open_files(ground: Ground, most: int = 32) -> str:
    """More open files than a process may have."""
    async with ground.place(max_open_files=most) as place:
        return "60 open files" if (await place.python(OPEN)).stdout == ALL else ""


SPIN = "import time\nwhile time.process_time() < 1.4: pass\nprint('all')"


async def processor_time(ground: Ground, most: int = 1) -> str:
    """More processor time than a process may have."""
    async with ground.place(cpu_s=most) as place:
        return "1.4 s" if (await place.python(SPIN)).stdout == ALL else ""


DISK = {
    "a million files": """
for number in range(1_000_000 if is_bomb else 1_500):
    os.close(os.open(f"f{number}", os.O_CREAT))
""",
    "hard links without end": """
os.close(os.open("f", os.O_CREAT))
for number in range(60_000 if is_bomb else 1_500):
    os.link("f", f"f{number}")
""",
    "disk filled by files": """
for number in range(256):
    with open(f"f{number}", "wb") as file:
        file.write(bytes(1 << 20))
""",
    "disk filled deep down": """
for number in range(300):
    os.mkdir("f")
    os.chdir("f")
for number in range(256):
    with open(f"f{number}", "wb") as file:
        file.write(bytes(1 << 20))
""",
    "disk filled by deleted open files": """
held = []
for number in range(64):
    held.append(open("f", "wb"))
    os.unlink("f")
    held[-1].write(bytes(4 << 20))
""",
    "disk filled by deleted mapped files": """
import mmap
held = []
for number in range(64):
    with open("f", "wb+") as file:
        file.truncate(4 << 20)
        held.append(mmap.mmap(file.fileno(), 4 << 20))
    os.unlink("f")
    held[-1].write(bytes(4 << 20))
""",
    "disk reserved": """
for number in range(16):
    with open(f"f{number}", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 16 << 20)
""",
}
"""Each takes 256 MiB or many paths, more slowly when it has taken twice what the attack may."""
PACE = """
import os, sys, time
is_bomb = sys.argv[1] == "bomb"
"""
LINGER = """
time.sleep(5 if is_bomb else 0)
print("all")
"""
LITTLE, MUCH = (24 * MIB, 1_000), (512 * MIB, 100_000)
"""Limits of bytes and of paths."""


async def full_disk(ground: Ground, script: str, is_bomb: bool = True) -> str:
    """A workspace that outgrows its limits, and one that cannot be cleared afterwards."""
    most_bytes, most_paths = LITTLE if is_bomb else MUCH
    async with ground.place(
        workspace_bytes=most_bytes, workspace_entries=most_paths, max_open_files=256
    ) as place:
        result = await place.python(PACE + script + LINGER, "bomb" if is_bomb else "")
        return _passed(result) or await _cleared(place)


TEMPORARY = """
import os
for number in range(64):
    with open(f"{os.environ['TMPDIR']}/f{number}", "wb") as file:
        file.write(bytes(4 << 20))
import time
time.sleep(float(os.environ["LINGER"]))
print("all")
"""


async def full_tmpdir(ground: Ground, most: int = 24 * MIB) -> str:
    """More temporary files than fit, be they kept in memory or on disk."""
    linger = {"LINGER": "3" if most < 256 * MIB else "0"}
    async with ground.place(environment=linger, tmp_bytes=most, workspace_bytes=most) as place:
        result = await place.python(TEMPORARY)
        after = await place.sh("echo fine > fine; cat fine")
    if after.stdout != b"fine\n":
        return f"no command runs afterwards: {after}"
    return "it had all of it" if result.stdout == ALL else ""


def _passed(result: ExecResult) -> str:
    if result.stdout == ALL:
        return "it had all of it"
    is_told = result.exit_code == KILLED and b"workspace is too large" in result.stderr
    return "" if is_told and not result.timed_out else f"it was not told: {result}"


async def _cleared(place: Place) -> str:
    """What deletes may run in a workspace that is too large, and then anything may."""
    cleared = await place.sh("rm -rf f*; ls | wc -l; echo small > small; cat small")
    is_fine = (cleared.exit_code, cleared.stdout) == (0, b"0\nsmall\n")
    return "" if is_fine else f"it cannot be cleared: {cleared}"


TOTAL, TMP_OF_ITS_OWN = Capability.TOTAL_MEMORY_LIMIT, Capability.PRIVATE_TMP
FILE_SIZE = Capability.FILE_SIZE_LIMIT
CHECKS = (
    Check(
        "memory of one process",
        Capability.MEMORY_LIMIT,
        process_memory,
        partial(process_memory, most=1024 * MIB),
    ),
    *(
        Check(
            name,
            TOTAL,
            partial(total_memory, how=how),
            partial(total_memory, how=how, most=1024 * MIB),
            also,
        )
        for name, how, also in (
            ("memory of all processes", "processes", None),
            ("memory of /tmp and /dev/shm", "files", TMP_OF_ITS_OWN),
        )
    ),
    *(
        Check(
            f"size of {folder}",
            TMP_OF_ITS_OWN,
            partial(full_tmp, folder=folder),
            partial(full_tmp, folder=folder, most=16 * MIB),
        )
        for folder in ("/tmp", "/dev/shm")
    ),
    Check(
        "left in /tmp and /dev/shm",
        TMP_OF_ITS_OWN,
        lambda ground: left_over(ground, "/tmp", "/dev/shm"),
        lambda ground: left_over(ground, "."),
    ),
    *(
        Check(
            name,
            TMP_OF_ITS_OWN,
            partial(left_objects, kind=kind),
            partial(left_objects_on_host, kind=kind),
        )
        for name, kind in (("left System V objects", "objects"), ("left POSIX queue", "queue"))
    ),
    *(
        Check(
            name,
            FILE_SIZE,
            partial(large_file, script=script),
            partial(large_file, script=script, most=1 << 40),
        )
        for name, script in (
            ("size of a file", "head -c 4M /dev/zero > big"),
            ("sparse file of 100 GB", "truncate -s 100G big"),
        )
    ),
    Check("open files", None, open_files, partial(open_files, most=256)),
    Check(
        "processor time",
        Capability.CPU_TIME_LIMIT,
        processor_time,
        partial(processor_time, most=60),
    ),
    *(
        Check(
            name,
            Capability.DISK_LIMIT,
            partial(full_disk, script=script),
            partial(full_disk, script=script, is_bomb=False),
        )
        for name, script in DISK.items()
    ),
    Check(
        "temporary files",
        Capability.DISK_LIMIT,
        full_tmpdir,
        partial(full_tmpdir, most=512 * MIB),
    ),
)
