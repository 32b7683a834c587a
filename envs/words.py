"""How errors for the policy repeat and guess names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ECHO_CHARS = 40
"""Most characters of a wrong name that an error repeats."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`; None only when nothing is known."""
    close = difflib.get_close_matches(name[:ECHO_CHARS], list(known), n=1, cutoff=0.0)
    return close[0] if close else None


def echo(name: str) -> str:
    """A name as an error repeats it."""
    shown = name if len(name) <= ECHO_CHARS else name[:ECHO_CHARS] + "..."
    if shown.isprintable():
        return shown
    # One line, whatever the name holds.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
