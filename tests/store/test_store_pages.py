"""What is decoded straight from pages is what pyarrow reads; damage never comes out as tokens."""

from contextlib import suppress

import duckdb
import numpy as np
import pandas
import polars
import pyarrow.parquet as pq
import pytest

from k3rl.errors import CorruptData
from k3rl.store.open_files import SealedFiles
from k3rl.store.pages import Unusual
from k3rl.store.parquet import COMPACTED, SEALED, write_sealed
from k3rl.store.record import Extent, Piece, Row
from k3rl.store.tables import to_table
from k3rl.store.tokens import FIELDS, TokenFiles, content_hash
from k3rl.store.tokens import Tokens as Arrays
from k3rl.types import Author, Segment, Span

ID = "ab" * 16


def made_segment(rng, index, num_tokens, is_mixed):
    """Turns of random lengths when `is_mixed`, else one author."""
    ids = (rng.zipf(1.2, num_tokens) % 160_000).astype(np.int32)
    cuts = rng.choice(np.arange(1, num_tokens), min(num_tokens // 9, 40), replace=False)
    starts = [0, *sorted(cuts.tolist())] if is_mixed else [0]
    mask, spans = np.zeros(num_tokens, bool), []
    for n, start in enumerate(starts):
        author = (Author.POLICY, Author.ENVIRONMENT)[n % 2]
        mask[start:] = author is Author.POLICY
        spans.append(Span(start, author, int(rng.integers(9)), int(rng.integers(9))))
    logprobs = np.where(mask, -rng.exponential(size=num_tokens), np.nan).astype(np.float32)
    digest = content_hash(Arrays(ids, mask, logprobs, ()))
    return Segment(ID, 0, index, index * 5000, ids, mask, logprobs, tuple(spans), digest)


def sealed(root, layout, seed=0):
    """A file of 9 segments; (its entry, the segments)."""
    rng = np.random.default_rng(seed)
    sizes = [4096, 1, 4096, 3900, 17, 2, 4096, 4000, 300]
    segments = [made_segment(rng, n, size, n % 3 > 0) for n, size in enumerate(sizes)]
    (root / "sealed").mkdir()
    tables = [to_table("segments", segments)]
    return write_sealed(root, "segments-1.parquet", "segments", tables, layout), segments


def piece(file, segment, index, layout):
    place = Row(file.path, index // layout.group_segments, index % layout.group_segments)
    count = len(segment.token_ids)
    return Piece(Extent(segment.token_start, count, segment.content_hash, place), 0, count)


@pytest.mark.parametrize("layout", [SEALED, COMPACTED])
def test_rows_from_pages_are_those_that_pyarrow_reads(tmp_path, layout, monkeypatch):
    file, segments = sealed(tmp_path, layout)
    files = SealedFiles(tmp_path, {file.path: file}.get)
    rows = pq.read_table(tmp_path / file.path, columns=list(FIELDS)).to_pylist()
    monkeypatch.setattr(files, "read", None)  # whatever pages cannot give, fails
    for n, (segment, row) in enumerate(zip(segments, rows, strict=True)):
        found = TokenFiles(tmp_path, files).load([piece(file, segment, n, layout)])
        assert found.token_ids.tolist() == row["token_ids"] == segment.token_ids.tolist()
        assert found.loss_mask.tolist() == row["loss_mask"]
        np.testing.assert_array_equal(found.rollout_logprobs, row["rollout_logprobs"])
        assert [span.start for span in found.spans] == [span["start"] for span in row["spans"]]
        assert found.spans == segment.spans
        for field in FIELDS:
            (some,) = TokenFiles(tmp_path, files).load_many(
                [[piece(file, segment, n, layout)]], (field,), may_wait=False
            )
            np.testing.assert_array_equal(getattr(some, field), getattr(segment, field))


def test_rows_that_are_not_there_are_unusual(tmp_path):
    file, _ = sealed(tmp_path, SEALED)
    files = SealedFiles(tmp_path, {file.path: file}.get)
    with pytest.raises(Unusual):
        files.group_rows(file.path, 3, FIELDS)
    with pytest.raises(Unusual):
        files.group_rows(file.path, 2, FIELDS).integers("token_ids.list.element", 1)
    with pytest.raises(FileNotFoundError):
        files.group_rows("sealed/other.parquet", 0, FIELDS)


def test_a_changed_byte_is_told_or_changes_nothing(tmp_path):
    file, segments = sealed(tmp_path, SEALED)
    path, rng = tmp_path / file.path, np.random.default_rng(1)
    first = pq.read_metadata(path).row_group(0)
    low = first.column(5).data_page_offset
    data, told = path.read_bytes(), 0
    headers = [first.column(n).data_page_offset for n in range(5, 12)]
    places = [at + n for at in headers for n in range(12)]
    places += rng.integers(low, headers[-1], 60).tolist()
    for at in places:
        bad = bytearray(data)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with suppress(CorruptData):
            found = TokenFiles(tmp_path, SealedFiles(tmp_path, {file.path: file}.get)).load(
                [piece(file, segments[0], 0, SEALED)]
            )
            np.testing.assert_array_equal(found.token_ids, segments[0].token_ids)
            np.testing.assert_array_equal(found.rollout_logprobs, segments[0].rollout_logprobs)
            assert found.loss_mask.tolist() == segments[0].loss_mask.tolist()
            told -= 1
        told += 1
    assert told > len(places) * 0.8


def test_everybody_reads_compacted_files(tmp_path):
    file, segments = sealed(tmp_path, COMPACTED)
    path = str(tmp_path / file.path)
    ids = np.concatenate([segment.token_ids for segment in segments]).tolist()
    rows = duckdb.sql(f"SELECT token_ids FROM '{path}' ORDER BY segment").fetchall()
    assert [id for (row,) in rows for id in row] == ids
    assert polars.read_parquet(path)["token_ids"].explode().to_list() == ids
    assert np.concatenate(pandas.read_parquet(path)["token_ids"].to_list()).tolist() == ids
