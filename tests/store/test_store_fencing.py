"""Two writers of one trajectory: once the first one's lease has expired it writes nowhere."""

import asyncio

import pytest

from k3rl.errors import Fenced
from k3rl.store.protocol import Ref
from k3rl.types import Outcome, OutcomeKind, TrajectoryState
from tests.store.store_builders import COMPLETED, claim_one, header, play, policy, step

CANCELLED = Outcome(OutcomeKind.CANCELLED)


async def is_fenced_everywhere(store, claim, start, acked):
    """New writes, and those that were acknowledged before, at the old epoch."""
    id, old = claim.header.id, claim.epoch
    before = await store.get(id)
    requests = {
        "append": lambda: store.append(policy(id, old, acked, 9)),
        "append again": lambda: store.append(policy(id, old, 5, 20)),
        "commit": lambda: store.commit_step(id, old, step(id, old, 1, start, acked)),
        "commit again": lambda: store.commit_step(id, old, step(id, old, 0, 0, 0)),
        "pause": lambda: store.pause(id, old),
        "finish": lambda: store.finish(id, old, CANCELLED),
        "finish as it did": lambda: store.finish(id, old, COMPLETED),
    }
    for name, request in requests.items():
        with pytest.raises(Fenced):
            pytest.fail(f"{name} was granted: {await request()}")
    assert await store.get(id) == before


def test_an_expired_lease_is_fenced_everywhere_and_for_good(open_store):
    async def go():
        async with open_store(lease_ttl_s=0.3) as store:
            await store.begin([header(0)])
            first = await claim_one(store, "slow")
            id = first.header.id
            await store.commit_step(id, first.epoch, step(id, first.epoch, 0, 0, 0))
            await store.append(policy(id, first.epoch, 5, 20))
            # It says nothing for longer than its lease; another one waits for work.
            (second,) = await store.claim("quick", 1, [], 10.0)
            assert second.state is TrajectoryState.ACTIVE
            assert second.epoch > first.epoch
            await is_fenced_everywhere(store, first, 5, 25)
            await store.pause(id, second.epoch)
            await is_fenced_everywhere(store, first, 5, 25)
            await store.requeue_paused()
            await is_fenced_everywhere(store, first, 5, 25)
            third = await claim_one(store, "quick")
            await play(store, third)
            await is_fenced_everywhere(store, first, 5, 25)
            await is_fenced_everywhere(store, second, 5, 25)
            tokens = (await store.read(Ref(id))).token_ids.tobytes()
            await store.pin()
            await is_fenced_everywhere(store, first, 5, 25)
        async with open_store() as store:
            await is_fenced_everywhere(store, first, 5, 25)
            assert (await store.read(Ref(id))).token_ids.tobytes() == tokens

    asyncio.run(go())


@pytest.mark.parametrize("num_before", range(6))
def test_what_meets_the_take_over_is_handed_on_or_fenced(open_store, num_before):
    """A writer that goes on while its claim is taken: what it was answered, the next one has."""

    async def write(store, claim, answers):
        for n in range(1000):
            answers.append(await store.append(policy(claim.header.id, claim.epoch, 8 * n, 8)))

    async def go():
        async with open_store() as store:
            await store.begin([header(n) for n in range(4)])
            for _ in range(4):
                claim, answers = await claim_one(store, "slow"), []
                writing = asyncio.create_task(write(store, claim, answers))
                while len(answers) < num_before:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                assert await store.reap("slow") == [claim.header.id]
                second = await claim_one(store, "quick")
                with pytest.raises(Fenced):
                    await writing
                assert [(a.offset, a.count) for a in second.acks] == [
                    (answer.offset, answer.count) for answer in answers
                ]
                assert len(answers) >= num_before
                await store.finish(second.header.id, second.epoch, CANCELLED)

    asyncio.run(go())
