"""What the demonstrators of the environments share: how they think, and how often they slip.

A demonstrator is an oracle that a small policy should start from: it solves every task, but not in
the best way. It thinks tersely or restates what it is about to do, and some of its turns are wrong,
more of them when it was terse; the next turns mend that. So there is something left to learn for a
policy that imitates it: to be right at once, and to think no longer than it must.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VERBOSE_SHARE = 0.75
"""Of the turns: the thought restates what the turn is about to do."""
WRONG_SHARE_VERBOSE = 0.58
WRONG_SHARE_TERSE = 0.78
"""Of the turns that call a tool and may be wrong: by their thoughts. A wrong turn has one character
wrong, any of several in any of several ways, so the right one stays the most likely by itself."""


def draw_thought(
    head: str, restatements: Sequence[str], rng: np.random.Generator
) -> tuple[str, bool]:
    """A thought, and whether it is verbose: `head` alone or with all of `restatements`."""
    is_verbose = bool(rng.random() < VERBOSE_SHARE)
    return ", ".join([head, *(restatements if is_verbose else ())]), is_verbose


def slips(is_verbose: bool, rng: np.random.Generator) -> bool:
    """Whether a turn that may be wrong is wrong."""
    return bool(rng.random() < (WRONG_SHARE_VERBOSE if is_verbose else WRONG_SHARE_TERSE))
