"""Draws: made again exactly, whatever came since; as likely as promised; windows where they may be;
shards; and what a draw costs in small and large stores."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.errors import StoreError, UserInputError
from k3rl.store.checks import check_sample
from k3rl.store.manifest import ManifestRecord
from k3rl.store.protocol import Ref, SampleRequest, SampleUnit, Stratum
from k3rl.store.sampler import shard
from k3rl.store.segment_keys import NO_VERSION
from k3rl.types import decode, encode
from tests.store.store_columns import Columns, columns, merged

TRAJECTORY, SEGMENT, TOKEN = SampleUnit.TRAJECTORY, SampleUnit.SEGMENT, SampleUnit.TOKEN
KINDS = [
    {},
    {"window": 700},
    {"unit": SEGMENT},
    {"unit": TOKEN, "window": 1},
    {"unit": TOKEN, "window": 5000, "is_inherited": True},
    {"stratify": Stratum.GROUP},
    {"unit": SEGMENT, "stratify": Stratum.VERSION},
    {"unit": TOKEN, "window": 300, "stratify": Stratum.LEVEL},
    {"stratify": Stratum.OUTCOME, "reward_temperature": 0.1},
    {"unit": SEGMENT, "reward_temperature": 0.5, "min_version": 2},
    {"min_version": 1},
    {"unit": SEGMENT, "min_version": 3},
    {"unit": TOKEN, "window": 100, "min_version": 2},
]


def lengths_of(rng, count):
    return [[int(n) for n in rng.integers(1, 20_000, rng.integers(1, 4))] for _ in range(count)]


def grown(count=5, size=40, seed=0):
    """Batches of trajectories with up to three contexts; some are branches or have no reward."""
    rng, found = np.random.default_rng(seed), []
    for seq in range(1, count + 1):
        batch = columns(seq, lengths_of(rng, size), rng, base=int(rng.integers(0, 2)) * 1000)
        batch.trajectories.reward[rng.random(size) < 0.1] = np.nan
        found.append(batch)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_past_draw_can_be_made_again(kind):
    batches = grown()
    store, drawn = Columns(), {}
    for batch in batches:
        store.take(batch)
        for update in range(3):
            request = SampleRequest(update, 8, 7, **kind)
            drawn[update, batch.seq] = store.draw(request)
    assert len({tuple(refs) for refs in drawn.values()}) > 3
    fresh = Columns(*batches)
    for (update, seq), refs in drawn.items():
        request = SampleRequest(update, 8, 7, **kind)
        assert store.draw(request, seq) == refs
        assert fresh.draw(request, seq) == refs
    # And after the files were written again in other batches and in another order.
    fresh.take(merged(6, batches[0], batches[2]), removed=(1, 3))
    fresh.take(merged(7, batches[1], fresh.catalog.batches[-1]), removed=(2, 6))
    assert len(fresh.catalog.batches) == 3
    for (update, seq), refs in drawn.items():
        assert fresh.draw(SampleRequest(update, 8, 7, **kind), seq) == refs


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**63),
    update=st.integers(0, 10**9),
    n=st.integers(0, 8),
    kind=st.sampled_from(KINDS),
    seq=st.integers(1, 5),
)
def test_what_is_drawn_is_there_and_is_what_was_asked_for(seed, update, n, kind, seq):
    store = Columns(*STORE)
    request = SampleRequest(update, n, seed, **kind)
    refs = store.draw(request, seq)
    whole = request.unit is TRAJECTORY and request.window is None
    assert sum(ref.context == 0 for ref in refs) == n if whole else len(refs) == n
    for ref in refs:
        place = store.place(ref)
        batch = place.batch
        assert batch.seq <= seq
        assert not np.isnan(batch.trajectories.reward[place.at])
        own = batch.ranges(place.at)[ref.context]
        assert 0 <= ref.start <= ref.end <= own.committed
        low = 0 if request.is_inherited or whole else own.base
        assert ref.start >= low
        if request.window is not None:
            assert ref.end - ref.start == min(request.window, own.committed - low) or (
                request.min_version is not None and ref.end - ref.start < request.window
            )
        if request.unit is SEGMENT:
            starts = batch.segments.start[segments_of(batch, place.at, ref.context)]
            assert ref.start in starts.tolist()
        for version in versions_of(batch, place.at, ref, whole):
            assert version >= (request.min_version or 0)
    if not (request.window or request.reward_temperature):
        assert len(set(refs)) == len(refs)


STORE = grown(seed=3)


def segments_of(batch, index, context):
    first = int(batch.context_at[index])
    at = first + list(batch.ranges(index)).index(context)
    return slice(int(batch.segment_at[at]), int(batch.segment_at[at + 1]))


def versions_of(batch, index, ref, is_whole):
    """The oldest version of each own segment that a ref touches."""
    which = segments_of(batch, index, ref.context)
    table = batch.segments.take(which)
    touched = (table.start < ref.end) & (table.start + table.num_tokens > ref.start)
    return table.version_min[touched | is_whole].tolist()


def chi_square(counts, expected):
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    assert expected.min() > 5
    return float((((counts - expected) ** 2) / expected).sum()) / (len(counts) - 1)


def tally(store, num_draws, key, **kind):
    found = Counter()
    for update in range(num_draws):
        found.update(map(key, store.draw(SampleRequest(update, 20, 11, **kind))))
    return found


def test_trajectories_and_segments_are_equally_likely():
    rng = np.random.default_rng(1)
    store = Columns(*(columns(s, [[4096 * 2], [100], [9000]] * 9, rng) for s in (1, 2, 3)))
    found = tally(store, 400, lambda ref: ref.id)
    assert len(found) == 81
    assert 0.5 < chi_square(list(found.values()), [8000 / 81] * 81) < 1.5
    found = tally(store, 400, lambda ref: (ref.id, ref.start), unit=SEGMENT)
    assert len(found) == 81 * 2
    # Without replacement: a little less spread than of independent draws.
    assert 0.5 < chi_square(list(found.values()), [8000 / 162] * 162) < 1.4


def test_windows_are_equally_likely_at_every_position():
    store = Columns(columns(1, [[12, 5], [3]], np.random.default_rng(0)))
    found = tally(store, 500, lambda ref: (ref.id, ref.context, ref.start), unit=TOKEN, window=4)
    long, short = store.catalog.batches[0].ids
    positions = [(long, 0, at) for at in range(9)] + [(long, 1, 0), (long, 1, 1), (short, 0, 0)]
    assert sorted(found) == sorted(positions)
    assert 0.2 < chi_square([found[p] for p in positions], [10_000 / 12] * 12) < 2.2
    # By trajectory: each half of the time, and inside it every window is as likely.
    found = tally(store, 500, lambda ref: (ref.id, ref.context, ref.start), window=4)
    expected = [10_000 / 22] * 11 + [10_000 / 2]
    assert 0.2 < chi_square([found[p] for p in positions], expected) < 2.2


def test_priorities_are_kept():
    batch = columns(1, [[50]] * 4, np.random.default_rng(0))
    batch.trajectories.reward[:] = [0.0, 1.0, 2.0, -1.0]
    other = columns(2, [[50]], np.random.default_rng(1))
    other.trajectories.reward[:] = [1.0]
    store = Columns(batch, other)
    ids = batch.ids + other.ids
    found = tally(store, 500, lambda ref: ids.index(ref.id), reward_temperature=0.7)
    weights = np.exp(np.array([0.0, 1.0, 2.0, -1.0, 1.0]) / 0.7)
    expected = 10_000 * weights / weights.sum()
    assert 0.1 < chi_square([found[n] for n in range(5)], expected) < 2.5
    given_weights = {ids[1]: 3.0, ids[4]: 1.0, ids[0]: 0.0, "0" * 32: 5.0}
    found = tally(store, 500, lambda ref: ids.index(ref.id), weights=given_weights)
    assert sorted(found) == [1, 4]
    assert chi_square([found[1], found[4]], [7500, 2500]) < 4
    request = SampleRequest(0, 1, 0, weights={ids[4]: 1.0})
    assert [ref.id for ref in store.draw(request)] == [ids[4]]
    with pytest.raises(StoreError, match="1 asked for, 0 can be drawn"):
        store.draw(request, 1)
    # Large rewards neither overflow nor vanish.
    batch.trajectories.reward[:] = [1e5, 1e5, 0.0, -1e5]
    drawn = Columns(batch, other).draw(SampleRequest(0, 50, 0, reward_temperature=0.01))
    assert {ids.index(ref.id) for ref in drawn} == {0, 1}


@pytest.mark.parametrize("stratify", list(Stratum))
@pytest.mark.parametrize("n", [3, 24, 61])
def test_strata_get_equal_shares(stratify, n):
    rng = np.random.default_rng(5)
    store = Columns(*(columns(s, lengths_of(rng, 40), rng) for s in (1, 2, 3)))

    def stratum(ref):
        batch, at = store.place(ref)
        if stratify is Stratum.VERSION:
            return int(batch.version_min[at])
        return int(getattr(batch.trajectories, stratify.value)[at])

    one_each = {ref.id: ref for ref in store.draw(SampleRequest(0, 120, 1))}
    capacity = Counter(map(stratum, one_each.values()))
    drawn = {ref.id: ref for ref in store.draw(SampleRequest(1, n, 1, stratify=stratify))}
    counts = Counter(map(stratum, drawn.values()))
    assert sum(counts.values()) == n
    least = min((counts[s] for s in capacity if counts[s] < capacity[s]), default=n)
    assert max(counts.values()) <= least + 1


def test_which_strata_get_the_rest_is_by_lot():
    rng = np.random.default_rng(5)
    store = Columns(columns(1, [[10]] * 80, rng))
    draws = [store.draw(SampleRequest(u, 3, 1, stratify=Stratum.GROUP)) for u in range(300)]
    groups = Counter(
        int(batch.trajectories.group[at])
        for refs in draws
        for batch, at in {store.place(ref) for ref in refs}
    )
    assert len(groups) == 10
    assert 0.2 < chi_square(list(groups.values()), [90] * 10) < 2.2


def test_a_floor_of_versions_keeps_what_is_new_enough():
    rng = np.random.default_rng(0)
    versions = [5, 5, 2, 6, 6, NO_VERSION, 1, 1]
    batch = columns(1, [[4096 * 5], [100], [4096, 4096]], rng, versions=versions)
    store = Columns(batch)
    mixed, silent, _ = batch.ids

    def drawn(**kind):
        return store.draw(SampleRequest(0, 200, 3, min_version=5, **kind))

    with pytest.raises(StoreError, match="200 asked for, 1 can be drawn"):
        drawn()
    refs = store.draw(SampleRequest(0, 5, 3, unit=SEGMENT, min_version=5))
    starts = {(ref.id, ref.start) for ref in refs}
    assert starts == {(mixed, 4096 * n) for n in (0, 1, 3, 4)} | {(silent, 0)}
    runs = {(ref.id, ref.start // 8192) for ref in drawn(unit=TOKEN, window=2)}
    assert runs == {(mixed, 0), (mixed, 1), (mixed, 2), (silent, 0)}
    for ref in drawn(unit=TOKEN, window=8192):
        assert (ref.id, ref.start, ref.end) in {
            (mixed, 0, 8192), (mixed, 12288, 20480), (silent, 0, 100),
        }  # fmt: skip
    with pytest.raises(StoreError, match="2 asked for, 1 can be drawn"):
        store.draw(SampleRequest(0, 2, 3, unit=SEGMENT, min_version=7))


def test_windows_reach_into_a_parents_tokens_only_when_asked():
    store = Columns(columns(1, [[50, 50]] * 3, np.random.default_rng(0), base=1000))
    refs = store.draw(SampleRequest(0, 300, 0, unit=TOKEN, window=20))
    assert {ref.start >= 1000 for ref in refs if ref.context == 0} == {True}
    asked = SampleRequest(0, 300, 0, unit=TOKEN, window=20, is_inherited=True)
    refs = store.draw(asked)
    assert min(ref.start for ref in refs) < 100
    assert max(ref.end for ref in refs if ref.context == 1) <= 50


def test_a_trajectory_is_drawn_with_all_of_its_contexts():
    store = Columns(columns(1, [[50, 7, 60]], np.random.default_rng(0)))
    (id,) = store.catalog.batches[0].ids
    assert store.draw(SampleRequest(0, 1, 0)) == [
        Ref(id, 0, 50),
        Ref(id, 0, 7, 1),
        Ref(id, 0, 60, 2),
    ]


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"n": -1}, "counts"),
        ({"window": 0}, "counts"),
        ({"unit": TOKEN}, "needs a window"),
        ({"unit": SEGMENT, "window": 5}, "takes no window"),
        ({"weights": {}, "reward_temperature": 1.0}, "exclude"),
        ({"weights": {"a": -1.0}}, "not a weight"),
        ({"weights": {"a": float("nan")}}, "not a weight"),
        ({"reward_temperature": 0.0}, "not positive"),
    ],
)
def test_draws_that_make_no_sense_are_refused(bad, match):
    good = SampleRequest(0, 1, 0)
    check_sample(good)
    with pytest.raises(UserInputError, match=match):
        check_sample(replace(good, **bad))


def test_a_request_travels():
    request = SampleRequest(
        3, 4, 2**63, 7, TOKEN, 512, True, Stratum.VERSION, 2, {"a" * 32: 0.25}, None
    )
    assert decode(SampleRequest, encode(request)) == request


def test_a_record_that_lost_trajectories_cannot_be_drawn_from():
    batches = grown(3)
    store = Columns(*batches)
    request = SampleRequest(0, 5, 0)
    store.draw(request, 1)
    for seq in (-1, 4):
        with pytest.raises(StoreError, match=f"no manifest record {seq}"):
            store.draw(request, seq)
    # Written again with one trajectory less.
    fewer = batches[0].select(np.arange(40) > 0)
    files = {t: replace(f, path=f.path + "b", num_rows=39) for t, f in batches[0].files.items()}
    store.take(replace(fewer, seq=4, files=files), removed=(1,))
    for seq in (1, 2, 3):
        with pytest.raises(StoreError, match=f"trajectories that manifest record {seq} had"):
            store.draw(request, seq)
    store.draw(request, 4)
    # Given up by a repair.
    gone = batches[1].ids[0]
    store.manifest.take(ManifestRecord(5, drops=(gone,)))
    store.catalog.take(batches[1].select(np.arange(40) > 0), removed=(2,))
    with pytest.raises(StoreError, match="record 4 had"):
        store.draw(request, 4)
    assert gone not in {ref.id for ref in store.draw(SampleRequest(0, 60, 0), 5)}


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), max_size=60),
    num_ranks=st.integers(1, 9),
)
def test_shards_are_balanced_and_complete(sizes, num_ranks):
    refs = [Ref(f"{n:032x}", 10, 10 + size, n % 3) for n, size in enumerate(sizes)]
    parts = shard(refs, num_ranks)
    assert parts == shard(list(refs), num_ranks)
    assert sorted(ref.id for part in parts for ref in part) == [ref.id for ref in refs]
    for part in parts:
        assert part == sorted(part, key=lambda ref: ref.id)
    loads = [sum(ref.end - ref.start for ref in part) for part in parts]
    if sizes:
        bound = max(sum(sizes) / num_ranks, max(sizes))
        assert max(loads) - min(loads) <= max(sizes)
        ordered = sorted(sizes, reverse=True)
        if len(ordered) > num_ranks:
            bound = max(bound, ordered[num_ranks - 1] + ordered[num_ranks])
        assert max(loads) <= 4 / 3 * bound + 1e-9


def test_shards_need_ends_and_ranks():
    with pytest.raises(UserInputError, match="0 ranks"):
        shard([], 0)
    with pytest.raises(UserInputError, match="no end"):
        shard([Ref("a" * 32)], 2)


@pytest.mark.parametrize("num_tokens", [10**6, 10**8])
@pytest.mark.parametrize("kind", [{"unit": SEGMENT}, {"unit": TOKEN, "window": 4096}, {}], ids=str)
def test_a_draw_costs_the_same_in_any_store(num_tokens, kind):
    """Bar: 2 ms for 64 elements; measured in CPU time, as machines that test are busy."""
    rng = np.random.default_rng(0)
    per_batch = num_tokens // 10
    store = Columns(*(columns(s, [[10_000]] * (per_batch // 10_000), rng) for s in range(1, 11)))
    assert sum(int(b.segments.num_tokens.sum()) for b in store.catalog.batches) == num_tokens
    store.draw(SampleRequest(0, 64, 0, **kind))
    spent = []
    for update in range(20):
        began = time.process_time()
        store.draw(SampleRequest(update, 64, 0, **kind))
        spent.append(time.process_time() - began)
    assert sorted(spent)[10] < 3 * 0.002
