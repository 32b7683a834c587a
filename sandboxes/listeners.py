"""Sockets of the host that a sandbox must not reach: they listen, and tell what reached them."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

CONNECT = """
import os, socket
def reach(family, kind, address, folder="/"):
    try:
        os.chdir(folder)  # because an address is short
        with socket.socket(family, kind) as end:
            end.settimeout(2)
            end.connect(address)
            end.send(b"x")
    except OSError:
        pass
reach(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {stream}))
reach(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", {datagram}))
reach(socket.AF_UNIX, socket.SOCK_STREAM, {abstract!r})
reach(socket.AF_UNIX, socket.SOCK_STREAM, {path!r}, {folder!r})
try:
    print(*(name for _, name in socket.if_nameindex()))
except OSError:
    print()
"""


class Listeners:
    """A socket of each kind, listening on this machine."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for the one that has a path; every user may enter it. Raises OSError."""
        name = f"listener-{secrets.token_hex(8)}"
        self._path = folder / name
        self._sockets = {
            "stream": socket.socket(socket.AF_INET, socket.SOCK_STREAM),
            "datagram": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            "abstract": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
            "path": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        }
        place = os.open(folder, os.O_PATH)
        names = {"abstract": f"\0{name}", "path": f"/proc/self/fd/{place}/{name}"}
        for kind, end in self._sockets.items():
            end.setblocking(False)
            end.bind(names.get(kind, ("127.0.0.1", 0)))
            if end.type is socket.SOCK_STREAM:
                end.listen()
        os.close(place)
        self._path.chmod(0o777)
        ports = {kind: self._sockets[kind].getsockname()[1] for kind in ("stream", "datagram")}
        self.connect = CONNECT.format(**ports, abstract=f"\0{name}", path=name, folder=str(folder))
        """A Python script that tries to reach all of them, and prints the interfaces it finds."""

    @property
    def kinds(self) -> set[str]:
        """Of sockets that listen."""
        return set(self._sockets)

    def reached(self) -> set[str]:
        """The kinds that something has reached since the last call."""
        found = set()
        for kind, end in self._sockets.items():
            with suppress(BlockingIOError):
                while True:
                    if end.type is socket.SOCK_STREAM:
                        end.accept()[0].close()
                    else:
                        end.recv(16)
                    found.add(kind)
        return found

    def __enter__(self) -> Self:
        """As it is."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close them."""
        for end in self._sockets.values():
            end.close()
        self._path.unlink()
