"""Checks that nothing tells the answer, and that nothing of the verifier or a sandbox is left."""

from __future__ import annotations

import io
import re
import tarfile
from collections import Counter
from collections.abc import Iterator

from k3rl.envs.checker.case import Case, Session, need
from k3rl.envs.checker.check import Check, Group
from k3rl.envs.checker.watched import Watched
from k3rl.envs.play import Played
from k3rl.types import JSON, Message, digest_bytes, to_plain

MIN_ANSWERS = 3
"""Fewer different answers can stand in the same place by chance."""
CONTEXT_CHARS = 12
"""In front of an answer: what makes two places the same."""
LEAK_SHARE = 0.9


async def answers_are_not_shown(case: Case) -> str:
    """Nothing that is there before the first turn holds the oracle's answer in a fixed place.

    An answer may stand in a prompt by chance, or as one of several that it offers; where it stands
    in the same place in nearly every task, it is given away. Places are the words before it in the
    prompt, keys of the task's metadata, and files that hold it alone.
    """
    plays = await case.play_all(case.tasks("heldout"), case.policy("oracle"))
    places: Counter[str] = Counter()
    answers = set()
    for played in plays:
        given = _answers(played)
        answers |= given
        places.update(set(_places(case, played, given)))
    if len(answers) < min(MIN_ANSWERS, len(plays)):
        return f"the oracle ends {len(plays)} tasks the same way, so that tells nothing"
    for place, num in places.most_common(1):
        need(num < max(LEAK_SHARE * len(plays), 2), f"in {num} of {len(plays)} tasks: {place}")
    return f"{len(answers)} answers looked for"


def _answers(played: Played) -> set[str]:
    """What the oracle said last, and all texts of more than a line that it wrote before."""
    turns = [message for message in played.transcript if message.role == "assistant"]
    last = turns[-1]
    texts = [last.content, *(text for call in last.tool_calls for text in _texts(call.arguments))]
    for turn in turns:
        written = [text for call in turn.tool_calls for text in _texts(call.arguments)]
        texts += [text for text in written if "\n" in text.strip()]
    return {text.strip() for text in texts if text.strip()}


def _texts(value: JSON) -> Iterator[str]:
    """The texts and numbers inside a JSON value."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _places(case: Case, played: Played, answers: set[str]) -> Iterator[str]:
    """Where one of the answers is to be seen before anything is done."""
    task, env = played.task, case.make()
    for where, text in _leaves(task.metadata, "metadata"):
        if text in answers:
            yield f"the task's {where} is the answer"
    for message in _opening(played):
        for answer in answers:
            yield from _contexts(message.content, answer)
    tools = str([to_plain(tool) for tool in env.tools])
    if any(answer in tools for answer in answers if len(answer) > CONTEXT_CHARS):
        yield "the tools' declarations hold the answer"
    for path, data in env.files(task).items():
        if data.decode(errors="replace").strip() in answers:
            yield f"the file {path} is the answer"


def _opening(played: Played) -> list[Message]:
    roles = [message.role for message in played.transcript]
    return list(played.transcript[: roles.index("assistant")])


def _leaves(value: JSON, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{where}[{number}]")
    elif value is not None and not isinstance(value, bool):
        yield where, str(value).strip()


def _contexts(text: str, answer: str) -> Iterator[str]:
    """What stands in front of an answer, wherever it is a word of its own."""
    for match in re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text):
        before = text[max(0, match.start() - CONTEXT_CHARS) : match.start()]
        yield f"the prompt has the answer after {before!r}"


async def grading_leaves_no_trace(case: Case) -> str:
    """The workspace before and after grading is the same: verifiers work in a fork."""
    num_states = 0
    for name in ("oracle", "random", "null"):
        if name not in case.policies:
            continue
        async with case.session() as session:
            await session.play_out(case.policies[name])
            before = await _tree(session)
            await session.env.grade()
            after = await _tree(session)
            changed = sorted(path for path, _ in before.items() ^ after.items())
            need(not changed, f"after {name}, grading changes {', '.join(changed[:4])}")
        num_states += 1
    return f"{num_states} final states"


async def _tree(session: Session) -> dict[str, str]:
    """Path to type and digest of everything in the workspace."""
    chunks = [each async for each in session.sandbox.backend.get_tree(session.sandbox.id, ".")]
    found = {}
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            data = content.read() if content else member.linkname.encode()
            found[member.name] = f"{member.type!r} {member.mode:o} {digest_bytes(data)}"
    return found


async def sandboxes_are_closed(case: Case) -> str:
    """Whatever is played, cut off or graded, no sandbox is open afterwards."""
    for name, policy in sorted(case.policies.items()):
        async with case.session() as session:
            await session.turn(policy)
            await session.env.grade()
        await case.play(case.make().task("train", 0), policy)
        await _need_none(case, name)
    others = ", ".join(f"{num} by {name}" for name, num in sorted(case.left.items()))
    need(not others, f"open at the end of other checks: {others}")
    return "none is open"


async def _need_none(case: Case, name: str) -> None:
    assert isinstance(case.backend, Watched)
    num = len(case.backend.live)
    need(num == 0, f"{num} open after {name} has played twice")


CHECKS = (
    Check("answers are not shown", Group.LEAKS, answers_are_not_shown),
    Check("grading leaves no trace", Group.LEAKS, grading_leaves_no_trace),
    Check("sandboxes are closed", Group.SANDBOXES, sandboxes_are_closed, is_alone=True),
)
