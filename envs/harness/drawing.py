"""The harness of a task: the config's own, or one drawn for every task group.

What is drawn follows from the seed and the task alone, so the members of a group share it, at every
level, and a run that is carried on or replayed draws the same again.
"""

from __future__ import annotations

from typing import Any

from k3rl.envs.harness.parts import Harness
from k3rl.envs.harness.presets import PRESETS
from k3rl.types import JsonObject, Task, from_plain, philox, to_plain

PARTS = ("system_prompt", "tools", "context", "skills", "memory", "sub_agents", "max_turns")


def harness_of(settings: JsonObject, seed: int, task: Task) -> Harness:
    """The harness that `task` is played in.

    `settings` is the config's section `harness` as plain JSON; `seed` the run's.
    """
    preset, changes = settings["preset"], [settings]
    randomize = settings.get("randomize")
    if randomize is not None:
        rng = philox(seed, "harness", task.key)
        if randomize["presets"]:
            preset = _draw(list(randomize["presets"].items()), rng)
        if randomize["variants"]:
            changes.append(_draw([(v, v["weight"]) for v in randomize["variants"]], rng))
    return _composed(preset, *changes)


def harnesses(settings: JsonObject) -> list[Harness]:
    """Every harness that a run with these settings may draw."""
    randomize = settings.get("randomize") or {}
    presets = list(randomize.get("presets", ())) or [settings["preset"]]
    variants: list[JsonObject] = randomize.get("variants", []) or [{}]
    return [_composed(preset, settings, each) for preset in presets for each in variants]


def _composed(preset: str, *changes: JsonObject) -> Harness:
    plain: JsonObject = to_plain(PRESETS[preset])
    for change in changes:
        _change(plain, change)
    return from_plain(Harness, plain)


def _draw(weighted: list[tuple[Any, float]], rng: Any) -> Any:
    """One of the first, each as likely as its weight says; uses one number."""
    place = float(rng.random()) * sum(weight for _, weight in weighted)
    for each, weight in weighted:
        place -= weight
        if place < 0.0:
            return each
    return weighted[-1][0]


def _change(plain: JsonObject, change: JsonObject) -> None:
    """Put the parts that `change` names in place; of a part only the fields that it names.

    False takes a part away.
    """
    for name in PARTS:
        value = change.get(name)
        if value is None:
            continue
        if value is False:
            value = None
        elif name != "skills" and isinstance(value, dict):
            named = {key: each for key, each in value.items() if each is not None}
            value = {**(plain[name] or {}), **named}
        plain[name] = value
