"""Small programs with one fault each, and inputs that tell the right one from the broken one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3rl.envs.terminal_state import Probe

NUM_PROBES = 4
"""One ascending, one descending and one of even numbers only: each fault shows in some of them."""
HEAD = "import sys\n\nnumbers = [int(line) for line in sys.stdin]\n"
PROGRAMS = (
    (
        "the sum of their squares",
        "total = 0\nfor number in numbers:\n    total += number * number\nprint(total)\n",
        (("number * number", "number + number"), ("total = 0", "total = 1"), ("+=", "=")),
    ),
    (
        "how many of them are even",
        "count = 0\nfor number in numbers:\n    if number % 2 == 0:\n        count += 1\n"
        "print(count)\n",
        (("== 0", "== 1"), ("number % 2", "number / 2"), ("count += 1", "count += number")),
    ),
    (
        "the largest minus the smallest of them",
        "print(max(numbers) - min(numbers))\n",
        (("-", "+"), ("max(numbers)", "numbers[-1]"), ("min(numbers)", "min(numbers[1:])")),
    ),
    (
        "them in descending order on one line, with commas between",
        'print(",".join(str(number) for number in sorted(numbers, reverse=True)))\n',
        ((", reverse=True", ""), ('","', '", "'), ("str(number)", "number")),
    ),
    (
        "the sum of those at odd places, the first place being 1",
        "print(sum(numbers[::2]))\n",
        (("[::2]", "[1::2]"), ("[::2]", "[::3]"), ("sum(", "len(")),
    ),
)
"""What it prints, how, and replacements that each break it."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A program and its fault."""

    purpose: str
    right: str
    broken: str
    sample: str
    probes: tuple[Probe, ...]


def result_of(purpose: str, numbers: list[int]) -> str:
    """What the program of that purpose prints, worked out apart from it."""
    results = (
        str(sum(number**2 for number in numbers)),
        str(sum(not number & 1 for number in numbers)),
        str(sorted(numbers)[-1] - sorted(numbers)[0]),
        ",".join(map(str, sorted(numbers)[::-1])),
        str(sum(number for place, number in enumerate(numbers, 1) if place % 2)),
    )
    return results[[each for each, _, _ in PROGRAMS].index(purpose)]


def draw_repair(rng: np.random.Generator) -> Repair:
    """A program with one of its faults, a sample to look at and the runs that judge it."""
    purpose, body, faults = PROGRAMS[int(rng.integers(len(PROGRAMS)))]
    old, new = faults[int(rng.integers(len(faults)))]
    inputs = [[int(n) for n in rng.integers(1, 1000, 9 + place)] for place in range(NUM_PROBES + 1)]
    inputs[1].sort()
    inputs[2].sort(reverse=True)
    inputs[3] = [2 * number for number in inputs[3]]
    texts = ["".join(f"{number}\n" for number in numbers) for numbers in inputs]
    probes = tuple(
        Probe(("python3", "tool.py"), text.encode(), f"{result_of(purpose, numbers)}\n".encode())
        for text, numbers in zip(texts[1:], inputs[1:], strict=True)
    )
    return Repair(purpose, HEAD + body, HEAD + body.replace(old, new, 1), texts[0], probes)
