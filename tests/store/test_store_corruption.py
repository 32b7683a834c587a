"""One damaged byte of every class: named by file, offset or field; set aside by a repair, not lost.

What can be repaired opens again with all that the damage did not touch; the rest stays as it was.
"""

import asyncio
import json
import shutil
from dataclasses import dataclass

import pyarrow.parquet as pq
import pytest

from k3rl.blobs import BlobStore
from k3rl.errors import CorruptData
from k3rl.store.fsck import check
from k3rl.store.journal import HEADER_BYTES
from k3rl.store.manifest import load_manifest
from k3rl.store.protocol import Ref, UpdateRow
from k3rl.store.reader import StoreReader
from k3rl.store.recovery import RootLock, recover
from k3rl.store.scan import Scan
from k3rl.types import digest_json
from tests.store.store_builders import claim_one, header, play, played, policy, service
from tests.store.store_faults import flip

LAYERS = (b"layer " * 400, b"what a layer names " * 50)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, valkey):
    """Two sealed batches, then a journal of a paused and an active trajectory; two blobs."""
    root = tmp_path_factory.mktemp("whole") / "store"

    async def go():
        blobs = BlobStore(root / "blobs")
        layer, _ = (blobs.put(content) for content in LAYERS)
        async with service(root, valkey) as store:
            await store.begin([header(0)])
            claim = await claim_one(store)
            await play(store, claim, layers=lambda: [layer])
            row = UpdateRow(0, 0, 1, 0, "k", (claim.header.id,), (1.0,), {}, (0.5,), 1.0)
            await store.record_update(row)
            await store.next_version(0, digest_json("w"), None)
            await store.pin()
            await played(store, 1)
        async with service(root, valkey) as store:
            await store.begin([header(2), header(3)])
            for claim in await store.claim("w", 2, [], 5.0):
                acked = await play(store, claim, finish=False)
                await store.append(policy(claim.header.id, claim.epoch, acked, 20))
            await store.pause(claim.header.id, claim.epoch)

    asyncio.run(go())
    assert check(root).findings == []
    return root


@dataclass
class Damage:
    """`spoil` damages `file`; what is found must name one of `fields` and `offset` (None: any)."""

    file: object
    spoil: object
    fields: tuple[str, ...]
    offset: int | None = None


def at(place):
    return lambda path: flip(path, place)


def added(data):
    return lambda path: path.write_bytes(path.read_bytes() + data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def in_journal(part):
    """In a frame with tokens in the middle of the last file that has any."""

    def find(root):
        path = sorted((root / "journal").glob("J-*.tj"))[-1]
        frames = list(Scan(path))
        place = frames[len(frames) // 2].place
        if part == "trailing":
            size = path.stat().st_size
            return Damage(path, added(b"?" * 100), ("magic",), size)
        offsets = {"magic": 0, "version": 4, "kind": 5, "flags": 6, "length": 8, "sequence": 12}
        offsets |= {"header checksum": 20, "payload": HEADER_BYTES + 9}
        offsets |= {"checksum": place.num_bytes - 1}
        fields = ("magic",) if part == "magic" else ("header",)
        fields = ("payload",) if part in ("payload", "checksum") else fields
        return Damage(path, at(place.offset + offsets[part]), fields, place.offset)

    return find


def in_manifest(part):
    """In the record before the last."""

    def find(root):
        path = sorted((root / "_log").iterdir())[-2]
        data = path.read_bytes()
        assert json.loads(data)["seq"] == 1
        places = {
            "self_hash": b'"self_hash":"',
            "prev_hash": b'"prev_hash":"',
            "body": b'"adds":[{"',
        }
        if part == "end":
            return Damage(path, cut, ("record", "self_hash"))
        return Damage(
            path, at(data.index(places[part]) + len(places[part]) + 1), ("self_hash", "record")
        )

    return find


def sealed(root, table):
    """The first sealed file of a table."""
    manifest, _ = load_manifest(root)
    (_, file), *_ = manifest.files_of(table)
    return root / file.path


def in_page(table, column):
    """In the first data page of a column."""

    def find(root):
        path = sealed(root, table)
        group = pq.read_metadata(path).row_group(0)
        chunks = [group.column(n) for n in range(group.num_columns)]
        (chunk, *_) = [c for c in chunks if c.path_in_schema.split(".")[0] == column]
        middle = chunk.data_page_offset + chunk.total_compressed_size // 2
        end = chunk.data_page_offset + chunk.total_compressed_size - 1
        return Damage(path, at(min(middle, end)), (chunk.path_in_schema, column))

    return find


def in_file(table, part):
    """In what of a Parquet file is no page."""

    def find(root):
        path = sealed(root, table)
        size = path.stat().st_size
        length = int.from_bytes(path.read_bytes()[-8:-4], "little")
        spoil = {
            "magic": at(1),
            "footer": at(size - 8 - length // 2),
            "footer length": at(size - 6),
            "end": at(size - 2),
            "trailing": added(b"\0"),
            "cut": cut,
        }[part]
        return Damage(path, spoil, ("footer", "blake3", "num_bytes", "k3rl.schema", "schema_id"))

    return find


def in_blob(part, number=0):
    def find(root):
        blobs = BlobStore(root / "blobs")
        digests = {blobs.get(digest): digest for digest in blobs.digests()}
        path = blobs.path(digests[LAYERS[number]])
        size = path.stat().st_size
        spoil = {
            "magic": at(1),
            "middle": at(size // 2),
            "end": at(size - 1),
            "cut": cut,
            "empty": lambda path: path.write_bytes(b""),
        }[part]
        return Damage(path, spoil, ("blob",))

    return find


JOURNAL = ["magic", "version", "kind", "flags", "length", "sequence", "header checksum", "payload"]
JOURNAL += ["checksum", "trailing"]
PAGES = [
    *[("segments", c) for c in ("token_ids", "rollout_logprobs", "loss_mask", "spans")],
    *[("segments", "content_hash"), ("steps", "token_end"), ("trajectories", "contexts_json")],
    *[("snapshots", "tree_digest"), ("updates", "loss"), ("versions", "checksum")],
]
FILES = ["magic", "footer", "footer length", "end", "trailing", "cut"]
BLOBS = ["magic", "middle", "end", "cut", "empty"]
REPAIRABLE = {
    **{f"journal: {part}": in_journal(part) for part in JOURNAL},
    **{f"{table}: page of {column}": in_page(table, column) for table, column in PAGES},
    **{f"segments: {part}": in_file("segments", part) for part in FILES},
    **{f"trajectories: {part}": in_file("trajectories", part) for part in FILES[:3]},
    **{f"layer: {part}": in_blob(part) for part in BLOBS},
    "blob that a layer names": in_blob("middle", 1),
}
MANIFEST = ["self_hash", "prev_hash", "body", "end"]


def tokens(root):
    reader = StoreReader(root)
    return {t.id: reader.read(Ref(t.id)).token_ids.tobytes() for t in reader.trajectories()}


def finding_of(report, damage):
    (found,) = [one for one in report.findings if one.file == str(damage.file)]
    assert found.field in damage.fields, found
    assert damage.offset in (None, found.offset), found
    return found


@pytest.mark.parametrize("name", REPAIRABLE)
def test_a_damaged_byte_is_named_and_set_aside(name, whole, tmp_path):
    root = shutil.copytree(whole, tmp_path / "store")
    before, damage = tokens(root), REPAIRABLE[name](root)
    damage.spoil(damage.file)
    spoiled = damage.file.read_bytes()
    finding_of(check(root), damage)
    found = finding_of(check(root, repair=True), damage)
    assert found.repaired
    aside = [path.read_bytes() for path in (root / "quarantine").iterdir()]
    is_journal = damage.file.parent.name == "journal"
    assert (
        any(part in spoiled[found.offset :] for part in aside) if is_journal else spoiled in aside
    )
    again = check(root).findings
    assert [one.field.split(" ")[0] for one in again] == ["layer"] * name.startswith("layer")
    lock = RootLock(root)
    recover(root, True)
    lock.release()
    after = tokens(root)
    gone = before.keys() - after.keys()
    assert all(id in found.repaired for id in gone), gone
    kept = {id: data for id, data in after.items() if before[id].startswith(data)}
    assert kept == after
    assert len(after) >= 2


@pytest.mark.parametrize("part", MANIFEST)
def test_a_damaged_record_is_named_and_left_alone(part, whole, tmp_path):
    root = shutil.copytree(whole, tmp_path / "store")
    damage = in_manifest(part)(root)
    damage.spoil(damage.file)
    spoiled = damage.file.read_bytes()
    finding_of(check(root), damage)
    assert not finding_of(check(root, repair=True), damage).repaired
    assert damage.file.read_bytes() == spoiled
    lock = RootLock(root)
    with pytest.raises(CorruptData, match="restore it from a copy") as caught:
        recover(root, True)
    lock.release()
    assert caught.value.file == str(damage.file)


def test_a_blob_that_was_set_aside_can_be_put_again(whole, tmp_path):
    root = shutil.copytree(whole, tmp_path / "store")
    damage, blobs = in_blob("middle")(root), BlobStore(root / "blobs")
    damage.spoil(damage.file)
    # As long as it lies there it passes for stored.
    digest = blobs.put(LAYERS[0])
    with pytest.raises(CorruptData, match="blob"):
        blobs.get(digest)
    check(root, repair=True)
    assert blobs.get(blobs.put(LAYERS[0])) == LAYERS[0]
    assert check(root).findings == []
