"""The image of Docker sandboxes: a few folders and links, made here, that the host's /usr fills."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from k3rl.types import digest_bytes

REPOSITORY = "k3rl-sandbox"
FOLDERS = ("dev", "etc", "etc/alternatives", "proc", "sys", "tmp", "usr", "workspace")
TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64")
"""Names that are links into /usr on most systems, and folders of their own on others."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image as the daemon holds it."""

    id: str
    """Of its content."""
    environment: Mapping[str, str]
    """What it sets for its programs."""


def image_tar(etc: Mapping[str, str], files: tuple[str, ...]) -> bytes:
    """The image's file system; equal arguments give equal bytes on one host.

    `etc`: text files of /etc. `files`: empty files at these paths, for mounts to cover.
    """
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name in (*FOLDERS, *(path.strip("/") for path in system_folders() if path != "/usr")):
            info = tarfile.TarInfo(name)
            # A tmpfs takes its mode from the folder below it.
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(info)
        for name in TOP_LEVEL:
            if (link := Path("/", name)).is_symlink():
                info = tarfile.TarInfo(name)
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(link).lstrip("/")
                tar.addfile(info)
        texts = {f"etc/{name}": text for name, text in etc.items()}
        for name, text in (texts | dict.fromkeys(files, "")).items():
            info = tarfile.TarInfo(name.strip("/"))
            info.size, info.mode = len(text.encode()), 0o644
            tar.addfile(info, io.BytesIO(text.encode()))
    return target.getvalue()


def image_tag(tar: bytes) -> str:
    """The image's tag, which names its content."""
    return digest_bytes(tar)[:16]


def system_folders() -> list[str]:
    """The host's folders that hold its programs: what sandboxes see of it, read-only."""
    own = [path for name in TOP_LEVEL if (path := Path("/", name)).is_dir()]
    return ["/usr", *(str(path) for path in own if not path.is_symlink())]
