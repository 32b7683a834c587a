"""Train the nano vocabulary on transcripts of the shipped environments.

`python -m k3rl.rollout.vocabulary --out k3rl/rollout/nano_vocab.json --tasks 400` plays oracle
policies, and random ones for error output, in real sandboxes on training tasks at every effort
level, and trains byte-level BPE on the plain text between special tokens. Text is never split into
words, so a tag or a constant message can become one token; every digit stays its own. Equal
transcripts give equal files.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers, trainers

from k3rl.blobs import BlobStore
from k3rl.envs import registry
from k3rl.envs.base import ScriptedPolicy
from k3rl.envs.play import play
from k3rl.rollout.renderer import conversation_segments, read_turn, turn_segments
from k3rl.rollout.tokenizer import NANO_SPECIALS, NANO_VOCAB, NanoTokenizer, join_plain, write_nano
from k3rl.rollout.xtml import EFFORTS, Segment
from k3rl.sandboxes.base import SandboxBackend
from k3rl.sandboxes.factory import open_backend
from k3rl.types import JsonObject, Message, Task, digest_bytes

ENVS: dict[str, JsonObject] = {
    "k3rl/Reason-v0": {"preset": "arithmetic"},
    "k3rl/FileHunt-v0": {},
}
"""By id, with what each is made with: those that a small model can learn."""
VOCAB_SIZE = 1024
"""At most; bytes, merges and specials together."""
MIN_SHARE = 0.08
"""A merge must occur so often per transcript. Above it are constant texts; below it are names and
numbers of single tasks, which stay bytes so that a name has the same ids wherever it stands."""


def train(
    transcripts: Collection[Sequence[Segment]],
    vocab_size: int = VOCAB_SIZE,
    min_share: float = MIN_SHARE,
) -> list[bytes]:
    """The entries above the 256 bytes, in id order, for transcripts given as rendered segments.

    At most `vocab_size` ids come out, bytes and specials counted.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(NANO_SPECIALS),
        min_frequency=math.ceil(min_share * len(transcripts)),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(plain_runs(transcripts), trainer)
    byte_of = _byte_of_symbol()
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    entries = [bytes(byte_of[symbol] for symbol in word) for word, _ in by_id]
    return [entry for entry in entries if len(entry) > 1]


def plain_runs(transcripts: Iterable[Sequence[Segment]]) -> Iterator[str]:
    """The texts between special tokens, as the nano tokenizer sees them."""
    for segments in transcripts:
        for text, allow_special in join_plain(segments):
            if not allow_special:
                yield text


async def transcripts(num_tasks: int, backend: SandboxBackend) -> list[list[Segment]]:
    """Rendered transcripts of `num_tasks` training tasks per environment, levels in turn.

    Each task is played by the oracle, the random policy, and an oracle that makes mistakes.
    """
    rendered = []
    for env_id, kwargs in ENVS.items():
        oracle = registry.policy(env_id, "oracle")
        policies = (oracle, registry.policy(env_id, "random"), Clumsy(oracle))
        for index in range(num_tasks):
            effort = EFFORTS[index % len(EFFORTS)]
            for policy in policies:
                env = registry.make(env_id, **kwargs)
                played = await play(env, env.task("train", index), policy, backend)
                messages = [m for m in played.transcript if m.malformed is None]
                rendered.append(conversation_segments(messages, env.tools, effort))
    return rendered


@dataclass(frozen=True, slots=True)
class Clumsy:
    """A scripted policy that spoils every second turn of another, for what the answers cost."""

    policy: ScriptedPolicy

    def __call__(
        self, task: Task, transcript: Sequence[Message], rng: np.random.Generator
    ) -> Message:
        """The other policy's turn, or one with a marker lost or a call made wrong."""
        is_told = transcript[-1].content.startswith("error")
        good = [m for m in transcript if m.malformed is None and not m.content.startswith("error")]
        message = self.policy(task, good[:1] if is_told else transcript, rng)
        if is_told or not message.tool_calls:
            return message
        (call, *_) = message.tool_calls
        kind = rng.integers(4)
        if kind == 0:
            spoiled = replace(call, tool=chr(ord("a") + int(rng.integers(26))))
        elif kind == 1:
            spoiled = replace(call, arguments={})
        elif kind == 2:
            spoiled = replace(call, arguments={}, raw="{")
        else:
            items = list(join_plain(turn_segments(message)))
            del items[int(rng.integers(len(items)))]
            return read_turn(list(join_plain(items)))
        return replace(message, tool_calls=(spoiled,))


def _byte_of_symbol() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2), inverted: printable bytes are themselves,
    the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def main() -> None:
    """Command line: play, train, write, and print what it costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=NANO_VOCAB)
    parser.add_argument("--tasks", type=int, default=400, help="per environment")
    parser.add_argument("--size", type=int, default=VOCAB_SIZE)
    options = parser.parse_args()
    played = asyncio.run(_play_all(options.tasks))
    texts = "\0".join(plain_runs(played))
    training: JsonObject = {
        "command": f"python -m k3rl.rollout.vocabulary --tasks {options.tasks} "
        f"--size {options.size}",
        "environments": list(ENVS),
        "num_transcripts": len(played),
        "texts_digest": digest_bytes(texts.encode()),
    }
    write_nano(options.out, train(played, options.size), training)
    tokenizer = NanoTokenizer(options.out)
    lengths = sorted(len(tokenizer.encode_segments(segments)) for segments in played)
    print(f"{options.out}: {tokenizer.vocab_size} entries, digest {tokenizer.digest}")
    print(f"trajectory tokens: median {lengths[len(lengths) // 2]}, most {lengths[-1]}")


async def _play_all(num_tasks: int) -> list[list[Segment]]:
    with tempfile.TemporaryDirectory() as folder:
        backend = open_backend("bwrap", BlobStore(Path(folder) / "blobs"), Path(folder) / "scratch")
        try:
            return await transcripts(num_tasks, backend)
        finally:
            await backend.aclose()


if __name__ == "__main__":
    main()
