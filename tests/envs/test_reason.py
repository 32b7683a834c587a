"""k3rl/Reason-v0: which datasets it has and why, scoring that cannot be fooled, its cheats."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import reasoning, registry
from k3rl.envs.play import play
from k3rl.envs.reason import HOW_TO_ANSWER, PRESETS
from k3rl.envs.reasoning import ALL, CATEGORIES, EXCLUDED, find_entry, is_full_score
from k3rl.errors import UserInputError
from k3rl.sandboxes.factory import open_backend
from k3rl.types import philox

ID = "k3rl/Reason-v0"
SEEDS = [int(philox(n, "reason").integers(1 << 48)) for n in range(4)]
SENSELESS = (
    "", " ", "nan", "-inf", "nan+nanj", "[]", "{}", "None", "x" * 60, "(" * 60, "9**9**9", "\0",
    "\ud800", "1e999999999", "6+6+6+6", " ".join(map(str, range(40))), "a" * 100_000,
)  # fmt: skip


def made(name, seed):
    """The entry of a dataset of reasoning-gym's that Reason may not have."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, seed=seed % (1 << 31), size=1)
    return dataset, dataset[0]


def test_every_dataset_is_in_its_category_or_left_out():
    from reasoning_gym.factory import DATASETS

    assert set(ALL) | set(EXCLUDED) == set(DATASETS)
    assert not set(ALL) & set(EXCLUDED)
    assert len(ALL) == sum(map(len, CATEGORIES.values())) == len(DATASETS) - len(EXCLUDED)
    for category, names in CATEGORIES.items():
        for name in names:
            assert DATASETS[name][0].__module__.split(".")[1] == category


@pytest.mark.parametrize("name", ALL)
def test_only_its_own_answer_is_right(name):
    """The oracle's answer is full, nothing senseless is, and no scorer takes long over either."""
    found = [(seed, str(find_entry(seed, {"dataset": name})[1]["answer"])) for seed in SEEDS]
    assert len({find_entry(seed, {"dataset": name})[1]["question"] for seed in SEEDS}) > 1
    for seed, right in found:
        dataset, entry = find_entry(seed, {"dataset": name})
        assert right.strip()
        assert dataset.score_answer(entry["answer"], entry) == 1.0
        assert is_full_score(seed, {"dataset": name}, f" {right}\n")
        start = time.process_time()
        wrong = next((other for _, other in found if other != right), "x")
        # Sokoban's answer is played, so that moves after other moves may well solve it.
        hedges = () if name == "sokoban" else (f"{wrong} or {right}", f"{wrong}\n{right}")
        for answer in (*SENSELESS, entry["question"], *hedges):
            assert answer.strip() == right or not is_full_score(seed, {"dataset": name}, answer)
        assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    "name", [name for name, why in EXCLUDED.items() if why == reasoning.NO_ANSWER]
)
def test_those_without_an_answer_have_none(name):
    assert [made(name, seed)[1]["answer"] for seed in SEEDS] == [None] * len(SEEDS)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("coin_flip", "0"),
        ("complex_arithmetic", "nan"),
        ("game_of_life_halting", "any text"),
        ("puzzle24", "6+6+6+6"),
    ],
)
def test_those_that_can_be_guessed_would_be(name, answer):
    assert EXCLUDED[name] == reasoning.GUESSED + answer
    entries = [made(name, seed) for seed in range(9)]
    scores = [dataset.score_answer(answer, entry) for dataset, entry in entries]
    assert sum(not score < 1.0 for score in scores) > 3


@pytest.mark.parametrize("name", ["simple_integration", "intermediate_integration"])
def test_those_left_out_for_running_answers_run_them(tmp_path, name):
    dataset, entry = made(name, 1)
    dataset.score_answer(f"open({str(tmp_path / 'ran')!r}, 'w').close() or 1", entry)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", sorted(reasoning._EVALUATED))
def test_answers_are_not_run(tmp_path, name):
    """The dataset's scorer runs the text; the environment's scoring does not let it get there."""
    seed, metadata = SEEDS[0], {"dataset": name}
    dataset, entry = find_entry(seed, metadata)
    path = tmp_path / "ran"
    code = f"[open({str(path)!r},'w').close()]"
    right = str(entry["answer"])
    assert len(code) < 64 + 4 * len(right)
    dataset.score_answer(code, entry)
    assert path.exists()
    path.unlink()
    assert not is_full_score(seed, metadata, code)
    assert not path.exists()


def test_entries_are_equal_in_processes_that_hash_differently():
    code = (
        "import json, random, sys\nimport numpy as np\n"
        "from k3rl.envs.reasoning import ALL, content_of, find_entry\n"
        "random.seed(int(sys.argv[1])); np.random.seed(int(sys.argv[1]))\n"
        "seeds = json.loads(sys.argv[2])\n"
        "print(chr(10) + json.dumps([[n, s, content_of(s, {'dataset': n}),"
        " find_entry(s, {'dataset': n})[1]['answer']] for n in ALL for s in seeds]))"
    )
    runs = []
    for seed in ("1", "2"):
        argv = [sys.executable, "-c", code, seed, json.dumps(SEEDS)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    assert runs[0] == runs[1]
    assert len(runs[0]) == len(ALL) * len(SEEDS)


def test_presets():
    for preset, datasets in PRESETS.items():
        env = registry.make(ID, preset=preset)
        tasks = [env.task("train", index) for index in range(8)]
        assert {task.metadata["dataset"] for task in tasks} <= set(datasets)
        for task in tasks:
            shown = env.observe(task).messages[0].content
            assert shown.endswith("=?" if preset == "arithmetic" else HOW_TO_ANSWER)
    one = registry.make(ID, datasets=["gcd"])
    assert {one.task("train", index).metadata["dataset"] for index in range(5)} == {"gcd"}
    with pytest.raises(UserInputError, match="preset 'maths'"):
        registry.make(ID, preset="maths")


def test_an_expression_of_one_preset_is_not_held_out_in_another():
    terse = registry.make(ID, preset="arithmetic", max_terms=2, max_digits=1)
    seeds = [terse.task("heldout", index).seed for index in range(60)]
    held = {reasoning.content_of(seed, terse._metadata(seed)) for seed in seeds}
    worded = registry.make(ID, datasets=["chain_sum"])
    tasks = [worded.task("train", index) for index in range(200)]
    assert not held & {reasoning.content_of(task.seed, task.metadata) for task in tasks}


@pytest.mark.sandbox
@pytest.mark.parametrize("preset", ["all", "arithmetic"])
@pytest.mark.parametrize("name", registry.cheats(ID))
def test_cheats_get_nothing(tmp_path, name, preset):
    mark = Path("/tmp/k3rl_reason_cheat")

    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch", False)
        cheat = registry.policy(ID, f"cheat/{name}")
        try:
            envs = [registry.make(ID, preset=preset) for _ in range(24)]
            plays = [play(e, e.task("heldout", n), cheat, backend) for n, e in enumerate(envs)]
            return [played.outcome for played in await asyncio.gather(*plays)]
        finally:
            await backend.aclose()

    outcomes = asyncio.run(main())
    assert {outcome.reward for outcome in outcomes} == {0.0}
    assert not mark.exists()
