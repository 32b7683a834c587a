"""Messages to token ids and back, turn by turn.

A context grows as `start`, then for each turn what the policy sampled and `extend`; the
concatenation equals one rendering of the whole conversation. Sampled ids are only ever read:
`parse_turn` decodes the text between special ids and never tokenises it again. No text can produce
a special id, so `<|end_of_msg|>` ids alone cut a context into messages.
Grammar: Kimi K3 technical report (arXiv 2607.24653) appendix F.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from k3rl.errors import UserInputError
from k3rl.rollout import xtml
from k3rl.rollout.tokenizer import Tokenizer
from k3rl.rollout.xtml import CLOSE, END_OF_MSG, OPEN, SEP, Segment
from k3rl.types import (
    Digest,
    Int32Array,
    JsonObject,
    Message,
    ToolCall,
    ToolSpec,
    digest_json,
)

FORMAT = "k3rl-xtml/1"
"""Part of the digest; changes when equal messages would render to other ids."""

MAX_JSON_DEPTH = 64
"""Nesting of one argument; pydantic stops following at 255."""

_TAG = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')
_HARNESS_KINDS = ("tool-declare", "thinking-effort")


class Renderer:
    """XTML over one tokenizer; thinking mode always."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stop_ids: tuple[int, ...] = (tokenizer.special(END_OF_MSG),)
        """Generation ends after one of these; it belongs to the turn."""
        self._names = {token_id: name for name, token_id in tokenizer.specials.items()}
        self._prompt = xtml.generation_prompt()
        self._prompt_ids = tokenizer.encode_segments(self._prompt)

    @property
    def digest(self) -> Digest:
        """Equal digests render and parse alike: format and tokenizer."""
        return digest_json([FORMAT, self.tokenizer.digest])

    def start(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        effort: str = xtml.DEFAULT_EFFORT,
    ) -> Int32Array:
        """The opening of a context, up to where the policy's first token comes.

        Tool declaration, effort message, conversation, generation prompt. Raises UserInputError
        for an effort that the model does not know.
        """
        return self._ids([*conversation_segments(messages, tools, effort), *self._prompt])

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        effort: str = xtml.DEFAULT_EFFORT,
    ) -> Int32Array:
        """A whole conversation at once, without a generation prompt after it."""
        return self._ids(conversation_segments(messages, tools, effort))

    def extend(self, messages: Sequence[Message]) -> Int32Array:
        """What follows a sampled turn: the environment's messages and the next generation prompt.

        Tool results are put in call order. Raises UserInputError for an assistant message: a
        context holds only turns that were sampled into it.
        """
        if any(message.role == "assistant" for message in messages):
            raise UserInputError("extend: assistant messages are sampled, not rendered")
        return self._ids(xtml.build_chat_segments(_chat_dicts(messages)))

    def assistant_ids(self, message: Message) -> Int32Array:
        """The tokens a policy emits for `message` after the generation prompt, stop id included."""
        return self._ids(turn_segments(message))

    def parse_turn(self, ids: Sequence[int] | Int32Array) -> Message:
        """The assistant message that sampled `ids` spell; the inverse of `assistant_ids`.

        Never raises: what breaks the grammar comes back as a message whose `malformed` says why.
        An argument that is not JSON of its stated type becomes `ToolCall.raw`.
        """
        try:
            return read_turn(self._items(ids))
        except _Malformed as error:
            return Message("assistant", malformed=str(error))

    def parse_context(self, ids: Sequence[int] | Int32Array) -> list[Message]:
        """The conversation behind a whole context, as `start` and `extend` were given it.

        Tool declaration and effort message are left out; so is a generation prompt that nothing
        follows. Turns come from `parse_turn`. Raises UserInputError when a part that the
        environment wrote does not parse: such ids are not a context of this renderer.
        """
        messages = []
        num_prompt = len(self._prompt_ids)
        for part in self._messages(ids):
            if part[:num_prompt] == self._prompt_ids:
                if len(part) > num_prompt:
                    messages.append(self.parse_turn(part[num_prompt:]))
                continue
            try:
                message = _environment_message(_Reader(self._items(part)))
            except _Malformed as error:
                raise UserInputError(f"not a rendered context: {error}") from None
            messages += [message] if message is not None else []
        return messages

    def _ids(self, segments: Sequence[Segment]) -> Int32Array:
        return np.asarray(self.tokenizer.encode_segments(segments), np.int32)

    def _messages(self, ids: Sequence[int] | Int32Array) -> Iterator[list[int]]:
        part: list[int] = []
        for token_id in map(int, ids):
            part.append(token_id)
            if token_id in self.stop_ids:
                yield part
                part = []
        if part:
            yield part

    def _items(self, ids: Sequence[int] | Int32Array) -> list[Segment]:
        """Ids as alternating text and specials."""
        items: list[Segment] = []
        run: list[int] = []
        for token_id in map(int, ids):
            name = self._names.get(token_id)
            if name is None:
                run.append(token_id)
                continue
            items += [*self._text(run), Segment(name, True)]
            run = []
        return items + self._text(run)

    def _text(self, run: Sequence[int]) -> list[Segment]:
        if not run:
            return []
        try:
            return [Segment(self.tokenizer.decode(run))]
        except UserInputError as error:
            raise _Malformed(str(error)) from None


def conversation_segments(
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    effort: str = xtml.DEFAULT_EFFORT,
) -> list[Segment]:
    """What `Renderer.render` tokenises."""
    declared = [_tool_dict(tool) for tool in tools]
    return xtml.build_chat_segments(
        _chat_dicts(messages), declared, add_generation_prompt=False, thinking_effort=effort
    )


def read_turn(items: Sequence[Segment]) -> Message:
    """`Renderer.parse_turn` for a turn given as text and markers, no two texts in a row."""
    try:
        return _turn(_Reader(items))
    except _Malformed as error:
        return Message("assistant", malformed=str(error))


def turn_segments(message: Message) -> list[Segment]:
    """What `Renderer.assistant_ids` tokenises. Raises UserInputError unless well-formed."""
    if message.role != "assistant" or message.malformed is not None:
        raise UserInputError("only a well-formed assistant message can be spelled as a turn")
    segments = xtml.build_chat_segments(_chat_dicts([message]), add_generation_prompt=False)
    return segments[len(xtml.generation_prompt()) :]


def _tool_dict(tool: ToolSpec) -> JsonObject:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def _chat_dicts(messages: Sequence[Message]) -> list[JsonObject]:
    """Carriers as OpenAI-style messages, tool results sorted by the call they answer."""
    dicts: list[JsonObject] = []
    results: list[Message] = []
    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        dicts += _result_dicts(results)
        results = []
        dicts.append(_chat_dict(message))
    return dicts + _result_dicts(results)


def _chat_dict(message: Message) -> JsonObject:
    if message.malformed is not None:
        raise UserInputError("a malformed turn has no rendering: its tokens are what was sampled")
    calls = [
        {"function": {"name": call.tool, "arguments": call.arguments, "raw": call.raw}}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.think,
        "tool_calls": calls,
    }


def _result_dicts(results: Sequence[Message]) -> list[JsonObject]:
    ordered = sorted(results, key=lambda result: result.index or 0)
    for position, result in enumerate(ordered, start=1):
        if result.index != position or result.tool is None:
            raise UserInputError(
                f"tool results must name their tool and be numbered from 1, "
                f"got {[(result.tool, result.index) for result in results]}"
            )
    return [{"role": "tool", "tool": r.tool, "content": r.content} for r in ordered]


class _Malformed(Exception):
    """Why ids do not spell a message; short, for it is shown to the policy."""


class _Reader:
    """Walks over text and specials, one element of the grammar at a time."""

    def __init__(self, items: Sequence[Segment]) -> None:
        self.items, self.position = items, 0

    def text(self) -> str:
        """The text here, empty when a special or the end comes first."""
        if self.position < len(self.items) and not self.items[self.position].allow_special:
            self.position += 1
            return self.items[self.position - 1].text
        return ""

    def is_at(self, marker: str) -> bool:
        return self.items[self.position : self.position + 1] == [Segment(marker, True)]

    def opens(self, tag: str) -> bool:
        """Whether an opening tag of this name comes next."""
        following = self.items[self.position + 1 : self.position + 2]
        return self.is_at(OPEN) and bool(following) and following[0].text.split(" ")[0] == tag

    def marker(self, marker: str, where: str) -> None:
        if not self.is_at(marker):
            rest = self.items[self.position : self.position + 1]
            found = rest[0].text if rest and rest[0].allow_special else "text" if rest else "end"
            raise _Malformed(f"expected {_bare(marker)} {where}, found {_bare(found)}")
        self.position += 1

    def open(self, tag: str, *keys: str) -> list[str]:
        """An opening tag with exactly these attributes in this order; returns their values."""
        attributes = self.open_any(tag)
        if tuple(key for key, _ in attributes) != keys:
            raise _Malformed(f"{tag} takes the attributes {', '.join(keys) or 'none'}")
        return [value for _, value in attributes]

    def open_any(self, tag: str) -> list[tuple[str, str]]:
        """An opening tag with whatever attributes it has."""
        self.marker(OPEN, tag)
        match = _TAG.fullmatch(self.text())
        if match is None or match[1] != tag:
            raise _Malformed(f"expected tag {tag}")
        self.marker(SEP, f"after {tag}")
        return [(key, xtml.unescape(value)) for key, value in _ATTRIBUTE.findall(match[2])]

    def close(self, tag: str) -> None:
        self.marker(CLOSE, tag)
        if self.text() != tag:
            raise _Malformed(f"expected close of {tag}")
        self.marker(SEP, f"after {tag}")

    def end_of_message(self) -> None:
        self.close("message")
        self.marker(END_OF_MSG, "after message")
        if self.position < len(self.items):
            raise _Malformed("tokens after the end of the message")


def _bare(marker: str) -> str:
    """A marker's name without its frame: in an answer to the policy it is cheaper and harmless."""
    return marker.strip("<|>[]")


def _turn(reader: _Reader) -> Message:
    think = reader.text()
    reader.close("think")
    reader.open("response")
    content = reader.text()
    reader.close("response")
    calls: list[ToolCall] = []
    if reader.is_at(OPEN):
        reader.open("tools")
        while not calls or reader.is_at(OPEN):
            calls.append(_call(reader, len(calls) + 1))
        reader.close("tools")
    reader.end_of_message()
    return Message("assistant", content, think or None, tuple(calls))


def _call(reader: _Reader, index: int) -> ToolCall:
    tool, number = reader.open("call", "tool", "index")
    if number != str(index):
        raise _Malformed(f"call {index} is numbered {number}")
    elements: list[_Element] = []
    while reader.is_at(OPEN):
        elements.append(_element(reader))
    reader.close("call")
    keys = {element.key for element in elements}
    if len(keys) < len(elements) or (None in keys and len(elements) > 1):
        raise _Malformed(f"call {index} gives an argument twice")
    arguments: JsonObject = {}
    for key, kind, text in elements:
        try:
            value = _value(text, kind)
        except ValueError:
            return ToolCall(tool, {}, index, raw=text)
        arguments = value if key is None else {**arguments, key: value}
    return ToolCall(tool, arguments, index)


class _Element(NamedTuple):
    """One argument, or with `key` None the JSON of all of them."""

    key: str | None
    kind: str
    text: str


def _element(reader: _Reader) -> _Element:
    is_json = reader.opens("json")
    values = reader.open("json", "type") if is_json else reader.open("argument", "key", "type")
    text = reader.text()
    reader.close("json" if is_json else "argument")
    return _Element(None if is_json else values[0], values[-1], text)


def _value(text: str, kind: str) -> Any:
    """The value of type `kind` that `text` spells; ValueError when other carriers cannot hold it.

    JSON that Python reads but UTF-8 JSON cannot write (NaN, 1e999, lone surrogates) is refused,
    and so is nesting deeper than serialisers follow.
    """
    if kind == "string":
        return text
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        is_deep = _depth(value) > MAX_JSON_DEPTH
    except RecursionError:
        is_deep = True
    if is_deep or xtml.json_type(value) != kind:
        raise ValueError(f"not a {kind} within {MAX_JSON_DEPTH} levels")
    return value


def _depth(value: Any) -> int:
    """Levels of lists and objects."""
    if not isinstance(value, dict | list):
        return 0
    children = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, children), default=0)


def _environment_message(reader: _Reader) -> Message | None:
    """A message written by the environment; None for those of the harness."""
    attributes = dict(reader.open_any("message"))
    content = reader.text()
    reader.end_of_message()
    role, index = attributes.get("role"), attributes.get("index", "")
    if attributes.get("type") in _HARNESS_KINDS:
        return None
    if role == "tool" and index.isdecimal():
        return Message(role, content, tool=attributes.get("tool"), index=int(index))
    if role in ("system", "user"):
        return Message(role, content)
    raise _Malformed(f"a message of role {role}")
