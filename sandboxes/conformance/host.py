"""The host's files, devices and kernel settings."""

from __future__ import annotations

from k3rl.sandboxes.conformance.check import Check
from k3rl.sandboxes.conformance.ground import Ground, loosely
from k3rl.sandboxes.spec import Capability

READ = """
for path in sys.argv[1:]:
    attempt(path, lambda: open(path, "rb").read(1))
    if os.path.isdir(path):
        attempt(path, lambda: len(os.listdir(path)) > 0)
"""
PRIVATE = ("/root", "/home", "/var", "/boot", "/opt", "/srv", "/mnt", "/media", "/run")
SHADOW = ("/etc/shadow", "/etc/sudoers", "/etc/ssh", "/etc/fstab", "/etc/machine-id")


async def host_files(ground: Ground) -> str:
    """Files of the host outside system folders."""
    async with ground.place() as place:
        return await place.attempts(READ, str(ground.secret_file), *PRIVATE, *SHADOW)


WRITE = """
for folder in sys.argv[1:]:
    path = f"{folder}/k3rl-conformance-{os.getpid()}"
    def write():
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        os.unlink(path)
    attempt(folder, write)
"""
SYSTEM = (
    *("/", "/usr", "/usr/bin", "/usr/lib", "/etc", "/bin", "/lib", "/dev", "/proc", "/sys"),
    "/.k3rl-control",
)


async def system_folders(ground: Ground, *folders: str) -> str:
    """New files in the system's folders."""
    async with ground.place() as place:
        return await place.attempts(WRITE, *folders)


OPEN = """
for path in sys.argv[2:]:
    flags = os.O_WRONLY if sys.argv[1] == "write" else os.O_RDONLY
    attempt(path, lambda: os.close(os.open(path, flags | os.O_NONBLOCK)))
"""
SETTINGS = """
for root in sys.argv[1:]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = f"{folder}/{name}"
            if not os.path.islink(path):
                attempt(path, lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))
"""
KERNEL_ROOTS = ("/sys/fs/cgroup", "/sys/kernel", "/sys/power", "/sys/module")
DEVICES = (
    *(f"/dev/{name}" for name in ("mem", "kmem", "port", "kmsg", "kvm", "fuse", "loop0", "vda")),
    *(f"/dev/{name}" for name in ("sda", "nvme0n1", "net/tun", "vsock", "tty", "uinput")),
    *(f"/proc/{name}" for name in ("kcore", "kmsg", "sysrq-trigger", "1/mem")),
)


async def settings(ground: Ground, *roots: str) -> str:
    """Kernel settings that can be opened for writing."""
    async with ground.place({"own/setting": b""}) as place:
        return await place.attempts(SETTINGS, *roots)


async def devices(ground: Ground, *paths: str) -> str:
    """Devices of the machine, and what in /proc is as good as one."""
    async with ground.place() as place:
        reads = await place.attempts(OPEN, "read", *paths)
        return reads + await place.attempts(OPEN, "write", *paths)


LINK = """
for number, path in enumerate(sys.argv[1:]):
    attempt(path, os.link, path, f"linked-{number}")
"""


async def hard_links(ground: Ground) -> str:
    """A hard link to a file of the host, which would be read and written through it."""
    async with ground.place() as place:
        return await place.attempts(LINK, str(ground.secret_file), "/etc/passwd", "/usr/bin/env")


MKNOD = """
kinds = {"c": 0o020000, "b": 0o060000, "p": 0o010000}
for word in sys.argv[1:]:
    kind, major, minor = word.split(":")
    for folder in (".", "/tmp", "/dev/shm"):
        path = f"{folder}/node-{os.getpid()}-{word}"
        def make():
            os.mknod(path, kinds[kind] | 0o666, os.makedev(int(major), int(minor)))
            os.unlink(path)
        attempt(path, make)
"""
NODES = ("c:1:1", "c:1:5", "c:10:237", "b:8:0", "b:254:0")


async def device_nodes(ground: Ground, *nodes: str) -> str:
    """New device files."""
    async with ground.place() as place:
        return await place.attempts(MKNOD, *nodes)


FILES = Capability.ISOLATED_FILES
CHECKS = (
    Check("files of the host", FILES, host_files, loosely(host_files)),
    Check(
        "writes to system folders",
        FILES,
        lambda ground: system_folders(ground, *SYSTEM),
        lambda ground: system_folders(ground, "."),
    ),
    Check(
        "writes to /proc/sys",
        FILES,
        lambda ground: settings(ground, "/proc/sys"),
        lambda ground: settings(ground, "own"),
    ),
    Check(
        "writes to /sys and control groups",
        FILES,
        lambda ground: settings(ground, *KERNEL_ROOTS),
        lambda ground: settings(ground, "own"),
    ),
    Check(
        "/dev/mem and other devices",
        FILES,
        lambda ground: devices(ground, *DEVICES),
        lambda ground: devices(ground, "/dev/null"),
    ),
    Check("hard links to files of the host", FILES, hard_links, loosely(hard_links)),
    Check(
        "new device files",
        Capability.NO_PRIVILEGES,
        lambda ground: device_nodes(ground, *NODES),
        lambda ground: device_nodes(ground, "p:0:0"),
    ),
)
