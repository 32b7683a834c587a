"""Checks of the normalisers: few, each does what it says, and none hides what is a difference."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from k3rl.envs.base import MAX_NORMALISERS, Normaliser, ToolEnv
from k3rl.envs.checker.case import Broken, Case, Undeclared, need, shorten
from k3rl.envs.checker.check import Check, Group

MIN_HIDDEN = 3
"""So many different texts that a repetition never changes, and that read the same afterwards, are
differences between tasks. Two can be the clock's doing."""


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
    """No outputs of the oracle's plays that differ from task to task read the same afterwards.

    The plays are run twice without normalisers. Outputs that read the same with them, though none
    of them changes from run to run, differ in what the tasks are.
    """
    normalisers = case.make().normalisers
    if not normalisers:
        raise Undeclared("no normaliser")
    first, second = await _raw_outputs(case), await _raw_outputs(case)
    stable: dict[str, set[str]] = defaultdict(set)
    noisy = set()
    for one, other in zip(first, second, strict=False):
        stable[_all(normalisers, one)].add(one)
        if one != other:
            noisy.add(_all(normalisers, one))
    for text, raw in sorted(stable.items()):
        shown = " / ".join(shorten(each) for each in sorted(raw)[:2])
        need(text in noisy or len(raw) < MIN_HIDDEN, f"{len(raw)} outputs read the same: {shown}")
    return f"{len(first)} outputs, {len(noisy)} of them change from run to run"


async def _raw_outputs(case: Case) -> list[str]:
    """What the tools say to the oracle when nothing is normalised."""

    def bare() -> ToolEnv:
        env = case.make()
        env.normalisers = ()
        return env

    plays = await replace(case, make=bare).play_all(case.tasks("train"), case.policy("oracle"))
    return [m.content for played in plays for m in played.transcript if m.role == "tool"]


CHECKS = (
    Check("normalisers are few", Group.NORMALISERS, normalisers_are_few),
    Check("planted changes stay", Group.NORMALISERS, planted_changes_stay),
    Check("outputs stay apart", Group.NORMALISERS, outputs_stay_apart),
)
