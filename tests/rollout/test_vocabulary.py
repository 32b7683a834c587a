"""Training of the nano vocabulary, and what the shipped one costs on real transcripts."""

import asyncio
import json
import re
import subprocess
import sys

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.play import play
from k3rl.rollout.renderer import Renderer, conversation_segments
from k3rl.rollout.tokenizer import NANO_VOCAB, NanoTokenizer, write_nano
from k3rl.rollout.vocabulary import ENVS, VOCAB_SIZE, Clumsy, train
from k3rl.rollout.xtml import EFFORTS, build_chat_segments, effort_message
from k3rl.sandboxes.factory import open_backend
from k3rl.types import Message, ToolCall, philox

RENDERER = Renderer(NanoTokenizer.shipped())
HEAD_TOKENS = 64
TRAJECTORY_TOKENS = {"k3rl/Reason-v0": 160, "k3rl/FileHunt-v0": 512}
NUM_TASKS = 20


def prompt_of(task):
    return registry.make(task.env_id).observe(task).messages[0].content


def sample(count=60):
    """Transcripts of one constant prompt, numbers that differ and names that are rare."""
    return [
        build_chat_segments(
            [{"role": "user", "content": f"Add 17 to the number {i} of {chr(97 + i % 26)}xyz"}],
            thinking_effort=EFFORTS[i % 3],
        )
        for i in range(count)
    ]


def test_constant_texts_become_one_token_and_rare_ones_stay_bytes(tmp_path):
    path = tmp_path / "vocab.json"
    write_nano(path, train(sample(), 1024, min_share=0.3), {})
    tokenizer = NanoTokenizer(path)
    for effort in EFFORTS:
        (open_id, _, _, body, *_) = tokenizer.encode_segments(effort_message(effort))
        assert tokenizer.decode([body]).endswith(f"`thinking_effort={effort}`.")
        assert open_id == tokenizer.special("<|open|>")
    assert len(tokenizer.encode_text(" to the number ")) == 1
    assert len(tokenizer.encode_text("q")) == len(tokenizer.encode_text("17")) - 1 == 1
    assert all(not chr(c).isdigit() for entry in train(sample()) for c in entry)


def test_training_is_deterministic_across_processes():
    script = (
        "import json, sys; from k3rl.rollout.vocabulary import train;"
        "print([entry.hex() for entry in train(json.load(sys.stdin), 400, 0.0)])"
    )
    argv, texts = [sys.executable, "-c", script], json.dumps(sample())
    runs = [
        subprocess.run(argv, input=texts, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    here = [entry.hex() for entry in train(sample(), 400, 0.0)]
    assert [run.stdout.strip() for run in runs] == [str(here)] * 2


def test_the_shipped_vocabulary_tells_how_it_was_made():
    content = json.loads(NANO_VOCAB.read_text())
    assert len(set(content["training"]["environments"])) == len(ENVS)
    assert content["training"]["command"].startswith("python -m k3rl.rollout.vocabulary --tasks")
    assert content["digest"] == NanoTokenizer.shipped().digest
    assert RENDERER.tokenizer.vocab_size <= VOCAB_SIZE


@pytest.mark.parametrize("env_id", ENVS)
@pytest.mark.parametrize("effort", EFFORTS)
def test_tools_and_effort_fit_their_budget(env_id, effort):
    tools = registry.make(env_id).tools
    assert 0 < len(RENDERER.render([], tools, effort)) <= HEAD_TOKENS


def test_a_name_has_the_same_ids_wherever_it_stands():
    encode_text = RENDERER.tokenizer.encode_text
    for index in range(50):
        task = registry.make("k3rl/FileHunt-v0").task("heldout", index)
        (pointer,) = re.findall(r"[a-z]/.*", prompt := prompt_of(task))
        assert encode_text(prompt) == [
            *encode_text(prompt.removesuffix(pointer)),
            *encode_text(pointer),
        ]


@pytest.mark.sandbox
@pytest.mark.parametrize("env_id", ENVS)
def test_oracle_trajectories_fit_their_budget(env_id, tmp_path):
    async def lengths():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch")
        oracle = registry.policy(env_id, "oracle")
        found = []
        for index in range(NUM_TASKS):
            env = registry.make(env_id, **ENVS[env_id])
            played = await play(env, env.task("heldout", index), oracle, backend)
            assert played.outcome.reward == 1.0
            ids = RENDERER.render(played.transcript, env.tools, EFFORTS[index % 3])
            assert RENDERER.parse_context(ids) == list(played.transcript)
            found.append(len(ids))
        await backend.aclose()
        return found

    counts = asyncio.run(lengths())
    assert len(counts) == NUM_TASKS
    assert max(counts) <= TRAJECTORY_TOKENS[env_id]


def test_the_clumsy_policy_spoils_turns_and_is_pure():
    call = ToolCall("cat", {"path": "a/b"}, 1)
    clumsy = Clumsy(lambda task, transcript, rng: Message("assistant", tool_calls=(call,)))
    opening = [Message("user", "go")]
    turns = [clumsy(None, opening, philox(seed)) for seed in range(40)]
    assert turns == [clumsy(None, opening, philox(seed)) for seed in range(40)]
    assert any(turn.malformed for turn in turns)
    assert any(turn.tool_calls and turn.tool_calls[0].raw == "{" for turn in turns)
    assert any(turn.tool_calls and turn.tool_calls[0].tool != "cat" for turn in turns)
    told = clumsy(None, [*opening, Message("system", "error: no")], philox(0))
    assert told.tool_calls == (call,)


def test_every_training_text_is_rendered_with_its_level():
    text = "".join(segment.text for segment in conversation_segments([], (), "low"))
    assert text.count("thinking_effort=low") == 1
