"""Frames: what a reader makes of every cut and every flipped byte; group commit; write errors."""

import asyncio
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rl.errors import CorruptData, SchemaTooNew
from k3rl.store.events import KIND_OF, FileStart, Paused
from k3rl.store.journal import Journal, JournalWriter, event_of, file_name, pack, parse
from k3rl.store.scan import SECTOR_BYTES, Scan
from k3rl.types import TokenFrame, encode
from tests.store.store_builders import policy

ID = "ab" * 16


def events(count):
    return [policy(ID, 1, 8 * n, 8) if n % 2 else Paused(ID, n) for n in range(count)]


def packed(events):
    return [(KIND_OF[type(event)], encode(event)) for event in events]


@pytest.fixture(scope="module")
def journal_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("journal")
    writer = JournalWriter(folder, 3, 10)
    places = [place for _, place in writer.write(packed(events(6)))]
    writer.close()
    path = folder / file_name(3, 0)
    return path, path.read_bytes(), places


def test_frames_come_back_in_order(journal_file):
    path, _, places = journal_file
    frames = list(Scan(path))
    assert [frame.sequence for frame in frames] == list(range(10, 17))
    assert event_of(frames[0], "") == FileStart(3, 0)
    assert [frame.place for frame in frames[1:]] == places
    found = [event_of(frame, "") for frame in frames[1:]]
    assert [type(event) for event in found] == [type(event) for event in events(6)]
    frame = event_of(frames[2], "")
    assert frame.content_hash() == events(6)[1].content_hash()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_anywhere_loses_only_the_frame_it_cuts(journal_file, tmp_path_factory, data):
    _, whole, places = journal_file
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("cut") / file_name(3, 0)
    path.write_bytes(whole[:cut])
    scan = Scan(path)
    frames = list(scan)
    ends = [places[0].offset] + [place.offset + place.num_bytes for place in places]
    whole_frames = [end for end in ends if end <= cut]
    assert len(frames) == len(whole_frames)
    assert scan.good_bytes == max(whole_frames, default=0)
    assert scan.good_bytes + scan.torn_bytes == cut
    shutil.rmtree(path.parent)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_anywhere_is_named(journal_file, tmp_path_factory, data):
    _, whole, places = journal_file
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flip") / file_name(3, 0)
    path.write_bytes(damaged)
    with pytest.raises(CorruptData) as caught:
        list(Scan(path))
    starts = [0] + [place.offset for place in places]
    assert caught.value.offset == max(start for start in starts if start <= at)
    assert caught.value.file == str(path)
    shutil.rmtree(path.parent)


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory):
    """Of three frames each, the first of them many sectors long."""
    folder = tmp_path_factory.mktemp("groups")
    writer = JournalWriter(folder, 3, 10)
    group = [policy(ID, 1, 0, 400), Paused(ID, 1), policy(ID, 1, 400, 8)]
    places = [place for _ in range(2) for _, place in writer.write(packed(group))]
    writer.close()
    path = folder / file_name(3, 0)
    return path.read_bytes(), places


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_sectors_that_were_never_written_are_told_from_damage(two_groups, tmp_path_factory, data):
    """Zeros in the last group are a torn end; in a group with another behind it they are damage."""
    whole, places = two_groups
    starts = [0, *(place.offset for place in places)]
    zeroed = bytearray(whole)
    sector = data.draw(st.integers(0, (len(whole) - 1) // SECTOR_BYTES)) * SECTOR_BYTES
    is_last = sector + SECTOR_BYTES > places[3].offset
    # A sector that the last group shares with the one before holds what that one wrote.
    low = max(sector, places[3].offset) if is_last else sector
    high = min(sector + SECTOR_BYTES, len(whole))
    zeroed[low:high] = bytes(high - low)
    first_hit = max(start for start in starts if start <= low)
    path = tmp_path_factory.mktemp("zero") / file_name(3, 0)
    path.write_bytes(zeroed)
    scan = Scan(path)
    if is_last:
        assert [frame.place.offset for frame in scan] == [s for s in starts if s < first_hit]
        assert scan.good_bytes == first_hit
        assert scan.torn_bytes == len(whole) - first_hit
    else:
        with pytest.raises(CorruptData) as caught:
            list(scan)
        assert caught.value.offset == first_hit
    shutil.rmtree(path.parent)


def test_a_missing_frame_is_named(tmp_path):
    kind = KIND_OF[Paused]
    frames = [pack(kind, n, encode(Paused(ID, n))) for n in (1, 2, 4)]
    path = tmp_path / file_name(1, 0)
    path.write_bytes(b"".join(frames))
    with pytest.raises(CorruptData, match="4 follows 2"):
        list(Scan(path))


def test_a_newer_frame_version_is_refused():
    frame = bytearray(pack(KIND_OF[Paused], 1, encode(Paused(ID, 1))))
    import struct
    import zlib

    frame[4] = 2
    frame[20:24] = struct.pack("<I", zlib.crc32(frame[:20]))
    with pytest.raises(SchemaTooNew, match="version 2"):
        parse(bytes(frame), 0, "J")


def test_files_rotate_and_sequences_go_on(tmp_path):
    writer = JournalWriter(tmp_path, 1, 1, file_bytes=2000)
    for _ in range(10):
        writer.write(packed(events(4)))
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    sequences = [frame.sequence for path in files for frame in Scan(path)]
    assert sequences == list(range(1, len(sequences) + 1))


def test_writers_share_syncs_and_effects_come_in_order(tmp_path):
    seen, ended = [], []

    async def go():
        journal = Journal(
            JournalWriter(tmp_path, 1, 1), lambda _, s, p: seen.append((s, p)), ended.append
        )
        frames = [policy(ID, 1, n, 1) for n in range(500)]
        futures = [journal.submit(frame) for frame in frames]
        assert seen == []
        futures[7].cancel()  # who waits may go away: the write goes on
        await asyncio.gather(*futures, return_exceptions=True)
        await journal.aclose()
        assert [frame.offset for frame in ended] == [frame.offset for frame in frames]
        return journal

    journal = asyncio.run(go())
    assert [sequence for sequence, _ in seen] == list(range(2, 502))
    assert journal.num_syncs < 20
    frames = list(Scan(tmp_path / file_name(1, 0)))[1:]
    assert [frame.place for frame in frames] == [place for _, place in seen]
    assert all(frame.kind == KIND_OF[TokenFrame] for frame in frames)
