"""`k3rl envs`: a package is written, installed, found, checked, played and uninstalled."""

import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN = "from k3rl.cli.main import main; main()"
ENV_ID = "acme/WordCount-v0"
pytestmark = pytest.mark.sandbox


class Place:
    """A virtual environment on top of this one, and a folder to work in."""

    def __init__(self, folder):
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        (inside,) = (folder / "venv").glob("lib/*/site-packages")
        above = "\n".join(f"import site; site.addsitedir({p!r})" for p in site.getsitepackages())
        (inside / "above.pth").write_text(above + "\n")

    def run(self, *words, text="", status=0):
        done = subprocess.run(
            [self.python, *map(str, words)],
            cwd=self.folder, input=text, capture_output=True, text=True, timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def k3rl(self, *words, text="", status=0):
        return self.run("-c", MAIN, *words, text=text, status=status)

    def pip(self, *words):
        options = ("--disable-pip-version-check", "--quiet", "--python", str(self.python))
        subprocess.run(
            [sys.executable, "-m", "pip", *options, *map(str, words)],
            cwd=self.folder, check=True, capture_output=True, timeout=300,
        )  # fmt: skip

    def install(self, package):
        self.pip("install", "--no-build-isolation", "--no-deps", "--no-index", package)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """With the package that `new` writes installed."""
    place = Place(tmp_path_factory.mktemp("envs"))
    place.k3rl("envs", "new", "WordCount", "--namespace", "acme")
    place.install(place.folder / "acme-word-count")
    return place


def test_list_names_packages_and_policies(place):
    lines = place.k3rl("envs", "list").stdout.splitlines()
    assert lines[0].split() == ["id", "tools", "package", "policies"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows[ENV_ID] == ["read", "acme-word-count", "null", "oracle", "random"]
    assert rows["k3rl/FileHunt-v0"][:5] == ["ls", "cat", "grep", "submit", "k3rl"]


def test_show(place):
    found = json.loads(place.k3rl("envs", "show", ENV_ID, "--json").stdout)
    assert found["package"] == "acme-word-count"
    assert found["cheats"] == ["many numbers"]
    assert [tool["name"] for tool in found["tools"]] == ["read"]
    assert found["splits"].keys() == {"train", "heldout"}
    assert found["first_messages"][0]["content"].startswith("How many lines of note hold")
    shown = place.k3rl("envs", "show", "k3rl/FileHunt-v0").stdout
    assert 'settings: {"max_pointers": 3, "kinds": ["cat", "ls", "grep"]}' in shown
    assert "user: Follow the pointers" in shown


def test_a_new_package_passes_check_at_once(place):
    out = place.k3rl("envs", "check", ENV_ID, "--num-tasks", "2").stdout
    assert f"{ENV_ID}: 2 none declared, 29 passed" in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_check_is_json(place):
    only = ("--only", "oracle is right", "--only", "planted changes stay")
    found = json.loads(place.k3rl("envs", "check", ENV_ID, "--json", *only).stdout)
    assert found["problems"] == []
    verdicts = {each["check"]: each["verdict"] for each in found["envs"][ENV_ID]}
    assert verdicts == {"oracle is right": "passed", "planted changes stay": "none declared"}


def test_play(place):
    first, second = (
        place.k3rl("envs", "play", ENV_ID, "--policy", "oracle", "--split", "heldout").stdout
        for _ in range(2)
    )
    assert first == second
    lines = first.splitlines()
    assert lines[0].startswith("user: How many lines")
    assert lines[1] == 'assistant: /read {"path": "note"}'
    assert "outcome: completed, reward 1" in lines
    cheat = place.k3rl("envs", "play", ENV_ID, "--policy", "cheat/many numbers").stdout
    assert "outcome: completed, reward 0" in cheat


def test_play_by_hand(place):
    turns = '/read {"path": "note"}\n/read {broken\n/red {}\n/read 3\nno idea\n'
    lines = place.k3rl("envs", "play", ENV_ID, text=turns).stdout.splitlines()
    assert "read: error: read: arguments are not JSON" in lines
    assert "red: error: no tool red, nearest is read" in lines
    assert lines[-6:-4] == ["assistant: no idea", "outcome: completed, reward 0"]
    silent = place.k3rl("envs", "play", "k3rl/FileHunt-v0", text="").stdout
    assert silent.splitlines()[-5:-4] == ["outcome: completed, reward 0"]


def test_some_of_its_own_tests_pass(place):
    words = ("-m", "pytest", "-q", "acme-word-count", "-k", "graded or right or pure or leak")
    assert "3 passed" in place.run(*words).stdout


@pytest.mark.slow
def test_all_of_its_own_tests_pass(place):
    assert "31 passed" in place.run("-m", "pytest", "-q", "acme-word-count").stdout


def test_a_broken_package_is_named_and_fails_check_all(place):
    place.k3rl("envs", "new", "Torn", "--namespace", "acme")
    module = place.folder / "acme-torn" / "acme_torn" / "__init__.py"
    module.write_text("import no_such_module\n")
    place.install(place.folder / "acme-torn")
    try:
        done = place.k3rl("envs", "list")
        assert ENV_ID in done.stdout
        assert "warning: package acme-torn: entry point Torn = acme_torn cannot be" in done.stderr
        words = ("envs", "check", "--all", "--only", "tools are declared")
        done = place.k3rl(*words, status=1)
        assert done.stdout.count(": 1 passed") >= 3
        assert "package acme-torn: entry point" in done.stderr
        error = place.k3rl("envs", "show", "acme/Torn-v0", status=2).stderr
        assert "error: no environment 'acme/Torn-v0'" in error
        assert "package acme-torn" in error
    finally:
        place.pip("uninstall", "--yes", "acme-torn")


def test_an_environment_that_breaks_its_contract_fails_check(place):
    place.k3rl("envs", "new", "Generous", "--namespace", "acme")
    module = place.folder / "acme-generous" / "acme_generous" / "env.py"
    source = module.read_text()
    broken = source.replace("answer.strip() == str(_count(word, note))", "True")
    assert broken != source
    module.write_text(broken)
    place.install(place.folder / "acme-generous")
    try:
        words = ("envs", "check", "acme/Generous-v0", "--num-tasks", "1")
        out = place.k3rl(*words, status=1).stdout
        for check in (
            "null gets nothing",
            "random is below the oracle",
            "known cheats get nothing",
        ):
            assert f"BROKEN: {check}:" in out
    finally:
        place.pip("uninstall", "--yes", "acme-generous")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("new", "WordCount", "--namespace", "acme"), "acme-word-count exists: choose another"),
        (("new", "word_count"), "'word_count' is no class name such as WordCount"),
        (("new", "../Up"), "'../Up' is no class name"),
        (("new", "Word", "--namespace", "a/b"), "namespace 'a/b': use another one"),
        (("new", "Word", "--namespace", "k3rl"), "namespace 'k3rl': use another one"),
        (("check",), "envs check: name environments, or --all"),
        (("check", ENV_ID, "--all"), "envs check: name environments, or --all"),
        (("check", ENV_ID, "--only", "oracle"), "no check 'oracle', nearest is oracle is right"),
        (("check", "acme/WordCuont-v0"), f"nearest is {ENV_ID}"),
        (("show", "acme/Nothing-v0"), "no environment 'acme/Nothing-v0'"),
        (
            ("play", ENV_ID, "--policy", "best"),
            "no policy 'best', it has: cheat/many numbers, null",
        ),
        (("play", ENV_ID, "--split", "test"), "no split 'test', use one of train, heldout"),
        (("play", ENV_ID, "--policy", "oracle", "--backend", "vm"), "sandbox backend 'vm': choose"),
    ],
)
def test_mistakes_are_one_line(place, words, says):
    error = place.k3rl("envs", *words, status=2).stderr
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error


def test_uninstalled_it_is_gone(place):
    """Last: it takes away what the others use."""
    place.pip("uninstall", "--yes", "acme-word-count")
    assert "acme" not in place.k3rl("envs", "list").stdout
    error = place.k3rl("envs", "play", ENV_ID, "--policy", "oracle", status=2).stderr
    assert f"error: no environment '{ENV_ID}'" in error
    place.install(place.folder / "acme-word-count")
