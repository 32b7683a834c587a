"""A gymnasium space of chat messages: what `gymnasium.spaces.Text` cannot say (tool calls)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np

from k3rl.envs.samples import SchemaSampler
from k3rl.errors import UserInputError
from k3rl.types import (
    JsonObject,
    Message,
    ToolCall,
    ToolSpec,
    canonical_json,
    from_plain,
    to_plain,
)


class MessageSpace(gymnasium.Space[Message]):
    """Well-formed messages of some roles.

    Contains every such message whatever its tools; samples assistant messages with calls of
    `tools` that fit their declarations, or text.
    """

    def __init__(
        self,
        roles: Sequence[str] = ("assistant",),
        tools: Sequence[ToolSpec] = (),
        seed: int | np.random.Generator | None = None,
    ) -> None:
        """`roles` are those that messages may have, `tools` those that samples call."""
        self.roles = tuple(roles)
        self.tools = tuple(tools)
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: messages have no array form."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> Message:
        """A random message. Masks and probabilities have no meaning here and are refused."""
        if mask is not None or probability is not None:
            raise UserInputError("MessageSpace.sample takes no mask and no probability")
        role = str(self.np_random.choice(list(self.roles)))
        if role == "tool":
            return Message(role, self._text(), tool="tool", index=1)
        if role == "assistant" and self.tools and self.np_random.random() < 0.75:
            return Message(role, tool_calls=(self._call(),))
        return Message(role, self._text())

    def _text(self) -> str:
        return SchemaSampler({}, self.np_random).text()

    def _call(self) -> ToolCall:
        tool = self.tools[int(self.np_random.integers(len(self.tools)))]
        return ToolCall(tool.name, SchemaSampler(tool.parameters, self.np_random).arguments(), 1)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a Message of these roles whose fields have their types."""
        if not isinstance(x, Message) or x.role not in self.roles:
            return False
        if (x.tool is not None) != (x.role == "tool"):
            return False
        if x.role != "assistant" and (x.tool_calls or x.malformed or x.think is not None):
            return False
        texts = (x.content, x.think or "", x.tool or "", x.malformed or "")
        return all(isinstance(text, str) for text in texts) and all(map(_is_call, x.tool_calls))

    def to_jsonable(self, sample_n: Iterable[Message]) -> list[JsonObject]:
        """Messages as plain JSON objects."""
        return [to_plain(message) for message in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Message]:
        """The inverse of `to_jsonable`."""
        return [from_plain(Message, plain) for plain in sample_n]

    def __repr__(self) -> str:
        """Roles and tool names."""
        names = [tool.name for tool in self.tools]
        return f"MessageSpace(roles={list(self.roles)}, tools={names})"

    def __eq__(self, other: object) -> bool:
        """Equal roles and tools."""
        if not isinstance(other, MessageSpace):
            return False
        return self.roles == other.roles and self.tools == other.tools


def _is_call(call: Any) -> bool:
    if not isinstance(call, ToolCall) or not isinstance(call.tool, str):
        return False
    try:
        canonical_json(call.arguments)
    except (TypeError, ValueError):
        return False
    return isinstance(call.arguments, dict)
