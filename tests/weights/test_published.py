"""Published versions: whole and verified, or one clear error."""

import pytest
import zstandard

from k3rl.blobs import BlobStore
from k3rl.errors import WeightsError
from k3rl.types import canonical_json
from k3rl.weights.blob import fetch, publish

DATA = bytes(range(256)) * 40


@pytest.fixture
def blobs(tmp_path):
    return BlobStore(tmp_path / "blobs")


def test_what_is_fetched_is_what_was_published(blobs):
    manifest = publish(blobs, DATA, 4, 2)
    assert canonical_json(manifest)
    assert (manifest["policy_version"], manifest["parent"]) == (4, 2)
    assert manifest["num_bytes"] == len(DATA)
    assert fetch(blobs, manifest) == DATA


def test_publishing_again_gives_the_same_manifest(blobs):
    assert publish(blobs, DATA, 1, 0) == publish(blobs, DATA, 1, 0)
    assert len(list(blobs.digests())) == 1


@pytest.mark.parametrize(("version", "parent"), [(3, 3), (3, 4), (0, -1)])
def test_a_version_lies_above_its_parent(blobs, version, parent):
    with pytest.raises(WeightsError, match=f"policy version {version}: its parent {parent}"):
        publish(blobs, DATA, version, parent)


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {},
        {"policy_version": -1},
        {"policy_version": True},
        {"policy_version": 1.0},
        {"parent": "0"},
        {"blob": "../../etc/passwd"},
        {"blob": "A" * 64},
        {"checksum": None},
        {"num_bytes": -5},
        {"extra": 1},
    ],
    ids=str,
)
def test_what_is_no_manifest_is_refused_in_one_line(blobs, broken):
    manifest = publish(blobs, DATA, 1, 0)
    wrong = {**manifest, **broken} if isinstance(broken, dict) and broken else broken
    with pytest.raises(WeightsError, match="not a manifest") as caught:
        fetch(blobs, wrong)
    assert "\n" not in str(caught.value)
    assert "policy version" in str(caught.value)


def message_of(blobs, manifest):
    with pytest.raises(WeightsError) as caught:
        fetch(blobs, manifest)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"policy version 7: blob {manifest['blob']}")
    return text


def test_a_missing_blob_is_named(blobs):
    manifest = publish(blobs, DATA, 7, 0)
    blobs.path(manifest["blob"]).unlink()
    assert "missing" in message_of(blobs, manifest)


@pytest.mark.parametrize("content", [DATA[:-1], b"", DATA[:-1] + b"x"], ids=["cut", "empty", "bit"])
def test_other_bytes_under_the_blob_s_name_are_refused(blobs, content):
    manifest = publish(blobs, DATA, 7, 0)
    blobs.path(manifest["blob"]).write_bytes(zstandard.compress(content))
    assert "corrupt" in message_of(blobs, manifest)


def test_bytes_that_are_no_frame_are_refused(blobs):
    manifest = publish(blobs, DATA, 7, 0)
    blobs.path(manifest["blob"]).write_bytes(b"junk")
    assert "corrupt" in message_of(blobs, manifest)


def test_a_wrong_checksum_or_size_is_refused(blobs):
    manifest = publish(blobs, DATA, 7, 0)
    assert "checksum" in message_of(blobs, {**manifest, "checksum": "0" * 64})
    assert "10241" in message_of(blobs, {**manifest, "num_bytes": len(DATA) + 1})
