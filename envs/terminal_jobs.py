"""The jobs of k3rl/Terminal-v0: a workspace, an instruction, what must be there in the end.

Each generator draws names and contents from its seed and works out the final state itself; the
commands that reach it are for the oracle alone. A workspace never holds its final state from the
start. Nothing depends on times, owners or the order of directory entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from k3rl.envs.terminal_repair import draw_repair
from k3rl.envs.terminal_state import Entry, Json, Link, Packed, Probe, Script
from k3rl.types import philox

WORDS = (
    "amber", "basil", "cedar", "delta", "ember", "fable", "gamma", "hazel", "ivory", "jade",
    "karma", "lemon", "maple", "nylon", "olive", "pearl", "quartz", "raven", "sable", "topaz",
    "umber", "velvet", "willow", "xenon", "yarrow", "zephyr",
)  # fmt: skip
FOLDERS = ("data", "docs", "media", "old", "site", "work")
REGIONS = ("east", "north", "south", "west")
LEVELS = ("DEBUG", "ERROR", "INFO", "WARN")


@dataclass(frozen=True, slots=True)
class Job:
    """One generated job."""

    files: Mapping[str, bytes]
    instruction: str
    commands: tuple[str, ...]
    """What solves it, in bash."""
    expected: Mapping[str, Entry]
    """Every file and link of the final workspace, by path."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """Permission bits that matter, by path."""
    probes: tuple[Probe, ...] = ()
    """Runs of the `Script` among the expected, on inputs that the workspace does not hold."""


def _names(rng: np.random.Generator, count: int) -> list[str]:
    return [WORDS[int(n)] for n in rng.permutation(len(WORDS))[:count]]


def _paths(rng: np.random.Generator, count: int, suffixes: Iterable[str]) -> list[str]:
    """Paths in nested folders; every name stands once."""
    chosen = list(suffixes)
    folders = [str(each) for each in rng.permutation(FOLDERS)[:3]]
    folders += [f"{folders[0]}/{WORDS[int(rng.integers(len(WORDS)))]}"]
    return [
        f"{rng.choice(folders)}/{name}{chosen[place % len(chosen)]}"
        for place, name in enumerate(_names(rng, count))
    ]


def _text(rng: np.random.Generator, num_lines: int = 3) -> bytes:
    lines = (" ".join(_names(rng, 3)) for _ in range(num_lines))
    return "".join(f"{line}\n" for line in lines).encode()


def move_by_name(rng: np.random.Generator) -> Job:
    """Collect the files of one suffix."""
    suffix, *others = (str(each) for each in rng.permutation([".log", ".txt", ".csv", ".bak"]))
    files = {path: _text(rng) for path in _paths(rng, 10, (suffix, *others[:2]))}
    expected = {
        f"found/{path.rpartition('/')[2]}" if path.endswith(suffix) else path: data
        for path, data in files.items()
    }
    command = (
        f"mkdir -p found && find . -name '*{suffix}' ! -path './found/*' -exec mv {{}} found/ \\;"
    )
    told = f"Move every file whose name ends in {suffix} into the folder found. Keep their names."
    return Job(files, told, (command,), expected)


def move_by_size(rng: np.random.Generator) -> Job:
    """Collect the files above a size."""
    limit = 100 * int(rng.integers(3, 9))
    paths = _paths(rng, 9, (".bin", ".dat"))
    sizes = [limit, limit + 1, *(int(n) for n in rng.integers(1, 2 * limit, len(paths) - 2))]
    files = {path: b"x" * size for path, size in zip(paths, sizes, strict=True)}
    expected = {
        f"big/{path.rpartition('/')[2]}" if len(data) > limit else path: data
        for path, data in files.items()
    }
    command = (
        f"mkdir -p big && find . -size +{limit}c -type f ! -path './big/*' -exec mv {{}} big/ \\;"
    )
    told = f"Move every file of more than {limit} bytes into the folder big. Keep their names."
    return Job(files, told, (command,), expected)


def delete_by_content(rng: np.random.Generator) -> Job:
    """Remove the files that hold a line."""
    paths, mark = _paths(rng, 9, (".txt", ".md")), f"{_names(rng, 1)[0]}-{rng.integers(100, 1000)}"
    files = {}
    for place, path in enumerate(paths):
        extra = (f"{mark}\n", f"not {mark}\n", f"{mark}0\n")[place % 3].encode()
        files[path] = _text(rng, 2) + extra + _text(rng, 1)
    line = f"\n{mark}\n".encode()
    expected = {path: data for path, data in files.items() if line not in data}
    command = f"grep -rlxZ -- '{mark}' . | xargs -0r rm"
    told = f"Delete every file that has a line which is exactly {mark}."
    return Job(files, told, (command,), expected)


def permissions(rng: np.random.Generator) -> Job:
    """Set permission bits by content."""
    paths = _paths(rng, 9, ("", ".sh", ".key"))
    modes: dict[str, int] = {}
    files: dict[str, bytes] = {}
    for path in paths:
        kind = int(rng.integers(3)) if modes else 0
        first = ("#!/bin/sh\n", "SECRET\n", "# text\n")[kind].encode()
        files[path], modes[path] = first + _text(rng), (0o755, 0o600, 0o644)[kind]
    told = (
        "Set the permissions of every file by its first line: 755 if that starts with #!, "
        "600 if it is SECRET, 644 otherwise."
    )
    command = (
        'find . -type f | while read -r f; do case "$(head -n1 "$f")" in '
        '\'#!\'*) chmod 755 "$f";; SECRET) chmod 600 "$f";; *) chmod 644 "$f";; esac; done'
    )
    return Job(files, told, (command,), files, modes)


def csv_report(rng: np.random.Generator) -> Job:
    """Sum a column by another."""
    rows = [
        (f"2{n:03}", str(rng.choice(REGIONS)), int(rng.integers(1, 500)), _names(rng, 1)[0])
        for n in range(int(rng.integers(12, 30)))
    ]
    lines = ["order,region,amount,item", *(",".join(map(str, row)) for row in rows)]
    files = {"sales.csv": "".join(f"{line}\n" for line in lines).encode()}
    totals: dict[str, int] = {}
    for _, region, amount, _ in rows:
        totals[region] = totals.get(region, 0) + amount
    report = "".join(f"{region} {totals[region]}\n" for region in sorted(totals))
    told = (
        "sales.csv lists orders. Write report.txt with one line `region total` per region, "
        "total being the sum of its amounts, sorted by region."
    )
    command = (
        "awk -F, 'NR>1 {t[$2]+=$3} END {for (r in t) print r, t[r]}' sales.csv | sort > report.txt"
    )
    return Job(files, told, (command,), {**files, "report.txt": report.encode()})


def count_levels(rng: np.random.Generator) -> Job:
    """Count over all logs."""
    files, counts = {}, dict.fromkeys(LEVELS, 0)
    for path in _paths(rng, 4, (".log",)):
        lines = []
        for _ in range(int(rng.integers(4, 12))):
            level = str(rng.choice(LEVELS))
            counts[level] += 1
            lines.append(f"[{level}] {' '.join(_names(rng, 2))} {rng.choice(LEVELS)}\n")
        files[path] = "".join(lines).encode()
    report = "".join(f"{level} {counts[level]}\n" for level in LEVELS if counts[level])
    told = (
        "Every line of the .log files below this folder starts with a level in brackets. Write "
        "counts.txt with one line `LEVEL count` per level that occurs, over all files, sorted."
    )
    command = (
        "find . -name '*.log' -exec cat {} + | sed 's/^\\[\\([A-Z]*\\)\\].*/\\1/' | sort | uniq -c"
        " | awk '{print $2, $1}' > counts.txt"
    )
    return Job(files, told, (command,), {**files, "counts.txt": report.encode()})


def rename_pattern(rng: np.random.Generator) -> Job:
    """Pad numbers in names."""
    name, other = _names(rng, 2)
    numbers = [int(n) for n in rng.permutation(120)[:8]]
    moved = {f"shots/{name}_{n}.txt": f"shots/{name}-{n:04}.txt" for n in numbers}
    files = {path: _text(rng, 1) for path in moved}
    kept = {f"shots/{other}_{n}.txt": _text(rng, 1) for n in numbers[:3]}
    expected = {**{moved[path]: data for path, data in files.items()}, **kept}
    told = (
        f"Rename every shots/{name}_N.txt to shots/{name}-NNNN.txt, the number N padded with zeros "
        "to four digits. Leave the other files."
    )
    command = (
        f'cd shots && for f in {name}_*.txt; do [ -e "$f" ] || continue; n=${{f#{name}_}}; '
        f'mv "$f" "$(printf \'{name}-%04d.txt\' "${{n%.txt}}")"; done'
    )
    return Job({**files, **kept}, told, (command,), expected)


def archive(rng: np.random.Generator) -> Job:
    """Pack some files."""
    files = {path: _text(rng) for path in _paths(rng, 8, (".md", ".txt"))}
    packed = {path: data for path, data in files.items() if path.endswith(".md")}
    told = (
        "Make notes.tar.gz, a gzipped tar archive of all .md files below this folder and of "
        "nothing else, named in it by their paths from here."
    )
    command = "find . -name '*.md' -type f -printf '%P\\n' | sort | tar -czf notes.tar.gz -T -"
    return Job(files, told, (command,), {**files, "notes.tar.gz": Packed(packed)})


def dedupe(rng: np.random.Generator) -> Job:
    """Keep one file of each content."""
    paths = sorted(_paths(rng, 10, (".txt", ".dat")))
    contents = [_text(rng, 2) for _ in range(5)]
    files = {path: contents[int(rng.integers(5))] for path in paths}
    expected: dict[str, Entry] = {}
    for path in paths:
        if files[path] not in expected.values():
            expected[path] = files[path]
    told = (
        "Some files below this folder have the same content. Of each such set keep only the file "
        "whose path comes first in byte order and delete the others."
    )
    command = (
        "find . -type f | sort | xargs -d '\\n' sha256sum | awk 'seen[$1]++' | cut -c67- | "
        "xargs -rd '\\n' rm"
    )
    return Job(files, told, (command,), expected)


def edit_config(rng: np.random.Generator) -> Job:
    """Change one value of one section."""
    sections, keys = _names(rng, 4), ("host", "port", "retries")
    old, new = (int(n) for n in 1000 + rng.permutation(9000)[:2])
    section = str(rng.choice(sections))

    def write(value: int) -> bytes:
        text = "# port=1 is not used\n"
        for name in sections:
            held = ("local", value if name == section else old, 3)
            text += f"[{name}]\n" + "".join(f"{k}={v}\n" for k, v in zip(keys, held, strict=True))
        return text.encode()

    told = f"In app.ini set port to {new} in the section {section}. Change nothing else in it."
    command = f"sed -i '/^\\[{section}\\]/,/^\\[/ s/^port=.*/port={new}/' app.ini"
    return Job({"app.ini": write(old)}, told, (command,), {"app.ini": write(new)})


def link_tree(rng: np.random.Generator) -> Job:
    """Make a flat folder of links."""
    files = {path: _text(rng, 1) for path in _paths(rng, 7, (".so", ".txt"))}
    links = {
        f"links/{path.rpartition('/')[2]}": Link(f"../{path}")
        for path in files
        if path.endswith(".so")
    }
    told = (
        "Make the folder links with one symbolic link per .so file below this folder: named as "
        "the file, pointing to it by the relative path ../PATH."
    )
    command = (
        "mkdir -p links && find . -name '*.so' -type f -printf '%P\\n' | while read -r p; do "
        'ln -sfn "../$p" "links/${p##*/}"; done'
    )
    return Job(files, told, (command,), {**files, **links})


def merge_json(rng: np.random.Generator) -> Job:
    """Merge two objects."""
    keys = _names(rng, 9)
    base = {key: int(rng.integers(100)) for key in keys[:6]}
    over = {key: int(rng.integers(100, 200)) for key in keys[3:]}
    files = {
        "base.json": json.dumps(base).encode(),
        "over.json": json.dumps(over).encode(),
    }
    told = (
        "Write merged.json: one JSON object with all keys of base.json and over.json, the value "
        "of over.json where both have a key."
    )
    command = (
        'python3 -c \'import json; json.dump({**json.load(open("base.json")), '
        '**json.load(open("over.json"))}, open("merged.json", "w"))\''
    )
    return Job(files, told, (command,), {**files, "merged.json": Json({**base, **over})})


def repair_script(rng: np.random.Generator) -> Job:
    """Mend a program that has one fault."""
    repair = draw_repair(rng)
    files = {"tool.py": repair.broken.encode(), "sample.txt": repair.sample.encode()}
    told = (
        "tool.py reads integers from its standard input, one per line and at least two of them, "
        f"and should print {repair.purpose}. It has a fault. Mend it; it is judged by running "
        "`python3 tool.py` on other inputs than sample.txt, so change nothing but tool.py."
    )
    command = f"cat > tool.py <<'END'\n{repair.right}END"
    expected: dict[str, Entry] = {"tool.py": Script(), "sample.txt": files["sample.txt"]}
    return Job(files, told, (command,), expected, probes=repair.probes)


GENERATORS: dict[str, Callable[[np.random.Generator], Job]] = {
    made.__name__: made
    for made in (
        archive, count_levels, csv_report, dedupe, delete_by_content, edit_config, link_tree,
        merge_json, move_by_name, move_by_size, permissions, rename_pattern, repair_script,
    )
}  # fmt: skip


@lru_cache(maxsize=1024)
def generate(seed: int, kind: str) -> Job:
    """The job of a task: the first draw of its stream that is not done from the start."""
    rng = philox(seed, "terminal", kind)
    while True:
        job = GENERATORS[kind](rng)
        if job.expected != job.files or job.modes or job.probes:
            return job
