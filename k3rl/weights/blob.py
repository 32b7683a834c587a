"""Policy versions as whole blobs: what a learner publishes is what an engine verifies and applies.

A manifest is a JSON object:

    {"policy_version": 4, "parent": 3, "blob": <digest>, "checksum": <digest>, "num_bytes": 1703936}

`blob` names the bytes in the blob store and `checksum` is the blake3 of the bytes to apply; of a
version that is published whole they are equal. A crash before the blob is durable leaves no
manifest, so a manifest always names a whole version. That versions only rise is the business of
whoever applies them.
"""

from __future__ import annotations

from typing import NoReturn

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData, StoreError, WeightsError
from k3rl.types import JSON, Digest, JsonObject, digest_bytes

FIELDS = ("policy_version", "parent", "blob", "checksum", "num_bytes")
DIGEST_DIGITS = 64


def publish(blobs: BlobStore, data: bytes, version: int, parent: int) -> JsonObject:
    """Store `data` durably as policy version `version`, made from `parent`; returns its manifest.

    Raises WeightsError for a version that does not lie above its parent, StoreError when the disk
    refuses.
    """
    if not 0 <= parent < version:
        raise WeightsError(f"policy version {version}: its parent {parent} does not lie below it")
    blob = blobs.put(data)
    return manifest_of(version, parent, blob, len(data))


def manifest_of(version: int, parent: int, blob: Digest, num_bytes: int) -> JsonObject:
    """The manifest of a whole version that lies in the blob store."""
    return dict(zip(FIELDS, (version, parent, blob, blob, num_bytes), strict=True))


def fetch(blobs: BlobStore, manifest: JSON) -> bytes:
    """The bytes of a published version, verified. Raises WeightsError naming version and blob."""
    check_manifest(manifest)
    blob = manifest["blob"]
    where = f"policy version {manifest['policy_version']}: blob {blob}"
    if not blobs.has(blob):
        raise WeightsError(f"{where} is missing: no file {blobs.path(blob)}")
    try:
        data = blobs.get(blob)
    except CorruptData as error:
        raise WeightsError(f"{where} is corrupt: {error.detail}") from error
    except StoreError as error:
        raise WeightsError(f"{where} cannot be read: {error}") from error
    if len(data) != manifest["num_bytes"]:
        raise WeightsError(f"{where} has {len(data)} bytes, not {manifest['num_bytes']}")
    if digest_bytes(data) != manifest["checksum"]:
        raise WeightsError(f"{where} does not match the checksum {manifest['checksum']}")
    return data


def check_manifest(manifest: JSON) -> None:
    """Raise WeightsError unless `manifest` has the fields of one, with values of their kinds."""
    if not isinstance(manifest, dict) or set(manifest) != set(FIELDS):
        _refuse(manifest, f"its fields must be {', '.join(FIELDS)}")
    for name in ("policy_version", "parent", "num_bytes"):
        value = manifest[name]
        if type(value) is not int or value < 0:
            _refuse(manifest, f"{name} {value!r} is not a count")
    for name in ("blob", "checksum"):
        value = manifest[name]
        is_hex = isinstance(value, str) and not set(value) - set("0123456789abcdef")
        if not is_hex or len(value) != DIGEST_DIGITS:
            _refuse(manifest, f"{name} {value!r} is not a digest")


def _refuse(manifest: JSON, problem: str) -> NoReturn:
    known = manifest if isinstance(manifest, dict) else {}
    version, blob = known.get("policy_version"), known.get("blob")
    raise WeightsError(f"policy version {version!r}, blob {blob!r}: not a manifest: {problem}")
