"""Blobs: what is put is what is got, whole or not at all."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.blobs import BLOCK_BYTES, BlobStore
from k3rl.errors import CorruptData, StoreError
from k3rl.types import digest_bytes


@given(data=st.binary(max_size=5000))
def test_round_trip(tmp_path_factory, data):
    blobs = BlobStore(tmp_path_factory.mktemp("blobs"))
    digest = blobs.put(data)
    assert digest == digest_bytes(data)
    assert blobs.get(digest) == data
    assert blobs.put(data) == digest
    assert list(blobs.digests()) == [digest]


def test_missing_and_corrupt_blobs_are_named(tmp_path):
    blobs = BlobStore(tmp_path)
    with pytest.raises(StoreError, match="no such blob"):
        blobs.get("0" * 64)
    digest, other = blobs.put(b"hello" * 100), blobs.put(b"world")
    blobs.path(digest).write_bytes(blobs.path(other).read_bytes())
    with pytest.raises(CorruptData, match="does not match its digest"):
        blobs.get(digest)
    blobs.path(digest).write_bytes(b"junk")
    with pytest.raises(CorruptData, match=digest[2:]):
        blobs.get(digest)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path):
    """A file-size limit stands for the full disk: the write fails in the middle of the blob."""
    code = """
import os, pathlib, resource, signal, sys
from k3rl.blobs import BLOCK_BYTES, BlobStore
from k3rl.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
blobs = BlobStore(pathlib.Path(sys.argv[1]))
try:
    blobs.put(os.urandom(100_000))
except StoreError as error:
    print(error)
print(len(list(blobs.digests())), [p.name for p in pathlib.Path(sys.argv[1]).rglob('.tmp*')])
"""
    import sys

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    first, second = done.stdout.splitlines()
    assert "cannot store a blob: File too large" in first
    assert second == "0 []"


def test_many_contents_are_stored_in_blocks_and_only_once(tmp_path):
    blobs = BlobStore(tmp_path)
    bodies = [bytes([number]) * number * 1000 for number in range(150)]
    known = blobs.put(bodies[7])
    opened = []

    def content(data):
        def blocks():
            opened.append(digest_bytes(data))
            return (data[at : at + 700] for at in range(0, len(data), 700))

        return blocks

    blobs.put_all({digest_bytes(data): content(data) for data in bodies})
    assert sorted([*opened, known]) == sorted(map(digest_bytes, bodies))
    assert [blobs.get(digest_bytes(data)) for data in bodies] == bodies
    assert b"".join(blobs.blocks(known)) == bodies[7]
    assert max(map(len, blobs.blocks(blobs.put(bytes(5 << 20))))) <= BLOCK_BYTES


def test_a_content_that_is_not_what_its_digest_says_is_not_stored(tmp_path):
    blobs = BlobStore(tmp_path)
    wrong = digest_bytes(b"right")
    with pytest.raises(StoreError, match="changed while it was stored"):
        blobs.put_all({wrong: lambda: [b"wr", b"ong"]})
    assert list(blobs.digests()) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("num_blobs", [1, 3, 200])
def test_a_blob_is_durable_before_it_is_named(tmp_path, monkeypatch, num_blobs):
    """The order of the real calls: data to disk, then the name, then the name to disk."""
    calls = []

    def note(name, call):
        def noted(first, *rest):
            place = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
            calls.append((name, str(place), *map(str, rest)))
            return call(first, *rest)

        monkeypatch.setattr(os, name, noted)

    note("fsync", os.fsync)
    note("replace", os.replace)
    blobs = BlobStore(tmp_path)
    bodies = {digest_bytes(b"%d" % n): b"%d" % n for n in range(num_blobs)}
    blobs.put_all({digest: lambda data=data: [data] for digest, data in bodies.items()})
    named = [call for call in calls if call[0] == "replace"]
    assert {call[2] for call in named} == {str(blobs.path(digest)) for digest in bodies}
    for call in named:
        before, after = calls[: calls.index(call)], calls[calls.index(call) :]
        assert ("fsync", call[1]) in before
        assert ("fsync", str(Path(call[2]).parent)) in after
