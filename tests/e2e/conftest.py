"""Drive the installed command line as a user does, in a folder of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

K3RL = Path(sys.executable).with_name("k3rl")
CONFIG = """
run: {name: e2e, ledger: true}
engine: {kind: scripted, policies: [oracle, random]}
envs: [{id: k3rl/Reason-v0, kwargs: {preset: arithmetic}}, {id: k3rl/FileHunt-v0}]
rollout: {num_groups: 4, group_size: 2}
intensity: {levels: [max]}
cluster: {backend: local}
"""


class User:
    """A user in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen] = []
        (folder / "e2e.yaml").write_text(CONFIG)

    def start(self, *args: str, **options) -> subprocess.Popen:
        process = subprocess.Popen(
            [K3RL, *args],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
            **options,
        )
        self.started.append(process)
        return process

    def end_all(self) -> None:
        """Kill what a failed test has left running, with all its descendants."""
        for process in self.started:
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
                for member in [process, *family]:
                    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                        member.kill()
                process.wait()

    def run(self, *args: str, code: int = 0, timeout_s: float = 300) -> str:
        """Run to the end; returns stdout, or stderr where a failure is expected."""
        return self.finish(self.start(*args), code, timeout_s)

    def finish(self, process: subprocess.Popen, code: int = 0, timeout_s: float = 300) -> str:
        out, err = process.communicate(timeout=timeout_s)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        return out if code == 0 else err or out

    def train(self, *overrides: str, **options) -> str:
        return self.run("train", "e2e.yaml", *overrides, **options)

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "e2e"


@pytest.fixture
def user(tmp_path):
    user = User(tmp_path)
    yield user
    user.end_all()


def children_titled(process: subprocess.Popen, title: str) -> list[psutil.Process]:
    """Descendants of `process` whose command line holds `title`, oldest first."""
    found = []
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    for child in children:
        try:
            if title in " ".join(child.cmdline()):
                found.append(child)
        except psutil.Error:
            continue
    return sorted(found, key=lambda child: child.create_time())


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def wait_for(condition, timeout_s: float = 60, every_s: float = 0.05):
    """The first truthy value of `condition()`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(every_s)
    raise AssertionError(f"not within {timeout_s} s")


@pytest.fixture
def tools():
    """The helpers above, for tests in importlib mode."""
    return sys.modules[__name__]
