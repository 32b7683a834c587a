"""Small models, requests of random tokens, and engines over them."""

import dataclasses

import numpy as np
import torch

from k3rl.blobs import BlobStore
from k3rl.model import checkpoint
from k3rl.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3rl.model.model import K3Model
from k3rl.rollout.engine import GenerateRequest, SamplingLaw
from k3rl.rollout.native import NativeEngine
from k3rl.types import Task, TrajectoryKey
from k3rl.weights.blob import publish

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    layer_kinds=("kda", "kda", "mla"),
    kda=KdaConfig(num_heads=2, head_dim=16, decay_rank=8),
    mla=MlaConfig(
        num_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=16,
    ),
    moe=MoeConfig(
        dense_size=64, num_experts=6, top_k=2, latent_size=16, expert_size=20, shared_size=40
    ),
    attn_res_block_size=2,
    init_std=None,
)
STOPS = (3, 50, 77)
# Steps of a small model are shorter than what threads cost on busy cores.
torch.set_num_threads(1)
TASK = Task("test/None-v0", 0)


def make_model(seed: int = 1, sharpness: float = 1.0, config: ModelConfig = CONFIG) -> K3Model:
    """Random weights; a sharpness above 1 makes the law as peaked as a trained one's."""
    model = K3Model(config, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def make_engine(blobs: BlobStore, model: K3Model | None, **options) -> NativeEngine:
    return NativeEngine(blobs, model, **{"max_tokens": 400, "delta_tokens": 4, **options})


def make_request(number: int = 0, length: int = 20, max_new: int = 80, **law) -> GenerateRequest:
    """Random tokens of trajectory `number`."""
    ids = np.random.default_rng(number).integers(0, CONFIG.vocab_size, length).astype(np.int32)
    key = TrajectoryKey("run", TASK.key, "max", 0, number)
    return GenerateRequest(key, TASK, ids, length, max_new, STOPS, SamplingLaw(**law))


def grown(request: GenerateRequest, *more) -> GenerateRequest:
    """The request with more tokens behind its context."""
    ids = np.concatenate([request.token_ids, *more]).astype(np.int32)
    return dataclasses.replace(request, token_ids=ids)


def published(blobs: BlobStore, model: K3Model, version: int, parent: int = 0) -> dict:
    """The manifest of a model's weights."""
    data = checkpoint.to_bytes(model.state_dict(), model.config)
    return publish(blobs, data, version, parent)


def law_of(model: K3Model, ids: np.ndarray) -> torch.Tensor:
    """Log-probs [T, V] of what follows each token, by one pass over the whole context."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        hidden, _ = model(tokens, torch.tensor([0, len(ids)]))
        return torch.log_softmax(model.head(hidden).double(), -1)
