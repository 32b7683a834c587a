"""Carriers: rules they hold, and that they travel without loss."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3rl.errors import CorruptData, UserInputError
from k3rl.types import (
    Author,
    FinishReason,
    Outcome,
    OutcomeKind,
    Span,
    Step,
    Task,
    TokenFrame,
    ToolCall,
    ToolRecord,
    ToolStatus,
    TrajectoryHeader,
    TrajectoryKey,
    TruncationCause,
    decode,
    encode,
    from_plain,
    philox,
    to_plain,
)
from k3rl.wire import adapter

KEY = TrajectoryKey("run", "task", "low", 3, 1)


def frame(ids: list[int]) -> TokenFrame:
    count = len(ids)
    mask = np.arange(count) % 2 == 0
    logprobs = np.where(mask, -0.5, np.nan).astype(np.float32)
    spans = (Span(0, Author.POLICY, 1, 0),) if count else ()
    return TokenFrame(KEY.id, 7, 5, np.array(ids, np.int32), mask, logprobs, spans)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=200))
def test_token_frames_survive_encoding_bit_for_bit(ids):
    before = frame(ids)
    after = decode(TokenFrame, encode(before))
    assert after.content_hash() == before.content_hash()
    assert (after.id, after.epoch, after.offset, after.spans) == (KEY.id, 7, 5, before.spans)


KEYS = st.text() | st.sampled_from(["$array", "$$array", "$", "$x"])
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(KEYS, JSON_VALUES)
@example("$array", ["<i4", 5])
@example("$array", ["bytes", 5])
def test_carriers_of_text_and_json_survive_encoding(text, value):
    call = ToolCall("cat", {text: value}, 1)
    record = ToolRecord(call, ToolStatus.ERROR, text, "d", 0.5)
    step = Step(1, 0, 4, calls=(record,), env_state={text: value})
    assert decode(Step, encode(step)) == step
    assert from_plain(Step, to_plain(step)) == step
    assert decode(list[Step], encode([step], list[Step])) == [step]


@given(st.dictionaries(KEYS, st.binary(), max_size=4), st.lists(st.binary(), max_size=3))
def test_bytes_and_sets_survive_encoding(files, parts):
    both = tuple[dict[str, bytes], list[bytes]]
    assert decode(both, encode((files, parts), both)) == (files, parts)
    assert decode(bytes, encode(b"".join(parts))) == b"".join(parts)
    authors = frozenset(Author)
    assert decode(frozenset[Author], encode(authors, frozenset[Author])) == authors


def test_bytes_that_are_cut_short_are_told():
    data = encode(b"0123456789")
    for end in range(len(data)):
        with pytest.raises(UserInputError):
            decode(bytes, data[:end])


def test_every_field_of_a_key_changes_the_trajectory_id():
    changed = [
        TrajectoryKey("run2", "task", "low", 3, 1),
        TrajectoryKey("run", "task2", "low", 3, 1),
        TrajectoryKey("run", "task", "max", 3, 1),
        TrajectoryKey("run", "task", "low", 4, 1),
        TrajectoryKey("run", "task", "low", 3, 2),
        TrajectoryKey("run", "task", "low", 3, 1, attempt=1),
    ]
    ids = {key.id for key in [KEY, *changed]}
    assert len(ids) == 7
    assert all(len(id) == 32 for id in ids)
    assert KEY.id == "4f7e8ac00f6af64951d1548d906ebf23", "identity must not change between versions"


def test_header_knows_its_id():
    assert TrajectoryHeader(KEY, Task("a/B-v0", 1)).id == KEY.id


@pytest.mark.parametrize("kind", list(OutcomeKind))
@pytest.mark.parametrize("reward", [None, 0.0, 1.0])
def test_only_endings_that_are_the_policys_doing_carry_a_reward(kind, reward):
    cause = TruncationCause.TURNS if kind is OutcomeKind.TRUNCATED else None
    rewarded = kind in {OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED, OutcomeKind.POLICY_FAULT}
    if rewarded == (reward is not None):
        assert Outcome(kind, reward, cause=cause).reward == reward
    else:
        with pytest.raises(ValueError, match="reward rule"):
            Outcome(kind, reward, cause=cause)


def test_truncation_names_its_cause():
    with pytest.raises(ValueError, match="cause rule"):
        Outcome(OutcomeKind.TRUNCATED, 0.0)


def test_frames_refuse_arrays_that_disagree():
    ids = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="expected int32"):
        TokenFrame(KEY.id, 0, 0, ids.astype("i8"), np.ones(3, bool), np.zeros(3, np.float32), ())
    with pytest.raises(ValueError, match="differ in length"):
        TokenFrame(KEY.id, 0, 0, ids, np.ones(2, bool), np.zeros(3, np.float32), ())
    with pytest.raises(ValueError, match="spans must start at 0"):
        TokenFrame(KEY.id, 0, 0, ids, np.ones(3, bool), np.zeros(3, np.float32), ())


@pytest.mark.parametrize(
    "data", [b"", b"\x01", b"\4\0\0\0{}", b"\2\0\0\0{}", b"\2\0\0\0[]", b'\x0c\0\0\0{"$array":[]}']
)
def test_decoding_foreign_bytes_is_a_user_error(data):
    with pytest.raises(UserInputError):
        decode(TokenFrame, data)


def test_wrong_field_is_named():
    with pytest.raises(UserInputError, match="Task: seed"):
        from_plain(Task, {"env_id": "a/B-v0", "seed": "x"})


def test_philox_depends_on_every_part_and_nothing_else():
    draws = [philox(*key).random() for key in [(0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1)]]
    assert len(set(draws)) == 4
    assert philox(0, "a", 1).random() == draws[0]


def test_corrupt_data_keeps_its_fields_when_rebuilt():
    error = CorruptData("f", 12, "crc", "bad")
    rebuild, arguments = error.__reduce__()
    again = rebuild(*arguments)
    assert (again.file, again.offset, again.field, str(again)) == ("f", 12, "crc", str(error))


@pytest.mark.parametrize(
    "value",
    [
        Step(3, 0, 5, finish_reason=FinishReason.STOP, env_state={"a": {"x": 1.0}, "b": []}),
        Step(3, 0, 5, generate_s=2, act_s=float("nan"), snapshot_s=float("inf")),
        Outcome(OutcomeKind.COMPLETED, float("nan"), {"a": 1.5, "b": 2}),
        ToolCall("sh", {"cmd": "\ud800\u1234", "more": [None, True, 1e300]}, 1, raw="\udfff"),
        Span(Path("no number"), Author.POLICY, 1, 1),
    ],
)
def test_fields_are_written_as_pydantic_and_json_would(value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data, plain = encode(value), adapter(type(value)).dump_python(value)
    size = int.from_bytes(data[:4], "little")
    assert data[4 : 4 + size].decode() == json.dumps(plain, default=os.fspath)
