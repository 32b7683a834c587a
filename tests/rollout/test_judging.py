"""A model judge over real engines: scripted, and the small native model that writes garbage."""

import asyncio

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs.judge import Judge, Verdict, Winner, tournament
from k3rl.errors import GraderError
from k3rl.rollout.judging import JUDGE_ENV, ModelJudge
from k3rl.rollout.renderer import Renderer
from k3rl.rollout.scripted import ScriptedEngine
from k3rl.rollout.tokenizer import NanoTokenizer
from k3rl.types import Message

PAD = """<rubric>
has more digits
</rubric>
<scorepad>
A: {a}
B: {b}
winner: {winner}
</scorepad>"""


def by_digits(task, transcript, rng):
    """Judges what it reads in the prompt, as a model would."""
    body = transcript[-1].content
    found = [body.split(f"[{name} ")[1].split(f"[end {name} ")[0] for name in "AB"]
    a, b = (sum(char == "7" for char in text.partition("\n")[2]) for text in found)
    winner = "tie" if a == b else "A" if a > b else "B"
    return Message("assistant", PAD.format(a=a, b=b, winner=winner), think="read")


def moody(task, transcript, rng):
    """Garbage most of the time."""
    right = by_digits(task, transcript, rng)
    return right if rng.random() < 0.4 else Message("assistant", "hm", think="read")


def garbage(task, transcript, rng):
    return Message("assistant", "A is much better", think="read")


SCRIPTS = {"by_digits": by_digits, "moody": moody, "garbage": garbage}


def judge_of(name, **options):
    def find(env_id, policy):
        assert env_id == JUDGE_ENV
        return SCRIPTS[policy]

    renderer = Renderer(NanoTokenizer.shipped())
    return ModelJudge(ScriptedEngine(renderer, [name], find), renderer, **options)


def test_a_verdict_comes_through_tokens():
    judge = judge_of("by_digits")
    assert isinstance(judge, Judge)
    found = asyncio.run(judge.compare("q", "77", "7"))
    assert found == Verdict(Winner.LEFT, (2.0, 1.0), "has more digits")


def test_a_tournament_by_a_model():
    judge = judge_of("by_digits")
    standing = asyncio.run(tournament(judge, "q", ["7", "777", "", "7"]))
    assert standing.scores == pytest.approx([0.5, 1.0, 0.0, 0.5])


def test_garbage_is_sampled_again_then_it_is_the_graders_fault():
    found = asyncio.run(judge_of("moody", num_tries=40).compare("q", "7", "77"))
    assert found.winner is Winner.RIGHT
    with pytest.raises(GraderError, match=r"no verdict .* in 3 tries"):
        asyncio.run(judge_of("garbage").compare("q", "7", "77"))
    with pytest.raises(GraderError, match="no verdict"):
        asyncio.run(judge_of("by_digits", max_new_tokens=4).compare("q", "7", "77"))


def test_equal_comparisons_at_once_get_equal_verdicts():
    async def main():
        judge = judge_of("moody", num_tries=40)
        return await asyncio.gather(*(judge.compare("q", "7", "77") for _ in range(4)))

    assert len(set(asyncio.run(main()))) == 1


def test_an_engine_that_refuses_is_the_graders_fault():
    from k3rl.rollout.engine import SamplingLaw

    judge = judge_of("by_digits", law=SamplingLaw(temperature=0.5))
    with pytest.raises(GraderError, match="its engine failed"):
        asyncio.run(judge.compare("q", "7", "77"))


def test_the_native_engine_of_an_untrained_model_comes_to_no_verdict(tmp_path):
    from dataclasses import replace

    from tests.rollout.native_helpers import CONFIG, make_engine, make_model

    async def main():
        renderer = Renderer(NanoTokenizer.shipped())
        model = make_model(config=replace(CONFIG, vocab_size=renderer.tokenizer.vocab_size))
        engine = make_engine(BlobStore(tmp_path), model, max_tokens=4096)
        try:
            judge = ModelJudge(engine, renderer, num_tries=2, max_new_tokens=24)
            await judge.compare("q", "7", "77")
        finally:
            await engine.aclose()

    with pytest.raises(GraderError, match="no verdict"):
        asyncio.run(main())
