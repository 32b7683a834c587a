"""Memory stays flat while millions of tokens are appended, sealed and read."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHILD = """
import asyncio, sys
from pathlib import Path
from k3rl.store.protocol import Ref, SampleRequest, SampleUnit
from tests.store.store_builders import COMPLETED, claim_one, header, policy, service, step

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))

def say(what):
    print(what, peak(), flush=True)
    Path("/proc/self/clear_refs").write_text("5")

async def write(store, number, num_tokens):
    await store.begin([header(number)])
    claim = await claim_one(store)
    id, epoch, acked, index = claim.header.id, claim.epoch, 0, 0
    while acked < num_tokens:
        start = acked
        for _ in range(4 * bool(index)):
            acked += (await store.append(policy(id, epoch, acked, 4096, index))).count
        await store.commit_step(id, epoch, step(id, epoch, index, start, acked))
        acked, index = acked + 5, index + 1
    await store.finish(id, epoch, COMPLETED)

async def read(store, num_updates):
    for update in range(num_updates):
        refs = await store.sample(SampleRequest(update, 16, 0, unit=SampleUnit.SEGMENT))
        assert sum(len(found.token_ids) for found in await store.read_many(refs)) > 0

async def go():
    async with service(Path(sys.argv[1]), sys.argv[2], seal_tokens=10**9) as store:
        await write(store, 0, 100_000)
        await store.pin()
        await read(store, 4)
        say("warm")
        for number in (1, 2, 3):
            await write(store, number, 1_000_000)
            say(f"appended {number}")
            await store.pin()
            say(f"sealed {number}")
            await read(store, 40)
            say(f"read {number}")

asyncio.run(go())
"""
MOST_KB = 56_000
"""Above a store of a tenth of a million tokens; the arrays of three million alone are 27 MB more
than what is decoded at a time, and what the allocator keeps of it."""


def test_memory_stays_flat(tmp_path, valkey):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "store"), valkey]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    peaks = {what: int(kb) for what, kb in lines}
    assert len(peaks) == 10
    assert max(peaks.values()) < peaks["warm"] + MOST_KB, peaks
