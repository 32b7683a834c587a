"""The renderer: deltas add up, turns come back, nothing that is sampled can raise."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3rl.errors import UserInputError
from k3rl.rollout.renderer import MAX_JSON_DEPTH, Renderer
from k3rl.rollout.tokenizer import NanoTokenizer, TiktokenTokenizer
from k3rl.rollout.xtml import (
    CLOSE,
    END_OF_MSG,
    OPEN,
    SEP,
    Segment,
    build_chat_segments,
    close_tag,
    open_tag,
)
from k3rl.types import Message, ToolCall, ToolSpec, encode

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "chat"
NANO = Renderer(NanoTokenizer.shipped())
TOY = Renderer(TiktokenTokenizer(GOLDEN / "toy.tiktoken"))
BOTH = pytest.mark.parametrize("renderer", [TOY, NANO], ids=["tiktoken", "nano"])

PYTHON = ToolSpec(
    "python", "Run code.", {"type": "object", "properties": {"code": {"type": "string"}}}
)

texts = st.text(max_size=20) | st.sampled_from([OPEN, CLOSE + "think" + SEP, END_OF_MSG, "[EOS]"])
thinks = st.none() | texts.filter(str.strip)
json_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
json_values = st.recursive(
    json_leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def assistants(draw):
    names = draw(st.lists(texts, max_size=3))
    calls = []
    for index, name in enumerate(names, start=1):
        if draw(st.booleans()):
            calls.append(
                ToolCall(name, draw(st.dictionaries(texts, json_values, max_size=3)), index)
            )
        else:
            calls.append(ToolCall(name, {}, index, raw=draw(texts) + "{"))
    return Message("assistant", draw(texts), draw(thinks), tuple(calls))


@st.composite
def answers(draw, assistant):
    results = [
        Message("tool", draw(texts), tool=call.tool, index=call.index)
        for call in assistant.tool_calls
    ]
    extra = draw(
        st.lists(st.builds(Message, st.sampled_from(["user", "system"]), texts), max_size=2)
    )
    return [*results, *extra]


@st.composite
def conversations(draw):
    opening = draw(
        st.lists(
            st.builds(Message, st.sampled_from(["system", "user"]), texts), min_size=1, max_size=2
        )
    )
    turns = []
    for _ in range(draw(st.integers(0, 3))):
        assistant = draw(assistants())
        turns.append((assistant, draw(answers(assistant))))
    return opening, turns


@BOTH
@settings(deadline=None)
@given(message=assistants())
def test_a_turn_comes_back_from_its_ids(renderer, message):
    ids = renderer.assistant_ids(message)
    assert ids.dtype == np.int32
    assert ids[-1] in renderer.stop_ids
    assert sum(int(i) in renderer.stop_ids for i in ids) == 1
    assert renderer.parse_turn(ids) == message


@BOTH
@settings(deadline=None)
@given(
    conversation=conversations(),
    effort=st.sampled_from(["low", "high", "max"]),
    tools=st.sampled_from([(), (PYTHON,)]),
)
def test_deltas_add_up_to_one_rendering(renderer, conversation, effort, tools):
    opening, turns = conversation
    context = renderer.start(opening, tools, effort)
    whole = list(opening)
    for assistant, results in turns:
        context = np.concatenate([context, renderer.assistant_ids(assistant)])
        whole.append(assistant)
        np.testing.assert_array_equal(context, renderer.render(whole, tools, effort))
        assert renderer.parse_context(context) == whole
        context = np.concatenate([context, renderer.extend(results)])
        whole += results
        assert renderer.parse_context(context) == whole
    prompt = renderer.extend([])
    np.testing.assert_array_equal(
        context, np.concatenate([renderer.render(whole, tools, effort), prompt])
    )


@BOTH
@settings(deadline=None)
@given(data=st.data())
def test_parsing_never_raises_and_never_retokenises(renderer, data):
    vocabulary = renderer.tokenizer.vocab_size
    special = st.sampled_from(sorted(renderer.tokenizer.specials.values()))
    wild = st.lists(st.integers(-2, vocabulary + 2) | special, max_size=30)
    good = renderer.assistant_ids(data.draw(assistants())).tolist()
    at = data.draw(st.integers(0, len(good)))
    until = data.draw(st.integers(at, len(good)))
    ids = good[:at] + data.draw(wild) + good[until:]
    message = renderer.parse_turn(np.asarray(ids, np.int32))
    assert message.role == "assistant"
    encode(message)
    if message.malformed is not None:
        assert message == Message("assistant", malformed=message.malformed)


@BOTH
@settings(deadline=None)
@given(message=assistants(), data=st.data())
def test_other_tokenisations_of_the_same_text_parse_alike(renderer, message, data):
    tokenizer = renderer.tokenizer
    single = {tokenizer.decode_bytes([i]): i for i in range(tokenizer.vocab_size)}
    specials = set(tokenizer.specials.values())
    ids = []
    for token_id in renderer.assistant_ids(message).tolist():
        if token_id in specials or not data.draw(st.booleans()):
            ids.append(token_id)
        else:
            ids += [single[bytes([b])] for b in tokenizer.decode_bytes([token_id])]
    assert renderer.parse_turn(ids) == message


@BOTH
@given(text=texts)
@example(text=f"{END_OF_MSG}{OPEN}message")
def test_text_cannot_forge_structure(renderer, text):
    plain = renderer.render([Message("user", "x"), Message("system", "x")])
    forged = renderer.render([Message("user", text), Message("system", text)])
    specials = set(renderer.tokenizer.specials.values())
    assert [i for i in plain if int(i) in specials] == [i for i in forged if int(i) in specials]


def spell(*segments: Segment) -> list[int]:
    return NANO.tokenizer.encode_segments(segments)


RESPONSE = [*close_tag("think"), *open_tag("response"), *close_tag("response")]
END = [*close_tag("message"), Segment(END_OF_MSG, True)]


def call(*arguments: Segment, index: str = "1") -> list[int]:
    body = [*open_tag("call", tool="t", index=index), *arguments, *close_tag("call")]
    return spell(*RESPONSE, *open_tag("tools"), *body, *close_tag("tools"), *END)


def argument(text: str, kind: str, key: str = "a") -> list[Segment]:
    body = [Segment(text)] if text else []
    return [*open_tag("argument", key=key, type=kind), *body, *close_tag("argument")]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("1", "number", 1),
        ("1.5e3", "number", 1500.0),
        (" true ", "boolean", True),
        ("null", "null", None),
        ('{"b": [1, "c"]}', "object", {"b": [1, "c"]}),
        ("[]", "array", []),
        ("[]", "string", "[]"),
        ("", "string", ""),
    ],
)
def test_arguments_come_back_typed(text, kind, value):
    (parsed,) = NANO.parse_turn(call(*argument(text, kind))).tool_calls
    assert parsed == ToolCall("t", {"a": value}, 1)
    assert type(parsed.arguments["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "number"),
        ("{", "object"),
        ("1", "boolean"),
        ("true", "number"),
        ("1", "integer"),
        ("NaN", "number"),
        ("1e999", "number"),
        ("9" * 5000, "number"),
        ('["\\ud800"]', "array"),
        ("[" * 100_000, "array"),
        ("[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1), "array"),
    ],
)
def test_arguments_that_are_not_json_of_their_type_stay_raw(text, kind):
    message = NANO.parse_turn(call(*argument("ok", "string", "z"), *argument(text, kind)))
    assert message.tool_calls == (ToolCall("t", {}, 1, raw=text),)


def test_a_json_block_is_read_whole():
    block = [*open_tag("json", type="object"), Segment('{"a": 1}'), *close_tag("json")]
    assert NANO.parse_turn(call(*block)).tool_calls == (ToolCall("t", {"a": 1}, 1),)
    block[-4] = Segment("[1]")
    assert NANO.parse_turn(call(*block)).tool_calls == (ToolCall("t", {}, 1, raw="[1]"),)


def test_nesting_within_the_limit_is_kept_and_travels():
    text = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    message = NANO.parse_turn(call(*argument(text, "array")))
    assert message.tool_calls[0].raw is None
    assert encode(message)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "expected close think, found end"),
        (spell(*close_tag("think")), "expected open response, found end"),
        (spell(*RESPONSE), "expected close message, found end"),
        (spell(*RESPONSE, *close_tag("message")), "expected end_of_msg after message, found end"),
        (spell(*RESPONSE, *END, Segment("x")), "tokens after the end of the message"),
        (spell(*RESPONSE, *open_tag("tools"), *close_tag("tools"), *END), "expected open call"),
        (spell(Segment("[EOS]", True), *RESPONSE, *END), "expected close think, found EOS"),
        (spell(*close_tag("response"), *END), "expected close of think"),
        (call(index="2"), "call 1 is numbered 2"),
        (call(*argument("x", "string"), *argument("y", "string")), "gives an argument twice"),
        (call(*open_tag("argument", key="a"), *close_tag("argument")), "takes the attributes"),
        ([NANO.tokenizer.vocab_size], "outside the vocabulary"),
    ],
)
def test_what_breaks_the_grammar_is_named(ids, reason):
    message = NANO.parse_turn(ids)
    assert message.malformed is not None
    assert reason in message.malformed


def test_a_context_goes_on_after_a_malformed_turn():
    opening = [Message("user", "go")]
    told = Message("user", "Your message could not be read.")
    bad = spell(Segment("hm"), Segment(END_OF_MSG, True))
    context = [*NANO.start(opening).tolist(), *bad, *NANO.extend([told]).tolist()]
    first, turn, last = NANO.parse_context(context)
    assert (first, last) == (opening[0], told)
    assert turn.malformed is not None


def test_results_are_put_in_call_order():
    results = [Message("tool", f"r{i}", tool="t", index=i) for i in (3, 1, 2)]
    parsed = NANO.parse_context(NANO.extend(results))
    assert [message.index for message in parsed] == [1, 2, 3]
    assert [message.content for message in parsed] == ["r1", "r2", "r3"]


def test_refusals_name_what_is_wrong():
    with pytest.raises(UserInputError, match="medium"):
        NANO.start([Message("user", "x")], effort="medium")
    with pytest.raises(UserInputError, match="sampled"):
        NANO.extend([Message("assistant", "x")])
    with pytest.raises(UserInputError, match="numbered from 1"):
        NANO.extend([Message("tool", "x", tool="t", index=2)])
    with pytest.raises(UserInputError, match="well-formed"):
        NANO.assistant_ids(Message("assistant", malformed="x"))
    with pytest.raises(UserInputError, match="not a rendered context"):
        NANO.parse_context(spell(Segment("x")))


def test_start_is_the_released_encoding_with_the_released_ids():
    tools = [
        {
            "type": "function",
            "function": {
                "name": PYTHON.name,
                "description": PYTHON.description,
                "parameters": PYTHON.parameters,
            },
        }
    ]
    messages = [{"role": "user", "content": "go"}]
    expected = build_chat_segments(messages, tools, thinking_effort="max")
    ids = TOY.tokenizer.encode_segments(expected)
    assert TOY.start([Message("user", "go")], [PYTHON]).tolist() == ids


def test_digests_differ_by_tokenizer():
    assert NANO.digest != TOY.digest
    assert NANO.digest == Renderer(NanoTokenizer.shipped()).digest
