"""Writing the package that adds an environment, from the templates in scaffold/."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from k3rl.errors import UserInputError

TEMPLATES = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    "@MODULE@/__init__.py": "init.py.tmpl",
    "@MODULE@/env.py": "env.py.tmpl",
    "tests/test_env.py": "test_env.py.tmpl",
}
"""Path in the package to its template."""

_NAME = re.compile(r"[A-Z][A-Za-z0-9]*")
_NAMESPACE = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True, slots=True)
class Written:
    """A package that was written."""

    folder: Path
    env_id: str
    module: str


def write_package(name: str, namespace: str, folder: Path) -> Written:
    """Write the package of environment `namespace/name-v0` into a new folder in `folder`.

    Raises UserInputError for a bad name, and when that folder exists.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UserInputError(f"envs new: {name!r} is no class name such as WordCount")
    if not _NAMESPACE.fullmatch(namespace) or namespace == "k3rl":
        raise UserInputError(f"envs new: namespace {namespace!r}: use another one, such as acme")
    words = "_".join(_HUMP.split(name)).lower()
    module = f"{namespace.replace('-', '_')}_{words}"
    target = folder / module.replace("_", "-")
    if target.exists() or target.is_symlink():
        raise UserInputError(f"{target} exists: choose another name or folder")
    env_id = f"{namespace}/{name}-v0"
    values = {"@NAME@": name, "@MODULE@": module, "@DIST@": target.name, "@ID@": env_id}
    templates = resources.files("k3rl.envs") / "scaffold"
    for path, template in TEMPLATES.items():
        place = target / _filled(path, values)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_filled((templates / template).read_text(), values))
    return Written(target, env_id, module)


def _filled(text: str, values: dict[str, str]) -> str:
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text
