"""Which environments there are, by id `ns/Name-vN`; importing one waits until it is made.

Built-in ones stand in the table of entries.py. Another package adds its own by an entry point of
the group `k3rl.envs` that names a module; importing the module must call `register`. Such modules
are imported at the first look-up of an id that is not known without them, or at `ids()`. A name
belongs to the package that registered it first: no other package may add a version of it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar, cast

from k3rl.envs.entries import BUILTINS, Entry
from k3rl.errors import EnvError
from k3rl.types import JsonObject

if TYPE_CHECKING:
    from k3rl.envs.base import EnvSpec, ScriptedPolicy, ToolEnv

GROUP = "k3rl.envs"

_ID = re.compile(r"(?P<name>[A-Za-z][\w.-]*/[A-Za-z]\w*)-v(?P<version>\d+)")
_REFERENCE = re.compile(r"[\w.]+:[\w.]+")
_PROTOCOL = (
    "spec", "tools", "sandbox_spec", "normalisers", "task", "files", "open", "act", "state",
    "grade", "close",
)  # fmt: skip
_Class = TypeVar("_Class", bound=type)


class Registry:
    """Ids and what they stand for. The module's functions are those of the one that k3rl uses."""

    def __init__(self, entries: tuple[Entry, ...] = BUILTINS, group: str | None = GROUP) -> None:
        """`group` is the entry-point group looked in; None: none."""
        self._entries: dict[str, Entry] = {}
        self._group = group
        self._broken: list[str] = []
        self._loading = ""
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
        needs: Sequence[str] = (),
        **kwargs: Any,
    ) -> Callable[[_Class], _Class]:
        """Add an environment; with `entry_point` (module:Class) by call, without as a decorator.

        `policies` maps oracle, random, null and any other name to a ScriptedPolicy or to its
        `module:function`. `cheats` are policies that must never be rewarded, by what they try; the
        checker plays all of them. `needs` are distributions that `make` asks for by name when they
        are missing. `kwargs` are JSON and go to the class when it is made.
        Raises EnvError for a bad id, one that is taken or below one that is registered, for a bad
        policy and for bad kwargs.
        """
        _check_kwargs(id, kwargs)
        _check_policies(id, {**(policies or {}), **(cheats or {})})

        def add(entry_point: str, loaded: type | None = None) -> None:
            named, tried = dict(policies or {}), dict(cheats or {})
            settings = dict(kwargs)
            where, whose = entry_point, self._loading
            self._add(
                Entry(
                    id, where, named, settings, tried, nondeterministic, tuple(needs), whose, loaded
                )
            )

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
        for problem in self.problems():
            warnings.warn(problem, RuntimeWarning, stacklevel=2)
        return self.names()

    def names(self) -> list[str]:
        """Every id there is, sorted; what cannot be loaded `problems` tells."""
        self._load_group()
        return sorted(self._entries)

    def problems(self) -> list[str]:
        """What is wrong with the entry points that cannot be loaded, one line each."""
        self._load_group()
        return list(self._broken)

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
        from k3rl.envs.base import ToolEnv

        spec = self.spec(id, reward=reward, **kwargs)
        entry = self._find(id)
        _check_needs(entry)
        cls = entry.loaded or _load(id, entry.entry_point)
        if not callable(cls):
            raise EnvError(f"{id}: {entry.entry_point} is no class")
        try:
            inspect.signature(cls).bind(spec, **spec.kwargs)
        except (TypeError, ValueError) as error:
            raise EnvError(f"{id}: {entry.entry_point} cannot be made: {error}") from None
        try:
            env = cls(spec, **spec.kwargs)
        except (TypeError, AttributeError, LookupError) as error:
            raise EnvError(f"{id}: {entry.entry_point} cannot be made: {error!r}") from error
        if not isinstance(env, ToolEnv):
            missing = sorted(name for name in _PROTOCOL if not hasattr(env, name))
            raise EnvError(f"{id}: {entry.entry_point} is no ToolEnv, it lacks {missing}")
        return env

    def package(self, id: str) -> str:
        """The distribution that registered an environment; "" for code that no package brought."""
        return self._find(id).package

    def policies(self, id: str) -> list[str]:
        """The names of the scripted policies of an environment, cheats aside."""
        return sorted(self._find(id).policies)

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
        policy = _load(id, found) if isinstance(found, str) else found
        if not callable(policy):
            raise EnvError(f"{id}: policy {name!r}: {found} is no function")
        return cast("ScriptedPolicy", policy)

    def _add(self, entry: Entry) -> None:
        name, version = _parse(entry.id)
        with self._lock:
            for id, other in self._entries.items():
                whose = f" by {other.package}" if other.package else ""
                if id == entry.id:
                    raise EnvError(f"{id}: already registered{whose}, to {other.entry_point}")
                other_name, other_version = _parse(id)
                if other_name != name:
                    continue
                if other_version > version:
                    raise EnvError(f"{entry.id}: a downgrade, {id} is registered{whose}")
                if entry.package and other.package and entry.package != other.package:
                    raise EnvError(f"{entry.id}: a version of {id}, which is registered{whose}")
            self._entries[entry.id] = entry

    def _find(self, id: str) -> Entry:
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
            points = metadata.entry_points(group=group) if group else ()
            for point in sorted(points, key=lambda each: (_package(each), each.name)):
                self._loading = _package(point)
                try:
                    point.load()
                except Exception as error:  # of a package that is not ours
                    whose = f"package {self._loading}: entry point {point.name} = {point.value}"
                    self._broken.append(f"{whose} cannot be loaded: {error!r}")
                finally:
                    self._loading = ""


def _package(point: metadata.EntryPoint) -> str:
    """The name of the distribution that an entry point is of."""
    return point.dist.name if point.dist is not None else ""


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


def _check_policies(id: str, policies: Mapping[str, Any]) -> None:
    for name, policy in policies.items():
        named = isinstance(policy, str) and _REFERENCE.fullmatch(policy)
        if not named and not callable(policy):
            raise EnvError(f"{id}: policy {name!r} must be a function or module:name")


def _check_needs(entry: Entry) -> None:
    for package in entry.needs:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            raise EnvError(f"{entry.id} needs {package}: pip install {package}") from None


def _load(id: str, where: str) -> Any:
    """What `module:name` stands for."""
    module, _, name = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        missing = error.name or "."
        hint = "" if "." in missing else f": pip install {missing.replace('_', '-')}"
        raise EnvError(f"{id}: cannot load {where}: {error}{hint}") from error
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvError(f"{id}: cannot load {where}: {error}") from error
    return found


default = Registry()
register = default.register
ids = default.ids
names = default.names
problems = default.problems
spec = default.spec
make = default.make
package = default.package
policies = default.policies
cheats = default.cheats
policy = default.policy
