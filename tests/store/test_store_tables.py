"""Segments are cut as promised; sealed files carry ids, encodings and checksums as promised."""

import asyncio

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.errors import CorruptData, SchemaTooNew, StoreError
from k3rl.store.events import VersionRow
from k3rl.store.manifest import SealedFile
from k3rl.store.parquet import open_sealed, read_rows, write_sealed
from k3rl.store.protocol import SEGMENT_SLACK_TOKENS, SEGMENT_TOKENS
from k3rl.store.schemas import check_schema_id, schema
from k3rl.store.sealing import segment_ranges
from k3rl.store.tables import to_table
from k3rl.types import digest_json
from tests.store.store_builders import played


@given(
    start=st.integers(0, 100),
    lengths=st.lists(st.integers(1, 9000), max_size=12),
    rest=st.integers(0, 9000),
)
def test_segments_tile_and_end_at_steps_when_one_is_near(start, lengths, rest):
    ends = (start + np.cumsum(lengths)).tolist()
    end = (ends[-1] if ends else start) + rest
    ranges = segment_ranges(start, end, ends)
    assert [low for low, _ in ranges] == [start, *(high for _, high in ranges)][: len(ranges)]
    assert (ranges[-1][1] if ranges else start) == end
    for low, high in ranges:
        assert 0 < high - low <= SEGMENT_TOKENS
        limit = low + SEGMENT_TOKENS
        near = [e for e in ends if limit - SEGMENT_SLACK_TOKENS <= e <= limit and e <= end]
        if high != end:
            assert high == (max(near) if near else limit)


def test_sealed_files_are_laid_out_as_promised(tmp_path, open_store):
    async def go():
        async with open_store() as store:
            for n in range(3):
                await played(store, n, num_steps=4, turn=9000, chunk=3000)
            await store.pin()

    asyncio.run(go())
    (path,) = (tmp_path / "store" / "sealed").glob("segments-*.parquet")
    file = pq.ParquetFile(path)
    assert [f.metadata[b"PARQUET:field_id"] for f in file.schema_arrow] == [
        str(n).encode() for n in range(1, len(schema("segments")) + 1)
    ]
    groups = [file.metadata.row_group(g) for g in range(file.metadata.num_row_groups)]
    assert [g.num_rows for g in groups[:-1]] == [4] * (len(groups) - 1)
    columns = {c["path_in_schema"]: c for c in groups[0].to_dict()["columns"]}
    ids = columns["token_ids.list.element"]
    assert (ids["compression"], "PLAIN" in ids["encodings"]) == ("ZSTD", True)
    assert not any("DICTIONARY" in encoding for encoding in ids["encodings"])
    logprobs = columns["rollout_logprobs.list.element"]["encodings"]
    assert "BYTE_STREAM_SPLIT" in logprobs
    rows = file.read(columns=["trajectory", "context", "segment"]).to_pylist()
    keys = [(row["trajectory"], row["context"], row["segment"]) for row in rows]
    assert keys == sorted(keys)


def versions_file(root):
    (root / "sealed").mkdir(parents=True, exist_ok=True)
    rows = [VersionRow(n, n - 1, digest_json(n), None) for n in range(1, 4)]
    return write_sealed(root, "versions-1.parquet", "versions", [to_table("versions", rows)])


def test_a_sealed_file_is_never_replaced(tmp_path):
    file = versions_file(tmp_path)
    before = (tmp_path / file.path).read_bytes()
    with pytest.raises(StoreError, match="File exists"):
        versions_file(tmp_path)
    assert (tmp_path / file.path).read_bytes() == before
    assert [p.name for p in (tmp_path / "sealed").iterdir()] == ["versions-1.parquet"]


def test_a_newer_schema_is_refused(tmp_path):
    file = versions_file(tmp_path)
    assert len(read_rows(tmp_path, file)) == 3
    newer = SealedFile(file.path, "versions", "k3rl.versions/2.0", 3, file.num_bytes, file.blake3)
    with pytest.raises(SchemaTooNew, match=r"k3rl\.versions/2\.0"):
        open_sealed(tmp_path, newer)
    check_schema_id("f", "versions", "k3rl.versions/1.7")
    with pytest.raises(SchemaTooNew):
        check_schema_id("f", "versions", "k3rl.updates/1.0")


def test_damage_to_a_file_is_named(tmp_path):
    file = versions_file(tmp_path)
    path = tmp_path / file.path
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptData, match="footer"):
        open_sealed(tmp_path, file)
    path.unlink()
    with pytest.raises(CorruptData, match="missing"):
        open_sealed(tmp_path, file)
