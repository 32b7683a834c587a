"""Blobs: what is put is what is got, whole or not at all."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.blobs import BlobStore
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
from k3rl.blobs import BlobStore
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
