"""Builds the native engine that a config names; apart, because it needs torch."""

from __future__ import annotations

import torch

from k3rl.blobs import BlobStore
from k3rl.config import Config
from k3rl.errors import ConfigError
from k3rl.model.checkpoint import first_model
from k3rl.rollout.native import NativeEngine
from k3rl.rollout.renderer import Renderer

LINGER_S = 0.004
"""About the cost of an iteration of a nano model: with 64 trajectories in real tools it saved two
iterations of five."""


def make_native(config: Config, renderer: Renderer, max_tokens: int) -> NativeEngine:
    """The native engine over the run's published versions, at version 0 if the config has weights.

    Sets the number of torch's threads in this process. Raises ConfigError for a model whose
    vocabulary is not the tokenizer's.
    """
    settings = config.engine
    torch.set_num_threads(settings.num_threads)
    policy = config.policy
    model = first_model(policy.checkpoint, policy.model, config.seed)
    vocab_size = renderer.tokenizer.vocab_size
    if model is not None and model.config.vocab_size != vocab_size:
        raise ConfigError(
            f"policy: the model has {model.config.vocab_size} ids, tokenizer"
            f" {config.policy.tokenizer} has {vocab_size}"
        )
    return NativeEngine(
        BlobStore(config.run_folder / "store" / "blobs"),
        model,
        num_slots=settings.num_slots,
        max_tokens=max_tokens,
        delta_tokens=settings.delta_tokens,
        linger_s=LINGER_S,
    )
