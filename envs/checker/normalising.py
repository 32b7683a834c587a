"""Checks of the normalisers: few, each does what it says, and none hides what is a difference."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from k3rl.envs.base import MAX_NORMALISERS, Normaliser, ToolEnv
from k3rl.envs.checker.case import Broken, Case, Undeclared, need, shorten
from k3rl.envs.checker.check import Check, Group

MIN_HIDDEN = 3
"""So many different texts in one place that a repetition never changes are differences between
tasks; two can be the clock's doing."""


async def normalisers_are_few(case: Case) -> str:
    """At most MAX_NORMALISERS, each with a name of its own."""
    normalisers = case.make().normalisers
    names = [each.name for each in normalisers]
    need(len(names) <= MAX_NORMALISERS, f"{len(names)}, at most {MAX_NORMALISERS}: {names}")
    need(len(set(names)) == len(names), f"names come twice: {names}")
    return ", ".join(names) or "none"


async def planted_changes_stay(case: Case) -> str:
    """Each makes its `hides` equal, keeps its `keeps` apart, and leaves them so when run again."""
    normalisers = case.make().normalisers
    if not normalisers:
        raise Undeclared("no normaliser")
    for each in normalisers:
        try:
            one, other = (each.apply(text) for text in each.hides)
            kept = [each.apply(text) for text in each.keeps]
        except re.error as error:
            raise Broken(f"{each.name}: {each.pattern!r}: {error}") from None
        need(each.hides[0] != each.hides[1], f"{each.name}: hides two equal texts")
        need(one == other, f"{each.name}: {shorten(one)} / {shorten(other)} stay different")
        need(each.keeps[0] != each.keeps[1], f"{each.name}: keeps two equal texts")
        need(kept[0] != kept[1], f"{each.name}: hides the planted change {each.keeps}")
        need(each.apply(one) == one, f"{each.name}: applied again it changes {shorten(one)}")
        need(
            _all(normalisers, each.keeps[0]) != _all(normalisers, each.keeps[1]),
            f"{each.name}: the others hide its planted change {each.keeps}",
        )
    return f"{len(normalisers)} planted changes"


def _all(normalisers: tuple[Normaliser, ...], text: str) -> str:
    for each in normalisers:
        text = each.apply(text)
    return text


async def outputs_stay_apart(case: Case) -> str:
    """What is replaced in the tools' outputs changes from run to run, not from task to task.

    The oracle plays every task twice without normalisers. Where a normaliser finds texts that a
    repetition never changes and that differ between tasks, it hides what the tasks are.
    """
    normalisers = case.make().normalisers
    if not normalisers:
        raise Undeclared("no normaliser")
    first, second = await _raw_outputs(case), await _raw_outputs(case)
    kept: dict[_Place, set[str]] = defaultdict(set)
    noisy: set[_Place] = set()
    for one, other in zip(first, second, strict=False):
        again = dict(_matches(normalisers, other))
        for place, text in _matches(normalisers, one):
            kept[place].add(text)
            if again.get(place) != text:
                noisy.add(place)
    for place, texts in sorted(kept.items()):
        shown = " / ".join(shorten(each) for each in sorted(texts)[:2])
        is_difference = len(texts) >= MIN_HIDDEN and place not in noisy
        need(not is_difference, f"{place[0]}: hides what differs from task to task: {shown}")
    return f"{len(first)} outputs, {len(noisy)} of {len(kept)} places change from run to run"


_Place = tuple[str, str, int]
"""A normaliser, a tool, and which match in its output."""


def _matches(
    normalisers: tuple[Normaliser, ...], output: tuple[str, str]
) -> Iterator[tuple[_Place, str]]:
    """Where the normalisers, one after the other, find something in the output of a tool."""
    tool, text = output
    for each in normalisers:
        for number, match in enumerate(re.finditer(each.pattern, text)):
            yield (each.name, tool, number), match[0]
        text = each.apply(text)


async def _raw_outputs(case: Case) -> list[tuple[str, str]]:
    """What the tools, by name, say to the oracle when nothing is normalised."""

    def bare() -> ToolEnv:
        env = case.make()
        env.normalisers = ()
        return env

    plays = await replace(case, make=bare).play_all(case.tasks("train"), case.policy("oracle"))
    said = [message for played in plays for message in played.transcript]
    return [(message.tool or "", message.content) for message in said if message.role == "tool"]


CHECKS = (
    Check("normalisers are few", Group.NORMALISERS, normalisers_are_few),
    Check("planted changes stay", Group.NORMALISERS, planted_changes_stay),
    Check("outputs stay apart", Group.NORMALISERS, outputs_stay_apart),
)
