"""A very small K3, rollouts decoded from it token by token, and a store that holds them."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import yaml

from k3rl.learner.packing import Stored, pack
from k3rl.learner.protocol import Denominators, Member
from k3rl.model import checkpoint
from k3rl.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3rl.model.model import K3Model
from k3rl.model.state import StatePool
from k3rl.store.protocol import Ref, StepFrame, TokenRead
from k3rl.types import (
    Author,
    Outcome,
    OutcomeKind,
    Span,
    Step,
    Task,
    TokenFrame,
    TrajectoryHeader,
    TrajectoryKey,
)
from tests.builders import load_config
from tests.store.store_builders import claim_one, service

TINY = ModelConfig(
    vocab_size=29,
    hidden_size=16,
    layer_kinds=("kda", "kda", "mla"),
    kda=KdaConfig(num_heads=2, head_dim=8, decay_rank=4),
    mla=MlaConfig(2, 8, 8, qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=8),
    moe=MoeConfig(
        dense_size=24, num_experts=4, top_k=2, latent_size=8, expert_size=8, shared_size=12
    ),
    attn_res_block_size=2,
    init_std=None,
)
OPENING, TURN, RESULT = 5, 6, 3
"""Tokens of the environment's opening, of a policy turn, of a tool result."""


@dataclass(frozen=True, eq=False)
class Played:
    """One decoded trajectory: ids, which of them were sampled, and their log-probs."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray

    def spans(self, version=0, state=None):
        starts = np.flatnonzero(np.diff(self.loss_mask, prepend=not self.loss_mask[0]))
        return tuple(
            Span(int(at), Author.POLICY, version, version if state is None else state)
            if self.loss_mask[at]
            else Span(int(at), Author.ENVIRONMENT, 0, 0)
            for at in starts
        )

    def stored(self, index=0, advantage=0.0, version=0, state=None, id="0" * 32):
        arrays = (self.token_ids, self.loss_mask, self.rollout_logprobs)
        read = TokenRead(Ref(id, end=len(self.token_ids)), *arrays, self.spans(version, state))
        return Stored(read, index, advantage)


def tiny(seed=0, **changes):
    """With pseudo-queries that are not zero as at birth, so that every parameter matters."""
    model = K3Model(replace(TINY, **changes), seed=seed)
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "res_proj" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=noise)
    return model


def mask_of(turns):
    return np.array([False] * OPENING + turns * ([True] * TURN + [False] * RESULT))


@torch.no_grad()
def decode(model, turns, seed=0):
    """Trajectories with `turns` policy turns each, sampled side by side through `model.step`."""
    rng = np.random.default_rng(seed)
    masks = [mask_of(count) for count in turns]
    longest, count = max(map(len, masks)), len(masks)
    ids = rng.integers(0, model.config.vocab_size, (count, longest))
    found = np.full((count, longest), np.nan, np.float32)
    pool = StatePool(model.config, count, longest + 1)
    slots = torch.tensor([pool.allocate() for _ in range(count)])
    hidden = None
    for at in range(longest):
        if hidden is not None:
            logprobs = model.head(hidden).log_softmax(-1)
            draws = torch.from_numpy(rng.random(count))
            sampled = (logprobs.double().exp().cumsum(-1) < draws[:, None]).sum(-1)
            sampled = sampled.clamp(max=model.config.vocab_size - 1)
            for row, mask in enumerate(masks):
                if at < len(mask) and mask[at]:
                    ids[row, at] = int(sampled[row])
                    found[row, at] = float(logprobs[row, sampled[row]])
        hidden = model.step(torch.from_numpy(ids[:, at]), pool, slots)
    return [
        Played(ids[row, : len(mask)].astype(np.int32), mask, found[row, : len(mask)])
        for row, mask in enumerate(masks)
    ]


def packed(stored, version=0, max_staleness=4, micro_batch_tokens=64):
    return pack(
        stored, version=version, max_staleness=max_staleness, micro_batch_tokens=micro_batch_tokens
    )


def denominators(step):
    return Denominators(step.num_policy_tokens, step.num_trajectories)


async def put(store, number, played, reward, version=0, temperature=1.0, task_seed=None):
    """Store a decoded trajectory as a worker would; returns it as a member."""
    task = Task("k3rl/Test-v0", number if task_seed is None else task_seed)
    key = TrajectoryKey("r", task.key, "max", number // 4, number % 4)
    header = TrajectoryHeader(key, task, temperature=temperature)
    await store.begin([header])
    claim = await claim_one(store, f"player-{number}")
    spans = played.spans(version)
    bounds = [*(span.start for span in spans), len(played.token_ids)]
    index = start = 0
    for span, begin, end in zip(spans, bounds, bounds[1:], strict=False):
        part = slice(begin, end)
        frame = TokenFrame(
            header.id,
            claim.epoch,
            begin,
            played.token_ids[part],
            played.loss_mask[part],
            played.rollout_logprobs[part],
            (replace(span, start=0),),
        )
        if span.author is Author.POLICY:
            await store.append(frame)
            continue
        step = StepFrame(Step(index, start, end), frame, None)
        await store.commit_step(header.id, claim.epoch, step)
        index, start = index + 1, end
    kind = OutcomeKind.COMPLETED
    await store.finish(header.id, claim.epoch, Outcome(kind, reward, {"correct": reward}))
    return Member(header.id, reward)


async def put_groups(store, model, first, version=0, rewards=((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))):
    """Groups of fresh trajectories of `model`; `first` numbers them."""
    turns = [1 + (first + n) % 3 for n in range(sum(map(len, rewards)))]
    played = iter(decode(model, turns, seed=first))
    groups = []
    number = first
    for group in rewards:
        members = []
        for reward in group:
            members.append(await put(store, number, next(played), reward, version))
            number += 1
        groups.append(tuple(members))
    return tuple(groups)


def run_config(folder, *overrides, seed=0):
    """A config that trains the very small model, its weights in a checkpoint file of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "policy.safetensors"
    if not path.exists():
        checkpoint.save(path, tiny(seed))
    plain = ["algorithm=k2_5", "engine.kind=native", f"policy.checkpoint={path}"]
    sizes = ["learner.micro_batch_tokens=64", "learner.num_threads=1"]
    return load_config(folder, *plain, *sizes, *overrides)


@asynccontextmanager
async def open_run(folder, url, *overrides):
    """A config and an open store of its run."""
    config = run_config(folder, *overrides)
    async with service(config.run_folder / "store", url, str(folder)) as store:
        yield config, store


def to_yaml(config):
    return yaml.safe_dump(config.to_json())
