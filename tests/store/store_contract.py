"""What every TrajectoryStore does, as async functions that take a fresh, empty store.

`CASES` lists them; run each against each implementation.
"""

import asyncio
from dataclasses import replace

import pytest

from k3rl.errors import Fenced, K3rlError, StoreError
from k3rl.store.protocol import (
    Ref,
    SampleRequest,
    SampleUnit,
    StepFrame,
    Stratum,
    TrajectoryStore,
    UpdateRow,
)
from k3rl.types import (
    Author,
    LineageKind,
    Outcome,
    OutcomeKind,
    ParentRef,
    Span,
    TrajectoryState,
    digest_json,
    encode,
)
from tests.store.store_builders import (
    COMPLETED,
    claim_one,
    environment,
    header,
    play,
    played,
    policy,
    snapshot,
    step,
)

CASES = []


def case(function):
    CASES.append(function)
    return function


async def begun(store, number=0, worker="w"):
    """A claimed trajectory with its opening step: 5 tokens, step 0."""
    await store.begin([header(number)])
    claim = await claim_one(store, worker)
    await store.commit_step(
        claim.header.id, claim.epoch, step(claim.header.id, claim.epoch, 0, 0, 0)
    )
    return claim.header.id, claim.epoch


def same_arrays(a, b):
    names = ("token_ids", "loss_mask", "rollout_logprobs")
    return all(getattr(a, n).tobytes() == getattr(b, n).tobytes() for n in names)


@case
async def is_a_trajectory_store(store):
    assert isinstance(store, TrajectoryStore)


@case
async def begins_in_order_and_hands_out_each_once(store):
    headers = [header(n) for n in range(6)]
    await store.begin(headers)
    await store.begin(headers)
    claims = [c for w in "ab" for c in await store.claim(w, 3, [], 1.0)]
    assert [c.header.id for c in claims] == [h.id for h in headers]
    assert all(c.state is TrajectoryState.QUEUED and c.epoch == 1 for c in claims)
    assert await store.claim("c", 3, [], 0.0) == []
    assert claims[0].header == headers[0]


@case
async def claim_waits_for_work(store):
    waiting = asyncio.create_task(store.claim("w", 1, [], 10.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await store.begin([header()])
    assert len(await asyncio.wait_for(waiting, 5.0)) == 1


@case
async def a_lost_answer_is_handed_out_again_under_a_new_epoch(store):
    await store.begin([header(0), header(1)])
    first = await claim_one(store)
    assert await store.claim("w", 0, [first.header.id], 0.0) == []
    again = await store.claim("w", 1, [], 0.0)
    assert [c.header.id for c in again] == [first.header.id]
    assert again[0].epoch > first.epoch
    with pytest.raises(Fenced):
        await store.append(policy(first.header.id, first.epoch, 0, 4))


@case
async def appends_are_acknowledged_once_and_repeats_are_no_ops(store):
    id, epoch = await begun(store)
    frame = policy(id, epoch, 5, 64)
    ack = await store.append(frame)
    assert (ack.id, ack.context, ack.offset, ack.count) == (id, 0, 5, 64)
    assert ack.content_hash == frame.content_hash()
    assert await store.append(frame) == ack
    assert await store.append(policy(id, epoch, 69, 0)) == await store.append(
        policy(id, epoch, 69, 0)
    )
    with pytest.raises(StoreError, match="gap"):
        await store.append(policy(id, epoch, 70, 4))
    with pytest.raises(StoreError, match="other tokens"):
        await store.append(policy(id, epoch, 5, 64, seed=9))
    with pytest.raises(StoreError, match="other spans"):
        await store.append(policy(id, epoch, 5, 64, version=7))
    with pytest.raises(StoreError, match="never handed out"):
        await store.append(policy(id, epoch + 1, 69, 4))
    with pytest.raises(StoreError, match="unknown"):
        await store.append(policy("0" * 32, 1, 0, 4))


@case
async def pipelined_appends_take_effect_in_order(store):
    id, epoch = await begun(store)
    frames = [policy(id, epoch, 5 + 8 * n, 8) for n in range(20)]
    acks = await asyncio.gather(*(store.append(frame) for frame in frames))
    assert [ack.offset for ack in acks] == [frame.offset for frame in frames]


@case
async def authors_keep_to_their_way_in(store):
    id, epoch = await begun(store)
    with pytest.raises(StoreError, match="append"):
        await store.append(environment(id, epoch, 5, 3))
    frame = step(id, epoch, 1, 5, 5)
    with pytest.raises(StoreError, match="commit_step"):
        await store.commit_step(
            id, epoch, StepFrame(frame.step, policy(id, epoch, 5, 5), frame.snapshot)
        )


@case
async def readers_see_only_committed_steps(store):
    id, epoch = await begun(store)
    await store.append(policy(id, epoch, 5, 64))
    assert (await store.get(id)).num_tokens == 5
    assert len((await store.read(Ref(id))).token_ids) == 5
    with pytest.raises(StoreError):
        await store.read(Ref(id, 0, 6))
    with pytest.raises(StoreError):
        await store.snapshot(snapshot(id, 1).snapshot_id)
    acks = await store.commit_step(id, epoch, step(id, epoch, 1, 5, 69))
    assert [(a.offset, a.count) for a in acks] == [(69, 5)]
    found = await store.get(id)
    assert (found.num_tokens, found.num_policy_tokens, len(found.steps)) == (74, 64, 2)
    assert (await store.snapshot(snapshot(id, 1).snapshot_id)).session == {"cwd": "/", "n": [1]}


@case
async def commits_are_checked_and_idempotent(store):
    id, epoch = await begun(store)
    await store.append(policy(id, epoch, 5, 10))
    frame = step(id, epoch, 1, 5, 15)
    with pytest.raises(StoreError, match="next one is 1"):
        await store.commit_step(id, epoch, step(id, epoch, 2, 5, 15))
    with pytest.raises(StoreError, match="tokens"):
        await store.commit_step(id, epoch, step(id, epoch, 1, 4, 15))
    with pytest.raises(StoreError, match="tokens"):
        await store.commit_step(id, epoch, step(id, epoch, 1, 5, 14, count=0))
    with pytest.raises(StoreError, match="snapshot"):
        await store.commit_step(id, epoch, StepFrame(frame.step, frame.tokens, None))
    with pytest.raises(StoreError, match="snapshot"):
        await store.commit_step(id, epoch, StepFrame(frame.step, frame.tokens, snapshot(id, 7)))
    missing = step(id, epoch, 1, 5, 15, layers=["ab" * 32])
    with pytest.raises(StoreError, match="missing"):
        await store.commit_step(id, epoch, missing)
    acks = await store.commit_step(id, epoch, frame)
    assert await store.commit_step(id, epoch, frame) == acks
    with pytest.raises(StoreError, match="another"):
        await store.commit_step(id, epoch, step(id, epoch, 1, 5, 15, count=4))
    assert (await store.get(id)).num_tokens == 20


@case
async def paused_tokens_are_kept_and_resumed(store):
    id, epoch = await begun(store)
    frame = policy(id, epoch, 5, 64)
    await store.append(frame)
    await store.pause(id, epoch)
    await store.pause(id, epoch)
    assert (await store.get(id)).state is TrajectoryState.PAUSED
    with pytest.raises(StoreError, match="claim it"):
        await store.append(policy(id, epoch, 69, 4))
    assert await store.claim("x", 1, [], 0.0) == []
    await store.begin([header(9)])
    assert await store.requeue_paused() == 1
    assert await store.requeue_paused() == 0
    claim = await claim_one(store, "x")
    assert (claim.header.id, claim.state, claim.epoch > epoch) == (id, TrajectoryState.PAUSED, True)
    assert len(claim.tokens.token_ids) == 69
    assert claim.tokens.token_ids[5:].tobytes() == frame.token_ids.tobytes()
    assert [span.start for span in claim.tokens.spans] == [0, 5]
    assert [(a.offset, a.count) for a in claim.acks] == [(0, 5), (5, 64)]
    assert claim.snapshot.snapshot_id == snapshot(id, 0).snapshot_id
    await store.commit_step(id, claim.epoch, step(id, claim.epoch, 1, 5, 69))
    assert (await store.get(id)).num_tokens == 74


@case
async def a_reaped_worker_is_fenced_and_its_work_goes_to_the_front(store):
    await store.begin([header(n) for n in range(4)])
    claims = await store.claim("dead", 2, [], 1.0)
    ids = [c.header.id for c in claims]
    assert await store.reap("dead") == ids
    assert await store.reap("dead") == []
    again = await store.claim("alive", 4, [], 1.0)
    assert [c.header.id for c in again] == [*ids, header(2).id, header(3).id]
    assert again[0].state is TrajectoryState.ACTIVE
    for write in (
        store.append(policy(ids[0], claims[0].epoch, 0, 4)),
        store.commit_step(ids[0], claims[0].epoch, step(ids[0], claims[0].epoch, 0, 0, 0)),
        store.pause(ids[0], claims[0].epoch),
        store.finish(ids[0], claims[0].epoch, COMPLETED),
    ):
        with pytest.raises(Fenced):
            await write


@case
async def finish_commits_the_unfinished_step(store):
    id, epoch = await begun(store)
    await store.append(policy(id, epoch, 5, 10))
    await store.finish(id, epoch, COMPLETED)
    await store.finish(id, epoch, COMPLETED)
    with pytest.raises(StoreError, match="another outcome"):
        await store.finish(id, epoch, Outcome(OutcomeKind.CANCELLED))
    found = await store.get(id)
    assert (found.num_tokens, len(found.steps), found.outcome) == (15, 1, COMPLETED)
    told = await store.claim("w", 1, [id], 0.0)
    assert [c.outcome for c in told] == [COMPLETED]
    with pytest.raises(StoreError):
        await store.append(policy(id, epoch, 15, 4))


@case
async def finish_with_a_part_that_is_no_number_is_repeatable(store):
    id, epoch = await begun(store)
    for _ in range(2):
        parts = {"correct": float("nan"), "form": float("inf")}
        await store.finish(id, epoch, Outcome(OutcomeKind.COMPLETED, 1.0, parts))
    with pytest.raises(StoreError, match="another outcome"):
        await store.finish(id, epoch, COMPLETED)


@case
async def one_bad_header_does_not_hold_up_the_others(store):
    await store.begin([header(0)])
    await claim_one(store, "other")
    waiting = asyncio.create_task(store.claim("w", 4, [], 10.0))
    await asyncio.sleep(0.1)
    with pytest.raises(StoreError, match="another header"):
        await store.begin([header(1), replace(header(0), iteration=7), header(2)])
    claims = await asyncio.wait_for(waiting, 2.0)
    assert [claim.header.id for claim in claims] == [header(1).id, header(2).id]
    assert (await store.stats()).num_index_rebuilds == 0


@case
async def changes_are_seen_in_order(store):
    assert (await store.changes(0, 0.0)).items == ()
    waiting = asyncio.create_task(store.changes(0, 10.0))
    await asyncio.sleep(0.02)
    await store.begin([header(0), header(1)])
    first = await asyncio.wait_for(waiting, 5.0)
    assert set(first.items) <= {(header(n).id, TrajectoryState.QUEUED) for n in (0, 1)}
    claim = await claim_one(store)
    await store.finish(claim.header.id, claim.epoch, Outcome(OutcomeKind.CANCELLED))
    later = await store.changes(first.cursor, 1.0)
    assert later.items[-1] == (claim.header.id, TrajectoryState.FINISHED)
    assert (await store.changes(later.cursor, 0.0)).items == ()
    everything = await store.changes(0, 0.0)
    states = {header(1).id: TrajectoryState.QUEUED, header(0).id: TrajectoryState.FINISHED}
    assert dict(everything.items) == states


@case
async def reads_are_equal_before_and_after_sealing(store):
    ids = [await played(store, n, num_steps=5, turn=3000 + n, chunk=700) for n in range(3)]
    refs = [Ref(id, start, end) for id in ids for start, end in [(0, None), (4000, 4200), (7, 8)]]
    before = [await store.read(ref) for ref in refs]
    await store.pin()
    after = [await store.read(ref) for ref in refs]
    for old, new in zip(before, after, strict=True):
        assert same_arrays(old, new)
        assert old.spans == new.spans
        assert old.ref == new.ref
    only = await store.read(Ref(ids[0], 10, 20), ("token_ids",))
    assert only.token_ids.tobytes() == before[0].token_ids[10:20].tobytes()
    assert (len(only.loss_mask), len(only.rollout_logprobs), only.spans) == (0, 0, ())
    with pytest.raises(K3rlError, match="advantages"):
        await store.read(Ref(ids[0]), ("advantages",))


@case
async def spans_say_who_wrote_what(store):
    id, epoch = await begun(store)
    await store.append(policy(id, epoch, 5, 4, version=1))
    await store.append(policy(id, epoch, 9, 4, version=1))
    await store.append(policy(id, epoch, 13, 4, version=2))
    await store.finish(id, epoch, COMPLETED)
    expected = (
        Span(0, Author.ENVIRONMENT, 0, 0),
        Span(5, Author.POLICY, 1, 1),
        Span(13, Author.POLICY, 2, 2),
    )
    assert (await store.read(Ref(id))).spans == expected
    part = (await store.read(Ref(id, 10, 15))).spans
    assert part == (Span(0, Author.POLICY, 1, 1), Span(3, Author.POLICY, 2, 2))


@case
async def trajectories_are_listed_in_the_order_of_begin(store):
    await store.begin([header(n) for n in range(3)])
    claim = await claim_one(store)
    await play(store, claim)
    assert [t.id for t in await store.trajectories()] == [header(n).id for n in range(3)]
    assert [t.id for t in await store.trajectories(TrajectoryState.FINISHED)] == [claim.header.id]
    found = await store.get(claim.header.id[:12])
    assert found.id == claim.header.id
    assert found.steps[1].calls[0].output == "2\udc80"
    for prefix in ("", "zz", "0" * 32):
        with pytest.raises(StoreError):
            await store.get(prefix)


@case
async def a_new_context_opens_when_the_last_one_is_committed(store):
    id, epoch = await begun(store)
    await store.append(policy(id, epoch, 5, 4))
    with pytest.raises(StoreError, match="context 1"):
        await store.append(policy(id, epoch, 0, 4, context=1))
    await store.commit_step(id, epoch, step(id, epoch, 1, 5, 9))
    await store.append(policy(id, epoch, 0, 4, context=1))
    await store.commit_step(id, epoch, step(id, epoch, 2, 0, 4, context=1))
    await store.finish(id, epoch, COMPLETED)
    await store.pin()
    found = await store.get(id)
    assert (found.num_contexts, found.num_tokens) == (2, 23)
    assert len((await store.read(Ref(id, context=1))).token_ids) == 9
    with pytest.raises(StoreError):
        await store.read(Ref(id, context=2))


@case
async def a_branch_shares_the_prefix_by_reference(store):
    id = await played(store, 0, num_steps=3, turn=100, chunk=50)
    parent = await store.get(id)
    at = parent.steps[2].token_start + 30
    child = header(1, parent=ParentRef(id, 0, at, 2, LineageKind.BRANCH))
    with pytest.raises(StoreError, match="branch"):
        await store.begin([child])
    await store.branch(child)
    await store.branch(child)
    with pytest.raises(StoreError, match="outside"):
        await store.branch(header(2, parent=ParentRef(id, 0, 1, 2, LineageKind.BRANCH)))
    claim = await claim_one(store, "brancher")
    prefix = await store.read(Ref(id, 0, at))
    assert same_arrays(claim.tokens, prefix)
    assert claim.steps == parent.steps[:2]
    assert claim.snapshot.snapshot_id == parent.steps[1].snapshot_after
    assert claim.acks == ()
    assert (await store.get(child.id)).num_tokens == parent.steps[2].token_start
    await play(store, claim, num_steps=4, turn=100, chunk=50)
    await store.pin()
    whole = await store.read(Ref(child.id))
    assert same_arrays(await store.read(Ref(child.id, 0, at)), prefix)
    found = await store.get(child.id)
    assert found.num_tokens == len(whole.token_ids) == 5 + 3 * 105
    assert found.num_policy_tokens == 300
    assert found.steps[:2] == parent.steps[:2]


@case
async def branch_points_count_from_zero(store):
    id = await played(store, 0)
    start = (await store.get(id)).steps[-1].token_start
    for context, at, number in ((0, start + 2, -1), (-1, start + 2, 2), (0, -1, 0)):
        ref = ParentRef(id, context, at, number, LineageKind.BRANCH)
        with pytest.raises(StoreError, match="counts from 0"):
            await store.branch(header(1, parent=ref))
    assert [t.id for t in await store.trajectories()] == [id]


@case
async def the_same_branch_again_is_a_no_op_whatever_its_parent_has_done_since(store):
    id, epoch = await begun(store)
    await store.append(policy(id, epoch, 5, 4))
    await store.commit_step(id, epoch, step(id, epoch, 1, 5, 9))
    child = header(1, parent=ParentRef(id, 0, 14, 2, LineageKind.BRANCH))
    await store.branch(child)
    before = await store.get(child.id)
    await store.append(policy(id, epoch, 0, 4, context=1))
    await store.commit_step(id, epoch, step(id, epoch, 2, 0, 4, context=1))
    await store.branch(child)
    assert await store.get(child.id) == before
    with pytest.raises(StoreError, match="another header"):
        await store.branch(replace(child, iteration=3))


@case
async def samples_are_reproducible_and_without_replacement(store):
    for n in range(8):
        await store.begin([header(n)])
    claims = await store.claim("w", 8, [], 1.0)
    fault = Outcome(OutcomeKind.INFRA_FAULT)
    for n, claim in enumerate(claims):
        await store.finish(claim.header.id, claim.epoch, fault if n == 3 else COMPLETED)
    await store.pin()
    first = await store.sample(SampleRequest(5, 4, seed=1))
    await played(store, 20)
    assert await store.sample(SampleRequest(5, 4, seed=1)) == first
    assert {ref.id for ref in await store.sample(SampleRequest(0, 7, seed=2))} == {
        c.header.id for n, c in enumerate(claims) if n != 3
    }
    requests = [SampleRequest(update, 4, seed=1) for update in range(6)]
    draws = {tuple(ref.id for ref in await store.sample(request)) for request in requests}
    assert len(draws) > 1
    with pytest.raises(StoreError, match="8"):
        await store.sample(SampleRequest(0, 8, seed=1))
    await store.pin()
    assert len(await store.sample(SampleRequest(0, 8, seed=1))) == 8


@case
async def a_past_sample_can_be_drawn_again(store):
    drawn = {}
    kinds = [
        {},
        {"unit": SampleUnit.SEGMENT},
        {"unit": SampleUnit.TOKEN, "window": 40},
        {"stratify": Stratum.GROUP},
        {"reward_temperature": 0.5, "min_version": 1},
    ]
    for n in range(6):
        await played(store, n, num_steps=3, turn=90)
        if n % 2:
            seq = await store.pin()
            for number, kind in enumerate(kinds):
                refs = await store.sample(SampleRequest(3, 2, seed=9, **kind))
                drawn[seq, number] = refs
                for read in await store.read_many(refs):
                    assert len(read.token_ids) == read.ref.end - read.ref.start > 0
    assert len(drawn) == 15
    for (seq, number), refs in drawn.items():
        request = SampleRequest(3, 2, seed=9, manifest_seq=seq, **kinds[number])
        assert await store.sample(request) == refs
    with pytest.raises(StoreError, match="no manifest record"):
        await store.sample(SampleRequest(3, 2, seed=9, manifest_seq=seq + 1))
    with pytest.raises(K3rlError, match="needs a window"):
        await store.sample(SampleRequest(3, 2, seed=9, unit=SampleUnit.TOKEN))


@case
async def many_refs_are_read_like_one_by_one(store):
    ids = [await played(store, n, num_steps=3, turn=3000) for n in range(3)]
    await store.pin()
    ids.append(await played(store, 3))
    refs = [Ref(id, start, end) for id in ids for start, end in [(0, None), (7, 9), (100, 270)]]
    for fields in [(), ("token_ids", "spans"), ("loss_mask",)]:
        together = await store.read_many(refs[::-1] + refs, fields)
        for ref, read in zip(refs[::-1] + refs, together, strict=True):
            single = await store.read(ref, fields)
            assert same_arrays(read, single)
            assert (read.ref, read.spans) == (single.ref, single.spans)
    assert await store.read_many([]) == []
    with pytest.raises(StoreError, match="do not exist"):
        await store.read_many([refs[0], Ref(ids[0], 0, 10**9)])


@case
async def versions_never_repeat(store):
    checksum = digest_json("weights")
    found = await asyncio.gather(*(store.next_version(0, checksum, None) for _ in range(5)))
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert await store.next_version(3, checksum, checksum) == 6
    with pytest.raises(K3rlError, match="parent"):
        await store.next_version(9, checksum, None)
    with pytest.raises(K3rlError, match="digest"):
        await store.next_version(0, "abc", None)


@case
async def updates_are_recorded(store):
    id = await played(store, 0)
    seq = await store.pin()
    row = UpdateRow(0, 0, 1, seq, "philox:0", (id,), (0.5,), {"tokens": 3.0}, (float("nan"),), 1.0)
    await store.record_update(row)
    await store.record_update(row)
    assert await store.pin() > seq
    (found,) = await store.updates()
    assert encode(found) == encode(row)
    again = replace(row, policy_version_in=1, policy_version_out=2, loss=(0.5,))
    await store.record_update(again)
    assert [encode(one) for one in await store.updates()] == [encode(row), encode(again)]
    with pytest.raises(K3rlError, match="length"):
        await store.record_update(UpdateRow(1, 1, 2, seq, "", (id,), (), {}, (), 0.0))
    assert await store.next_version(1, digest_json("w"), None) == 3


@case
async def stats_count(store):
    await played(store, 0, num_steps=2, turn=10)
    await store.begin([header(1)])
    stats = await store.stats()
    assert stats.num_trajectories == {"finished": 1, "queued": 1}
    assert stats.num_tokens == 20
    assert stats.num_frames > 5
    assert stats.journal_bytes > 0
    seq = await store.pin()
    sealed = await store.stats()
    assert sealed.sealed_bytes > 0
    assert sealed.manifest_seq == seq
    assert sealed.journal_bytes > 0
