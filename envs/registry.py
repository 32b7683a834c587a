"""Which environments there are, by id `ns/Name-vN`; importing one waits until it is made.

Built-in ones stand in the table below. Another package adds its own by an entry point of the group
`k3rl.envs` that names a module; importing the module must call `register`. Such modules are
imported at the first look-up of an id that is not known without them, or at `ids()`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar, cast

from k3rl.errors import EnvError
from k3rl.types import JsonObject

if TYPE_CHECKING:
    from k3rl.envs.base import EnvSpec, ScriptedPolicy, ToolEnv

GROUP = "k3rl.envs"
POLICY_NAMES = ("oracle", "random", "null", "demonstrator")

CODE_REPAIR_CHEATS = (
    "always_equal",
    "at_exit",
    "daemon",
    "deep_literal",
    "edit_tests",
    "except_hook",
    "exhaust",
    "exit_at_call",
    "exit_at_import",
    "flood",
    "forge_channel",
    "forge_output",
    "hang",
    "hard_code",
    "history",
    "kill_all",
    "kill_parent",
    "link_away",
    "link_zero",
    "patch_builtins",
    "patch_caller",
    "pipe",
    "pytest_plugins",
    "raise_base",
    "read_parent",
    "search_files",
    "shadow_modules",
    "stop_parent",
    "thread",
)
"""Named here so that listing them imports nothing."""

_ID = re.compile(r"(?P<name>[A-Za-z][\w.-]*/[A-Za-z]\w*)-v(?P<version>\d+)")
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, slots=True)
class _Entry:
    id: str
    entry_point: str
    policies: Mapping[str, Any] = field(default_factory=dict)
    """Name to ScriptedPolicy, or to `module:function`."""
    kwargs: JsonObject = field(default_factory=dict)
    cheats: Mapping[str, Any] = field(default_factory=dict)
    """Likewise; policies that must get nothing."""
    nondeterministic: bool = False
    loaded: type | None = None
    """The class itself where it registered itself by the decorator."""


def _builtin(id: str, module: str, name: str, cheats: tuple[str, ...] = ()) -> _Entry:
    policies = {policy: f"{module}:{policy}" for policy in POLICY_NAMES}
    tried = {cheat: f"{module}:cheat_{cheat}" for cheat in cheats}
    return _Entry(id, f"{module}:{name}", policies, cheats=tried)


def _code_repair() -> _Entry:
    """Its policies and its cheats are modules of their own; it has no demonstrator."""
    home = "k3rl.envs.code_repair"
    policies = {name: f"{home}.policies:{name}" for name in POLICY_NAMES if name != "demonstrator"}
    cheats = {name: f"{home}.cheats:{name}" for name in CODE_REPAIR_CHEATS}
    return _Entry("k3rl/CodeRepair-v0", f"{home}.env:CodeRepair", policies, cheats=cheats)


BUILTINS = (
    _code_repair(),
    _builtin("k3rl/FileHunt-v0", "k3rl.envs.file_hunt", "FileHunt"),
    _builtin(
        "k3rl/Reason-v0",
        "k3rl.envs.reason",
        "Reason",
        cheats=("echo", "code", "every", "nan", "empty", "long"),
    ),
)


class Registry:
    """Ids and what they stand for. The module's functions are those of the one that k3rl uses."""

    def __init__(self, entries: tuple[_Entry, ...] = BUILTINS, group: str | None = GROUP) -> None:
        """`group` is the entry-point group looked in; None: none."""
        self._entries: dict[str, _Entry] = {}
        self._group = group
        self._broken: list[str] = []
        self._lock = threading.RLock()
        for entry in entries:
            self._add(entry)

    def register(
        self,
        id: str,
        entry_point: str | None = None,
        policies: Mapping[str, ScriptedPolicy | str] | None = None,
        cheats: Mapping[str, ScriptedPolicy | str] | None = None,
        nondeterministic: bool = False,
        **kwargs: Any,
    ) -> Callable[[_Class], _Class]:
        """Add an environment; with `entry_point` (module:Class) by call, without as a decorator.

        `policies` maps oracle, random, null and any other name to a ScriptedPolicy or to its
        `module:function`. `cheats` are policies that must never be rewarded, by what they try; the
        checker plays all of them. `kwargs` are JSON and go to the class when it is made.
        Raises EnvError for a bad id, one that is taken, or a version below one that is registered.
        """
        _check_kwargs(id, kwargs)

        def add(entry_point: str, loaded: type | None = None) -> None:
            named, tried = dict(policies or {}), dict(cheats or {})
            settings = dict(kwargs)
            self._add(_Entry(id, entry_point, named, settings, tried, nondeterministic, loaded))

        def decorate(cls: _Class) -> _Class:
            if entry_point is not None:
                raise EnvError(f"{id}: registered by its entry point, so not a decorator too")
            add(f"{cls.__module__}:{cls.__qualname__}", cls)
            return cls

        if entry_point is not None:
            add(entry_point)
        return decorate

    def ids(self) -> list[str]:
        """Every id there is, sorted. Warns of entry points that cannot be imported."""
        self._load_group()
        for problem in self._broken:
            warnings.warn(problem, RuntimeWarning, stacklevel=2)
        return sorted(self._entries)

    def spec(
        self, id: str, /, *, reward: Mapping[str, float] | None = None, **kwargs: Any
    ) -> EnvSpec:
        """What is registered under an id, `kwargs` replacing its own. Imports no environment.

        `reward` weighs the parts of the reward; see `EnvSpec.reward`.
        """
        from k3rl.envs.base import EnvSpec

        entry = self._find(id)
        _check_kwargs(id, kwargs)
        merged = json.loads(json.dumps({**entry.kwargs, **kwargs}))
        plain = EnvSpec(entry.id, entry.entry_point, merged, entry.nondeterministic)
        return replace(plain, reward=dict(reward)) if reward else plain

    def make(
        self, id: str, /, *, reward: Mapping[str, float] | None = None, **kwargs: Any
    ) -> ToolEnv:
        """A new, single-use session object. Raises EnvError naming the id and what is wrong."""
        spec = self.spec(id, reward=reward, **kwargs)
        entry = self._find(id)
        cls = entry.loaded or _load(id, entry.entry_point)
        try:
            inspect.signature(cls).bind(spec, **spec.kwargs)
        except TypeError as error:
            raise EnvError(f"{id}: {entry.entry_point} cannot be made: {error}") from None
        return cast("ToolEnv", cls(spec, **spec.kwargs))

    def cheats(self, id: str) -> list[str]:
        """What the known cheats of an environment try; `policy` gives one by `cheat/<name>`."""
        return sorted(self._find(id).cheats)

    def policy(self, id: str, name: str) -> ScriptedPolicy:
        """A scripted policy of an environment. Raises EnvError naming those that it has."""
        entry = self._find(id)
        policies = {
            **entry.policies,
            **{f"cheat/{each}": entry.cheats[each] for each in entry.cheats},
        }
        if name not in policies:
            has = ", ".join(sorted(policies)) or "none"
            raise EnvError(f"{id}: no policy {name!r}, it has: {has}")
        found = policies[name]
        return cast("ScriptedPolicy", _load(id, found) if isinstance(found, str) else found)

    def _add(self, entry: _Entry) -> None:
        name, version = _parse(entry.id)
        with self._lock:
            for id, other in self._entries.items():
                if id == entry.id:
                    raise EnvError(f"{id}: already registered, to {other.entry_point}")
                other_name, other_version = _parse(id)
                if other_name == name and other_version > version:
                    raise EnvError(f"{entry.id}: a downgrade, {id} is registered")
            self._entries[entry.id] = entry

    def _find(self, id: str) -> _Entry:
        if id not in self._entries:
            self._load_group()
        if id in self._entries:
            return self._entries[id]
        from difflib import get_close_matches

        close = get_close_matches(id, self._entries, n=1, cutoff=0.0)
        hint = f", nearest is {close[0]}" if close else ""
        raise EnvError("; ".join([f"no environment {id!r}{hint}", *self._broken]))

    def _load_group(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            for point in metadata.entry_points(group=group) if group else ():
                try:
                    point.load()
                except Exception as error:
                    whose = f"entry point {group}: {point.name} = {point.value}"
                    self._broken.append(f"{whose} cannot be loaded: {error!r}")


def _parse(id: str) -> tuple[str, int]:
    match = _ID.fullmatch(id)
    if match is None:
        raise EnvError(f"{id!r}: an environment id is ns/Name-vN, such as k3rl/FileHunt-v0")
    return match["name"], int(match["version"])


def _check_kwargs(id: str, kwargs: JsonObject) -> None:
    try:
        json.dumps(kwargs)
    except (TypeError, ValueError) as error:
        raise EnvError(f"{id}: kwargs must be JSON: {error}") from None


def _load(id: str, where: str) -> Any:
    """What `module:name` stands for."""
    module, _, name = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvError(f"{id}: cannot load {where}: {error}") from error
    return found


_registry = Registry()
register = _registry.register
ids = _registry.ids
spec = _registry.spec
make = _registry.make
cheats = _registry.cheats
policy = _registry.policy
