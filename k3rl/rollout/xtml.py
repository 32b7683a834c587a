"""Chat messages to XTML segments, byte for byte as Kimi K3's released encoder writes them.

An element is `<|open|>tag key="value"<|sep|> ... <|close|>tag<|sep|>`; a message is one element
followed by `<|end_of_msg|>`. Only structure is marked `allow_special`, so text of users and tools
that looks like a marker stays plain text. Each attribute is four plain segments because the release
tokenises segments one by one. Source: Kimi K3 technical report (arXiv 2607.24653) appendix F and
`encoding_k3.py` of the released model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from k3rl.errors import UserInputError

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

EFFORTS = ("low", "high", "max")
"""What the release accepts; its message text also names `medium`, which it rejects."""
DEFAULT_EFFORT = "max"
"""Applied by the tokenizer side of the release; the encoder itself has no default."""

Dict = Mapping[str, Any]


class Segment(NamedTuple):
    """Text that is tokenised by itself; `allow_special` lets marker names become special ids."""

    text: str
    allow_special: bool = False


def build_chat_segments(
    messages: Sequence[Dict],
    tools: Sequence[Dict] | None = None,
    add_generation_prompt: bool = True,
    thinking: bool = True,
    image_prompts: Sequence[str] | None = None,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Dict | str | None = None,
) -> list[Segment]:
    """Encode OpenAI-style messages: tools, effort, conversation, options, generation prompt.

    Options come last so that the history before them keeps its cache. `thinking=False` drops think
    channels and the effort message and opens the response channel. A tool call may carry
    `function.raw`, an argument text known to be broken JSON. Raises UserInputError.
    """
    if thinking and thinking_effort not in (None, *EFFORTS):
        raise UserInputError(f"thinking_effort {thinking_effort!r} is not one of {EFFORTS}")
    images = _Images(image_prompts)
    segments: list[Segment] = []
    if tools:
        segments += tool_declaration(tools)
    if thinking and thinking_effort is not None:
        segments += effort_message(thinking_effort)
    segments += _conversation(messages, thinking, images)
    segments += _options(tool_choice, response_format)
    if add_generation_prompt:
        segments += generation_prompt(thinking)
    images.check_all_used()
    return segments


def generation_prompt(thinking: bool = True) -> list[Segment]:
    """An opened assistant message and its first channel: the one switch between both modes."""
    return [*open_tag("message", role="assistant"), *open_tag("think" if thinking else "response")]


def effort_message(effort: str) -> list[Segment]:
    """The system message that asks for a reasoning effort."""
    body = (
        "`thinking_effort` guides on how much to think in your thinking channel "
        "(not including the response channel), supported values include "
        "`low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={effort}`."
    )
    return _system_message("thinking-effort", body)


def tool_declaration(tools: Sequence[Dict], extends: bool = False) -> list[Segment]:
    """The system message that declares tools as compact JSON with sorted keys.

    `extends` words it as an addition to tools declared earlier in the session.
    """
    if extends:
        head = (
            "## New Tools Available\n"
            "The system dynamically extends the toolset via lazy-loading.\n"
            "You have access to all existing and extended tools.\n"
            "Here are the specs for the extended tools."
        )
    else:
        head = "# Tools\nHere are the available tools, described in JSONSchema."
    return _system_message("tool-declare", f"{head}\n\n```json\n{_compact_json(tools)}\n```")


def open_tag(tag: str, **attributes: str) -> list[Segment]:
    """`<|open|>tag key="value"<|sep|>`, four plain segments per attribute."""
    segments = [Segment(OPEN, True), Segment(tag)]
    for key, value in attributes.items():
        segments += [Segment(f" {key}"), Segment('="'), *_plain(escape(value)), Segment('"')]
    return [*segments, Segment(SEP, True)]


def close_tag(tag: str) -> list[Segment]:
    """`<|close|>tag<|sep|>`."""
    return [Segment(CLOSE, True), Segment(tag), Segment(SEP, True)]


def escape(value: str) -> str:
    """An attribute value as written: `&` first, then the quote."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """The inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def json_type(value: Any) -> str:
    """The `type` attribute of an argument."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


class _Images:
    """Hands out one prompt per image in order; without prompts the placeholder stands in."""

    def __init__(self, prompts: Sequence[str] | None) -> None:
        self.prompts, self.num_used = prompts, 0

    def next(self) -> Segment:
        if self.prompts is None:
            return Segment(IMAGE_PLACEHOLDER, True)
        if self.num_used == len(self.prompts):
            raise UserInputError(f"more images than the {len(self.prompts)} image_prompts")
        self.num_used += 1
        return Segment(self.prompts[self.num_used - 1], True)

    def check_all_used(self) -> None:
        if self.prompts is not None and self.num_used != len(self.prompts):
            raise UserInputError(f"{len(self.prompts)} image_prompts for {self.num_used} images")

    def text(self, text: str) -> list[Segment]:
        """Plain text, in which a placeholder stands for an image when prompts are given."""
        if self.prompts is None:
            return _plain(text)
        first, *rest = text.split(IMAGE_PLACEHOLDER)
        segments = _plain(first)
        for part in rest:
            segments += [self.next(), *_plain(part)]
        return segments

    def content(self, content: str | Iterable[Dict] | None) -> list[Segment]:
        """A message's content: text, or text and image parts."""
        if content is None or isinstance(content, str):
            return self.text(content or "")
        segments: list[Segment] = []
        for part in content:
            is_image = part["type"] in ("image", "image_url")
            segments += [self.next()] if is_image else self.text(part["text"])
        return segments


def _plain(text: str) -> list[Segment]:
    return [Segment(text)] if text else []


def _compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _message(body: Iterable[Segment], **attributes: str) -> list[Segment]:
    opening = open_tag("message", **attributes)
    return [*opening, *body, *close_tag("message"), Segment(END_OF_MSG, True)]


def _system_message(kind: str, body: str) -> list[Segment]:
    return _message([Segment(body)], role="system", type=kind)


def _conversation(messages: Sequence[Dict], thinking: bool, images: _Images) -> list[Segment]:
    segments: list[Segment] = []
    calls: Sequence[Dict] = ()
    num_results = 0
    for message in _in_call_order(messages):
        role = message["role"]
        named = {"name": message["name"]} if message.get("name") else {}
        if role == "assistant":
            calls, num_results = message.get("tool_calls") or (), 0
            segments += _message(_channels(message, thinking, images), role=role, **named)
        elif role == "tool":
            num_results += 1
            body = images.content(message.get("content"))
            tool = _result_name(message, calls, num_results)
            segments += _message(body, role=role, tool=tool, index=str(num_results))
        elif role == "system" and message.get("tools"):
            segments += tool_declaration(message["tools"], extends=True)
        elif role in ("system", "user"):
            segments += _message(images.content(message.get("content")), role=role, **named)
        else:
            raise UserInputError(f"message role {role!r} is not system, user, assistant or tool")
    return segments


def _channels(message: Dict, thinking: bool, images: _Images) -> list[Segment]:
    """The body of an assistant message; a blank think text is dropped, its channel kept."""
    segments: list[Segment] = []
    if thinking:
        think = message.get("reasoning_content") or message.get("reasoning") or ""
        segments += open_tag("think")
        segments += images.text(think) if think.strip() else []
        segments += close_tag("think")
    segments += [*open_tag("response"), *images.content(message.get("content"))]
    segments += close_tag("response")
    calls = message.get("tool_calls")
    if calls:
        segments += open_tag("tools")
        for index, call in enumerate(calls, start=1):
            segments += _call(_function(call), index, images)
        segments += close_tag("tools")
    return segments


def _call(function: Dict, index: int, images: _Images) -> list[Segment]:
    segments = open_tag("call", tool=function["name"], index=str(index))
    arguments, raw = _arguments(function)
    if raw is not None:
        segments += [*open_tag("json", type="object"), *images.text(raw), *close_tag("json")]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        segments += open_tag("argument", key=key, type=json_type(value))
        segments += [*images.text(text), *close_tag("argument")]
    return [*segments, *close_tag("call")]


def _function(call: Dict) -> Dict:
    function: Dict = call.get("function", call)
    return function


def _arguments(function: Dict) -> tuple[Dict, str | None]:
    """A call's arguments, or no arguments and the raw text that is not JSON."""
    arguments = function.get("arguments")
    if function.get("raw") is not None:
        return {}, function["raw"]
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}, None
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}, arguments
    if not isinstance(arguments, Mapping | None):
        raise UserInputError(f"arguments of {function['name']!r} are not a JSON object")
    return arguments or {}, None


def _in_call_order(messages: Sequence[Dict]) -> list[Dict]:
    """Sort each run of tool results by the calls of the assistant message before it.

    A run with an id that matches no call stays as it is.
    """
    ordered: list[Dict] = []
    places: dict[str, tuple[int, str]] = {}
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        run = list(group)
        if not is_result:
            ordered += run
            for message in run:
                if message["role"] == "assistant":
                    places = _places(message.get("tool_calls") or ())
            continue
        ids = [str(message.get("tool_call_id", message.get("id"))) for message in run]
        if all(call_id in places for call_id in ids):
            matched = sorted(zip(ids, run, strict=True), key=lambda pair: places[pair[0]][0])
            run = [{**message, "tool": places[call_id][1]} for call_id, message in matched]
        ordered += run
    return ordered


def _places(calls: Sequence[Dict]) -> dict[str, tuple[int, str]]:
    """Call id to position and tool name; of equal ids the first counts."""
    places: dict[str, tuple[int, str]] = {}
    for position, call in enumerate(calls):
        if call.get("id") is not None:
            places.setdefault(str(call["id"]), (position, _function(call)["name"]))
    return places


def _result_name(message: Dict, calls: Sequence[Dict], position: int) -> str:
    name = message.get("tool", message.get("name"))
    if name is None and position <= len(calls):
        name = _function(calls[position - 1])["name"]
    if name is None:
        raise UserInputError(f"tool result {position} names no tool and answers no call")
    return str(name)


def _options(tool_choice: str | None, response_format: Dict | str | None) -> list[Segment]:
    segments: list[Segment] = []
    if tool_choice in ("required", "none"):
        rule = "MUST call tools" if tool_choice == "required" else "MUST NOT call any tools"
        body = f"The system is invoked with `tool_choice={tool_choice}`.\n"
        segments += _system_message("tool-choice", f"{body}You {rule} in the next message.")
    is_plain = response_format is None or isinstance(response_format, str)
    kind = response_format if is_plain else response_format.get("type")  # type: ignore[union-attr]
    if kind in ("json_object", "json_schema"):
        body = (
            f"The system is invoked with `response_format={kind}`.\n"
            "Your response must be raw JSON data without markdown code blocks (```json) "
            "or any additional formatting."
        )
        if kind == "json_schema":
            schema = _compact_json(_response_schema(response_format))
            body += f"\nThe JSON data must match the following schema:\n```json\n{schema}\n```"
        segments += _system_message("response-format", body)
    return segments


def _response_schema(response_format: Dict | str | None) -> Any:
    if not isinstance(response_format, Mapping) or response_format.get("json_schema") is None:
        raise UserInputError("response_format json_schema lacks its json_schema")
    schema = response_format["json_schema"]
    return schema.get("schema", schema) if isinstance(schema, Mapping) else schema
