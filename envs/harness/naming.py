"""Tools under other names: calls translated in, answers translated out.

*Own* names are those of the environment and of the harness's own tools, *shown* names those that
the policy reads and must use. Only names change, never values; an own name that is not shown does
not exist for the policy.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from k3rl.envs.harness.parts import Description, NameCase, ToolStyle
from k3rl.envs.tools import SCALAR_KINDS, Tool, check_call
from k3rl.envs.words import echo, nearest
from k3rl.errors import EnvError
from k3rl.types import JSON, JsonObject, ToolCall, ToolSpec, ToolStatus

COMMAND = "command"
"""The one parameter of a shell."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that names what is not shown."""

    text: str
    """The answer, in shown names."""


class Naming:
    """The two-way table of one style over one set of tools."""

    def __init__(self, specs: Sequence[ToolSpec], style: ToolStyle) -> None:
        """Raises EnvError when two tools, or two parameters of one, would get the same name."""
        self.style = style
        names = style if style.shell is None else ToolStyle()
        self._own = {spec.name: spec for spec in specs}
        self._shown = {spec.name: _show_name(spec.name, names) for spec in specs}
        self._hidden = _inverse(self._shown, "tools")
        self._parameters = {
            spec.name: {key: _show_parameter(key, names) for key in _keys(spec)} for spec in specs
        }
        self._hidden_parameters = {
            name: _inverse(shown, f"parameters of {name}")
            for name, shown in self._parameters.items()
        }
        words = {own: shown for own, shown in self._shown.items() if own != shown}
        self._words = words | {
            own: shown
            for keys in self._parameters.values()
            for own, shown in keys.items()
            if own != shown
        }

    @property
    def is_identity(self) -> bool:
        """Whether nothing has another name."""
        return self.style.shell is None and not self._words

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The declaration that the policy reads."""
        if self.style.shell is not None:
            return (self._shell_spec(self.style.shell),) if self._own else ()
        return tuple(self._show_spec(spec) for spec in self._own.values())

    def call_in(self, call: ToolCall) -> ToolCall | BadCall:
        """A call of the policy in own names; what it got wrong beside names stays."""
        if self.is_identity and call.tool in self._own:
            return call
        if self.style.shell is not None:
            return self._command_in(call, self.style.shell)
        own = self._hidden.get(call.tool)
        if own is None:
            return BadCall(_no_such("tool", call.tool, self._hidden))
        if call.raw is not None:
            return replace(call, tool=own)
        hidden = self._hidden_parameters[own]
        is_open = self._own[own].parameters.get("additionalProperties", False) is not False
        for name in call.arguments:
            if name not in hidden and not is_open:
                close = nearest(name, hidden)
                text = f"error: {call.tool}: unknown argument {echo(name)}, nearest is {close}"
                return BadCall(text)
        arguments = {hidden.get(name, name): value for name, value in call.arguments.items()}
        return replace(call, tool=own, arguments=arguments)

    def call_out(self, call: ToolCall) -> ToolCall:
        """The inverse of `call_in`, for policies that speak own names; unknown names stay.

        In a shell an argument can only be left out when all behind it are.
        """
        if self.style.shell is not None:
            spec = self._own.get(call.tool)
            keys = [key for key in (_keys(spec) if spec else ()) if key in call.arguments]
            kinds = _kinds(spec) if spec else {}
            words = [call.tool, *(_word(call.arguments[key], kinds.get(key)) for key in keys)]
            return replace(call, tool=self.style.shell, arguments={COMMAND: shlex.join(words)})
        shown = self._parameters.get(call.tool, {})
        arguments = {shown.get(name, name): value for name, value in call.arguments.items()}
        return replace(call, tool=self._shown.get(call.tool, call.tool), arguments=arguments)

    def error_out(self, text: str, status: ToolStatus, tool: str) -> str:
        """An answer of `tool`, an own name, in shown names.

        Only errors that tools themselves word speak of names: one line that begins with the
        tool's. What a program prints is left alone.
        """
        is_worded = text.startswith((f"error: {tool}: ", "error: no tool "))
        if status is not ToolStatus.ERROR or not is_worded or "\n" in text:
            return text
        return _replace_words(text, self._words)

    def text_out(self, text: str) -> str:
        """What an environment says outside of answers: names in backticks are translated."""
        names = self._shown
        return re.sub(r"`(\w+)`", lambda match: f"`{names.get(match[1], match[1])}`", text)

    def _show_spec(self, spec: ToolSpec) -> ToolSpec:
        shown = self._parameters[spec.name]
        properties = spec.parameters.get("properties", {})
        schema = {
            **spec.parameters,
            "properties": {shown[key]: value for key, value in properties.items()},
        }
        if "required" in schema:
            schema["required"] = [shown[key] for key in schema["required"]]
        text = spec.description
        if self.style.descriptions is Description.USAGE and shown:
            text = f"{text}: {', '.join(shown.values())}"
        elif self.style.descriptions is Description.NONE:
            text = ""
        return ToolSpec(self._shown[spec.name], text, schema)

    def _shell_spec(self, shell: str) -> ToolSpec:
        usages = [" ".join([name, *map(str.upper, _keys(s))]) for name, s in self._own.items()]
        lines = {
            Description.PLAIN: f"Run {', '.join(self._own)}",
            Description.USAGE: f"Run one of: {'; '.join(usages)}",
            Description.NONE: "",
        }
        schema: JsonObject = {
            "type": "object",
            "properties": {COMMAND: {"type": "string"}},
            "required": [COMMAND],
        }
        return ToolSpec(shell, lines[self.style.descriptions], schema)

    def _command_in(self, call: ToolCall, shell: str) -> ToolCall | BadCall:
        problem = check_call({shell: Tool(self._shell_spec(shell), _never)}, call)
        if problem is not None:
            return BadCall(problem)
        try:
            words = shlex.split(call.arguments[COMMAND])
        except ValueError as error:
            return BadCall(f"error: {shell}: {str(error).lower()}")
        name, *values = words or [""]
        spec = self._own.get(name)
        if spec is None:
            return BadCall(_no_such("command", name, self._own))
        keys = _keys(spec)
        if len(values) > len(keys):
            return BadCall(f"error: {shell}: usage: {' '.join([name, *map(str.upper, keys)])}")
        pairs = zip(keys, values, strict=False)
        kinds = _kinds(spec)
        arguments = {key: _value(text, kinds.get(key)) for key, text in pairs}
        return ToolCall(name, arguments, call.index)


async def _never(command: str) -> str:
    raise AssertionError(f"a shell's calls are translated, not carried out: {command}")


def _keys(spec: ToolSpec) -> tuple[str, ...]:
    return tuple(spec.parameters.get("properties", {}))


def _kinds(spec: ToolSpec) -> dict[str, str]:
    """The types of parameters that are scalars."""
    schemas = spec.parameters.get("properties", {}).items()
    typed = ((key, schema.get("type")) for key, schema in schemas if isinstance(schema, dict))
    return {key: kind for key, kind in typed if isinstance(kind, str) and kind in SCALAR_KINDS}


def _inverse(shown: Mapping[str, str], what: str) -> dict[str, str]:
    inverse = {after: before for before, after in shown.items()}
    if len(inverse) < len(shown):
        taken = sorted(shown.values())
        raise EnvError(f"harness: {what} must have different names, got {', '.join(taken)}")
    return inverse


def _show_name(name: str, style: ToolStyle) -> str:
    if name in style.names:
        return style.prefix + style.names[name]
    return style.prefix + _spell(name, style.case, is_tool=True)


def _show_parameter(name: str, style: ToolStyle) -> str:
    return style.parameters.get(name) or _spell(name, style.case, is_tool=False)


def _spell(name: str, case: NameCase, is_tool: bool) -> str:
    if case is NameCase.SNAKE:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    if case is NameCase.CAMEL:
        first, *rest = re.split(r"[_-]", name)
        head = first[:1].upper() + first[1:] if is_tool else first
        return head + "".join(word[:1].upper() + word[1:] for word in rest)
    return name


def _replace_words(text: str, words: Mapping[str, str]) -> str:
    if not words:
        return text
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.sub(rf"\b(?:{pattern})\b", lambda match: words[match[0]], text)


def _no_such(what: str, name: str, known: Iterable[str]) -> str:
    return f"error: no {what} {echo(name)}, nearest is {nearest(name, known)}"


def _word(value: JSON, kind: str | None) -> str:
    """A value as a word: a scalar as it is, anything else as JSON."""
    if kind is None:
        return json.dumps(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _value(text: str, kind: str | None) -> JSON:
    """A word as a value of its declared type; one that does not fit stays text."""
    try:
        if kind is None:
            return json.loads(text)
        if kind == "integer":
            return int(text)
        if kind == "number":
            return float(text)
    except (ValueError, RecursionError):
        return text
    if kind == "boolean" and text in ("true", "false"):
        return text == "true"
    return text
