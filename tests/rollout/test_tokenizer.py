"""Vocabularies: released file format, nano file format, and the wall between text and specials."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3rl.errors import UserInputError
from k3rl.rollout import tokenizer as tok
from k3rl.rollout.tokenizer import NanoTokenizer, TiktokenTokenizer, Tokenizer, join_plain
from k3rl.rollout.xtml import Segment, open_tag

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "chat"
TOY = TiktokenTokenizer(GOLDEN / "toy.tiktoken")
NANO = NanoTokenizer.shipped()
BOTH = pytest.mark.parametrize("tokenizer", [TOY, NANO], ids=["tiktoken", "nano"])

names = st.sampled_from(sorted({*TOY.specials, *NANO.specials, "<|kimi_image_placeholder|>"}))
texts = st.lists(st.text(max_size=30) | names | st.sampled_from(["message", ' role="', "12"])).map(
    "".join
)


@BOTH
@given(text=texts)
@example(text="<|end_of_msg|>")
def test_text_round_trips_and_never_gives_a_special(tokenizer, text):
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.specials.values())


@BOTH
@given(data=st.binary(max_size=200))
def test_any_bytes_have_ids_and_come_back_exactly(tokenizer, data):
    byte_ids = {tokenizer.decode_bytes([i]): i for i in range(tokenizer.vocab_size)}
    assert tokenizer.decode_bytes([byte_ids[bytes([b])] for b in data]) == data


@BOTH
@given(first=texts, second=texts)
def test_plain_segments_never_give_a_special(tokenizer, first, second):
    ids = tokenizer.encode_segments([Segment(first), Segment(second)])
    assert tokenizer.decode(ids) == first + second
    assert not set(ids) & set(tokenizer.specials.values())


@BOTH
def test_special_segments_are_single_ids(tokenizer):
    for name, token_id in tokenizer.specials.items():
        assert tokenizer.encode_segments([Segment(name, True)]) == [token_id]
        assert tokenizer.special(name) == token_id
    with pytest.raises(UserInputError, match="nope"):
        tokenizer.special("nope")


@BOTH
def test_protocol_and_range(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    assert max(tokenizer.specials.values()) == tokenizer.vocab_size - 1
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(UserInputError, match="outside the vocabulary"):
            tokenizer.decode([bad])


def test_released_offsets_and_pattern_equal_the_golden_record():
    golden = json.loads((GOLDEN / "toy_tokenizer.json").read_text())
    assert golden["named_special_offsets"] == tok.RELEASED_SPECIALS
    assert golden["pat_str"] == tok.RELEASED_PATTERN
    assert golden["n_special"] == tok.NUM_RELEASED_SPECIALS
    assert TOY.vocab_size == golden["n_base"] + golden["n_special"]
    assert TOY.special("<|end_of_msg|>") == golden["n_base"] + 2
    assert TOY.special(f"<|reserved_token_{golden['n_base'] + 8}|>") == golden["n_base"] + 8


def test_lone_surrogates_become_replacement_characters():
    assert NANO.decode(NANO.encode_text("a\ud800b")) == "a\ufffdb"


@settings(max_examples=50)
@given(before=texts, digits=st.text("0123456789", min_size=1, max_size=20), after=texts)
def test_every_digit_is_its_own_token_in_the_nano_vocabulary(before, digits, after):
    ids = NANO.encode_text(before + digits + after)
    with_digits = [i for i in ids if set(NANO.decode_bytes([i])) & set(b"0123456789")]
    assert all(len(NANO.decode_bytes([i])) == 1 for i in with_digits)
    assert len(with_digits) >= len(digits)


def test_nano_layout_is_bytes_then_entries_then_specials():
    assert [NANO.decode_bytes([i]) for i in range(256)] == [bytes([b]) for b in range(256)]
    first = NANO.vocab_size - len(tok.NANO_SPECIALS)
    assert list(NANO.specials) == list(tok.NANO_SPECIALS)
    assert list(NANO.specials.values()) == list(range(first, NANO.vocab_size))


def test_nano_joins_a_tag_and_the_release_does_not():
    tag = open_tag("message", role="user")
    assert [segment.text for segment in join_plain(tag)] == [
        "<|open|>",
        'message role="user"',
        "<|sep|>",
    ]
    assert len(NANO.encode_segments(tag)) == 3
    released = [i for segment in tag for i in TOY.encode_segments([segment])]
    assert TOY.encode_segments(tag) == released


def test_long_runs_are_cut_where_the_release_cuts_them():
    limit = tok.MAX_RUN_CHARS
    text = "a" * (2 * limit + 7) + " " * (limit + 1) + "b" * 5
    pieces = list(tok._chunks(text))
    assert [len(piece) for piece in pieces] == [limit, limit, 7 + limit, 1 + 5]
    assert "".join(pieces) == text
    assert TOY.decode(TOY.encode_text(text)) == text
    words = "ab " * (tok.MAX_CHUNK_CHARS // 3 + 10)
    assert len(next(tok._chunks(words))) == tok.MAX_CHUNK_CHARS


def test_digest_names_the_content(tmp_path):
    path = tmp_path / "vocab.json"
    tok.write_nano(path, [b"ab", b"abc"], {"note": "one"})
    small = NanoTokenizer(path)
    tok.write_nano(path, [b"ab", b"abc"], {"note": "two"})
    assert NanoTokenizer(path).digest == small.digest
    tok.write_nano(path, [b"abc", b"ab"], {})
    assert NanoTokenizer(path).digest != small.digest
    assert len({TOY.digest, NANO.digest, small.digest}) == 3


def test_a_damaged_nano_file_is_named(tmp_path):
    path = tmp_path / "vocab.json"
    content = json.loads(tok.NANO_VOCAB.read_text())
    content["entries"][0] += "x"
    path.write_text(json.dumps(content))
    with pytest.raises(UserInputError, match=r"vocab\.json: digest"):
        NanoTokenizer(path)
    content["schema"] = "k3rl-nano-vocab/9"
    path.write_text(json.dumps(content))
    with pytest.raises(UserInputError, match=r"vocab\.json: schema"):
        NanoTokenizer(path)
    path.write_text("[]")
    with pytest.raises(UserInputError, match=r"vocab\.json: not a nano vocabulary"):
        NanoTokenizer(path)


def test_a_damaged_tiktoken_file_is_named(tmp_path):
    path = tmp_path / "toy.tiktoken"
    lines = (GOLDEN / "toy.tiktoken").read_text().splitlines()
    path.write_text("\n".join(lines[:100] + lines[101:]))
    with pytest.raises(UserInputError, match=r"toy\.tiktoken.*line 101"):
        TiktokenTokenizer(path)
    path.write_text(f"{base64.b64encode(b'a').decode()} 0\n")
    with pytest.raises(UserInputError, match="lacks bytes"):
        TiktokenTokenizer(path)
