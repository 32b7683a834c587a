"""Faults at the level of the operating system: calls that fail, wait or are noted."""

import errno
import os
import re
import threading
from pathlib import Path


def path_of(handle):
    return os.readlink(f"/proc/self/fd/{handle}")


def fail(patch, call, where, number=errno.EIO):
    """`os.<call>` on a file or folder whose path has the pattern `where` fails; the rest works."""
    real = getattr(os, call)

    def failing(handle, *arguments):
        if re.search(where, path_of(handle)):
            raise OSError(number, os.strerror(number))
        return real(handle, *arguments)

    patch.setattr(os, call, failing)


def hold(patch, call, where):
    """`os.<call>` there waits until the event that is returned is set; it is set once it waits."""
    real, waits, go_on = getattr(os, call), threading.Event(), threading.Event()

    def held(handle, *arguments):
        if re.search(where, path_of(handle)):
            waits.set()
            assert go_on.wait(20)
        return real(handle, *arguments)

    patch.setattr(os, call, held)
    return waits, go_on


def note(patch, root):
    """A list that fills with ("sync" or "unlink", path below root) in the order of the calls."""
    calls = []

    def noted(call, name, path):
        def spy(first, *arguments, **options):
            calls.append((name, str(path(first)).removeprefix(f"{root}/")))
            return call(first, *arguments, **options)

        return spy

    for call in ("fsync", "fdatasync"):
        patch.setattr(os, call, noted(getattr(os, call), "sync", path_of))
    patch.setattr(Path, "unlink", noted(Path.unlink, "unlink", lambda path: path))
    return calls


def flip(path, at):
    """Damage one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
