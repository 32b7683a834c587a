"""The encoder against golden cases frozen from the release (tests/data/golden/chat)."""

import json
from pathlib import Path

import pytest

from k3rl.errors import UserInputError
from k3rl.rollout import xtml
from k3rl.rollout.tokenizer import TiktokenTokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "chat"
CASES = json.loads((GOLDEN / "chat_cases.json").read_text())["cases"]


def segments_of(case):
    kwargs = dict(case["kwargs"])
    if case["tokenizer_default_effort_applied"]:
        kwargs["thinking_effort"] = xtml.DEFAULT_EFFORT
    return xtml.build_chat_segments(**kwargs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_case(case):
    if "error" in case:
        with pytest.raises(UserInputError, match="medium"):
            segments_of(case)
        return
    segments = segments_of(case)
    assert "".join(segment.text for segment in segments) == case["text"]
    assert [list(segment) for segment in segments] == case["segments"]
    tokenizer = TiktokenTokenizer(GOLDEN / "toy.tiktoken")
    assert tokenizer.encode_segments(segments) == case["toy_ids"]


def test_goldens_are_complete():
    assert len(CASES) == 17
    assert sum("error" in case for case in CASES) == 1
