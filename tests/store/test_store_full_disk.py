"""A disk that refuses at any one call, or is full at any size: typed errors, nothing is lost.

Refused is either one call of the operating system (`Refusal`), or whatever does not fit on a small
tmpfs: there Arrow's own writes fail too, and writes that fit in part.
"""

import asyncio
import errno
import gc
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import StoreError
from k3rl.store.protocol import UpdateRow
from k3rl.types import LineageKind, ParentRef, digest_json
from tests.store.store_builders import COMPLETED, header, play, policy, service, step
from tests.store.store_faults import path_of
from tests.store.store_witness import Witness, judge

CALLS = ("write", "fsync", "fdatasync", "link", "mkdir", "open")
PAGE = 4096


@dataclass
class Refusal:
    """Counts calls below `root` that take room or confirm it, and refuses those from `first` on."""

    root: str
    first: int
    is_lasting: bool
    calls: list[str] = field(default_factory=list)
    refused: str = ""

    def install(self, patch):
        for name in CALLS:
            patch.setattr(os, name, self._hook(name, getattr(os, name)))

    def _hook(self, name, real):
        def hooked(target, *arguments, **options):
            path = path_of(target) if isinstance(target, int) else str(target)
            is_new = name != "open" or (arguments and arguments[0] & os.O_CREAT)
            if not path.startswith(self.root) or not is_new:
                return real(target, *arguments, **options)
            number = len(self.calls)
            self.calls.append(f"{name} {path.removeprefix(self.root)}")
            if number != self.first and not (self.is_lasting and number > self.first):
                return real(target, *arguments, **options)
            self.refused = self.refused or self.calls[-1]
            if name == "write":
                # What fits is written all the same.
                real(target, bytes(arguments[0])[: len(arguments[0]) // 2])
            reason = errno.EIO if "sync" in name else errno.ENOSPC
            raise OSError(reason, os.strerror(reason))

        return hooked


class Tries:
    """Makes requests; those that are refused with a StoreError are noted, any other error fails."""

    def __init__(self):
        self.refused = []

    async def __call__(self, request):
        try:
            return await request
        except StoreError as error:
            self.refused.append(str(error))
            return None


async def work(store, blobs, first, tries):
    """A bit of everything that writes; each request is made whether or not others were refused."""
    await tries(store.begin([header(first), header(first + 1)]))
    claims = await tries(store.claim("w", 9, [], 0.0)) or []
    for claim in claims:
        acked = len(claim.tokens.token_ids) if claim.tokens else 5
        if not claim.steps:
            await tries(first_step(store, blobs, claim))
        await tries(store.append(policy(claim.header.id, claim.epoch, acked, 150)))
    ids = [claim.header.id for claim in claims]
    for claim in claims[:1]:
        await tries(store.finish(claim.header.id, claim.epoch, COMPLETED))
    await tries(store.next_version(0, digest_json(first), None))
    row = UpdateRow(
        first, 0, 1, 0, "key", tuple(ids), (0.5,) * len(ids), {}, (0.0,) * len(ids), 1.0
    )
    await tries(store.record_update(row))
    await tries(store.pin())
    for id in ids[:1]:
        ref = ParentRef(id, 0, 5, 1, LineageKind.BRANCH)
        await tries(store.branch(header(first + 2, parent=ref)))
    for claim in claims[1:]:
        await tries(store.pause(claim.header.id, claim.epoch))
    await tries(store.pin())


async def first_step(store, blobs, claim):
    layer = blobs.put(b"%d" % claim.epoch + claim.header.id.encode())
    frame = step(claim.header.id, claim.epoch, 0, 0, 0, layers=[layer])
    await store.commit_step(claim.header.id, claim.epoch, frame)


async def run_refused(root, url, witness, tries, lift):
    """Open, work under the fault, `lift` it; what cannot go on then does after a restart."""
    with suppress(StoreError):
        async with service(root, url) as witness.store:
            await work(witness, BlobStore(root / "blobs"), 0, tries)
            lift()
            again = Tries()
            await work(witness, BlobStore(root / "blobs"), 10, again)
            # Whatever the disk refused, nothing but journal and manifest may stay shut.
            assert all("start the run again" in said for said in again.refused), again.refused
    lift()
    async with service(root, url) as witness.store:
        again = Tries()
        await work(witness, BlobStore(root / "blobs"), 20, again)
        assert again.refused == []
        await witness.requeue_paused()
        while claims := await witness.claim("x", 9, [], 0.0):
            for claim in claims:
                await play(witness, claim, num_steps=max(2, len(claim.steps)))


def refuse(folder, url, first, is_lasting):
    """One run with one refusal."""
    root, witness = folder / "store", Witness()
    refusal, tries = Refusal(str(root), first, is_lasting), Tries()
    patch = pytest.MonkeyPatch()
    refusal.install(patch)
    try:
        asyncio.run(run_refused(root, url, witness, tries, patch.undo))
        judge(root, witness, folder / "ledgers")
        assert handles_below(root) == []
    except BaseException as error:
        error.add_note(f"call {first}: {refusal.refused}, lasting: {is_lasting}, {tries.refused}")
        raise
    finally:
        patch.undo()
    shutil.rmtree(root)
    return refusal


def handles_below(root):
    """Files that this process has left open there."""
    gc.collect()
    found = [
        path_of(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")
    ]
    return [path for path in found if path.startswith(str(root))]


def kinds_of(calls):
    """The first and the last number of each kind of call: which call, on what."""
    kinds = [
        re.sub(r"[0-9a-f]{8,}|[0-9]+|[0-9a-z_]{8}$|/[0-9a-f]{2}/", "#", call) for call in calls
    ]
    last = {kind: number for number, kind in enumerate(kinds)}
    first = {kind: number for number, kind in reversed([*enumerate(kinds)])}
    return sorted(first.values()), sorted(last.values())


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_refused_call_loses_nothing(quick_path, valkey, is_lasting):
    """Each kind of call: the first one and all that follow, or the last one alone."""
    calls = refuse(quick_path, valkey, 10**6, False).calls
    first, last = kinds_of(calls)
    assert {call.split(" ")[0] for call in calls} == set(CALLS)
    for number in first if is_lasting else last:
        assert refuse(quick_path, valkey, number, is_lasting).refused


@pytest.mark.slow
@pytest.mark.parametrize("is_lasting", [False, True])
def test_every_refused_call_loses_nothing(quick_path, valkey, is_lasting):
    calls = refuse(quick_path, valkey, 10**6, False).calls
    refused = [refuse(quick_path, valkey, n, is_lasting).refused for n in range(len(calls))]
    # How many frames share a sync differs a little from run to run.
    assert refused.count("") <= 3


@pytest.fixture
def disk(tmp_path):
    """A disk of one MiB, and a function that leaves so many pages of it free (None: all)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    ballast = folder / "ballast"

    def leave(pages):
        ballast.unlink(missing_ok=True)
        if pages is not None:
            free = os.statvfs(folder).f_bavail
            ballast.write_bytes(b"x" * (free - pages) * PAGE)

    yield folder, leave
    gc.collect()  # an error that a test caught keeps the store's open files alive for a while
    subprocess.run(["umount", str(folder)], check=True)


def fill_each(disk, url, pages, ledgers):
    """Runs on a disk with so much room; returns all that was refused."""
    folder, leave = disk
    refused = []
    for number in pages:
        witness, tries = Witness(), Tries()
        leave(number)
        try:
            asyncio.run(run_refused(folder / "store", url, witness, tries, lambda: leave(None)))
            leave(None)
            judge(folder / "store", witness, ledgers)
            assert handles_below(folder) == []
        except BaseException as error:
            error.add_note(f"{number} pages, refused: {tries.refused}")
            raise
        refused += tries.refused
        shutil.rmtree(folder / "store")
    return refused


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@NEEDS_ROOT
def test_a_disk_that_fills_up_loses_nothing(disk, valkey, tmp_path):
    check_refused(fill_each(disk, valkey, range(1, 22, 3), tmp_path / "ledgers"))


@NEEDS_ROOT
@pytest.mark.slow
def test_a_disk_that_fills_up_at_any_page_loses_nothing(disk, valkey, tmp_path):
    check_refused(fill_each(disk, valkey, range(24), tmp_path / "ledgers"))


def check_refused(refused):
    for what in ("cannot seal", "cannot write the journal", "cannot store a blob"):
        assert any(re.search(f"{what}: .*No space left on device", r) for r in refused), what
