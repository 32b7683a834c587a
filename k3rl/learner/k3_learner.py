"""The learner of a K3 model on one host: packed batches in, optimiser steps out.

Logits exist for one chunk of scored tokens at a time: every chunk's loss is differentiated down to
the hidden states it reads, and the model is differentiated once from all of these.

Axes: T tokens of a batch, S scored tokens (those that train), d hidden, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3rl.algorithms.k2_5 import token_loss, token_sums
from k3rl.algorithms.reference import reference_loss
from k3rl.errors import ConfigError
from k3rl.learner.batch import check_batch, scored_tokens
from k3rl.learner.optim import Optimiser, Rates
from k3rl.learner.protocol import Denominators, LearnStats
from k3rl.model import checkpoint
from k3rl.model.model import K3Model
from k3rl.sections import ObjectiveConfig, OptimiserConfig, value_at
from k3rl.types import Float32Array, PackedBatch

WEIGHTS_FILE, OPTIMISER_FILE = "model.safetensors", "optimiser.safetensors"
HEAD_TOKENS = 2048
"""Scored tokens whose logits exist at once."""
R = TypeVar("R")


class K3Learner:
    """Gradients in the dtype of the weights, float32 in training; one thread computes."""

    def __init__(
        self,
        model: K3Model,
        objective: ObjectiveConfig,
        optimiser: OptimiserConfig,
        *,
        num_threads: int = 1,
    ) -> None:
        """`model` is trained in place; what has `requires_grad` False stays as it is."""
        self.model = model
        self.policy_logprobs: Float32Array = np.empty(0, np.float32)
        """[T] of the last batch under the present weights; NaN at tokens that do not train."""
        self.update = 0
        """The update whose settings the objective's schedules are read at."""
        self._objective, self._settings = objective, optimiser
        slow, slower = optimiser.betas
        self.optimiser = Optimiser(
            model,
            model.config,
            momentum=optimiser.momentum,
            betas=(slow, slower),
            weight_decay=optimiser.weight_decay,
        )
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(1, "learner")

    async def run(self, work: Callable[[], R]) -> R:
        """Do `work` on the learner's own thread, after what was asked for before."""

        def go() -> R:
            torch.set_num_threads(self._num_threads)
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._executor, go)

    async def forward_backward(self, batch: PackedBatch, denominators: Denominators) -> LearnStats:
        """Accumulate gradients of the loss summed over the batch / num_policy_tokens.

        `losses` has one entry per sequence. Raises UserInputError for arrays that disagree.
        """
        check_batch(batch, denominators)
        return await self.run(lambda: self._forward_backward(batch, denominators))

    async def optim_step(self, update: int) -> dict[str, float]:
        """Clip and apply what was accumulated; a gradient that is not finite is dropped, counted.

        Metrics: gradient_norm before clipping, num_skipped_steps, matrix_lr, vector_lr.
        """
        rates = Rates(
            value_at(self._settings.matrix_lr, update), value_at(self._settings.vector_lr, update)
        )
        norm, is_skipped = await self.run(lambda: self._step(rates))
        return {
            "gradient_norm": norm,
            "num_skipped_steps": float(is_skipped),
            "matrix_lr": rates.matrix,
            "vector_lr": rates.vector,
        }

    async def save(self, folder: Path) -> None:
        """Write weights (the model's checkpoint format, float32) and optimiser state."""

        def work() -> None:
            checkpoint.save(folder / WEIGHTS_FILE, self.model)
            state = {name: t.contiguous() for name, t in self.optimiser.state_dict().items()}
            save_file(state, folder / OPTIMISER_FILE)

        await self.run(work)

    async def load(self, folder: Path) -> None:
        """Take over weights and optimiser state. Raises ConfigError when they do not fit."""

        def work() -> None:
            config, tensors = checkpoint.load(folder / WEIGHTS_FILE)
            if config != self.model.config:
                raise ConfigError(f"{folder / WEIGHTS_FILE}: weights of another model config")
            self.model.load_state_dict(tensors)
            path = folder / OPTIMISER_FILE
            try:
                self.optimiser.load_state_dict(load_file(path))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
            self.optimiser.zero_grad()

        await self.run(work)

    async def drop_gradients(self) -> None:
        """Forget what was accumulated since the last step."""
        await self.run(self.optimiser.zero_grad)

    async def logprobs(self, batch: PackedBatch) -> Float32Array:
        """[T] of the tokens that train, under the present weights; NaN elsewhere. No gradient."""
        check_batch(batch, Denominators(len(batch.token_ids), len(batch.cu_seqlens) - 1))
        return await self.run(lambda: self._logprobs(batch))

    @torch.no_grad()
    def _logprobs(self, batch: PackedBatch) -> Float32Array:
        scored = np.flatnonzero(scored_tokens(batch))
        found = np.full(len(batch.token_ids), np.nan, np.float32)
        ids = torch.from_numpy(batch.token_ids.astype(np.int64))
        hidden, _ = self.model(ids, torch.from_numpy(batch.cu_seqlens.astype(np.int64)))
        for rows in np.split(scored, range(HEAD_TOKENS, len(scored), HEAD_TOKENS)):
            logits = self.model.head(hidden[torch.from_numpy(rows - 1)])
            chosen = logits.gather(-1, ids[torch.from_numpy(rows)][:, None])[:, 0]
            found[rows] = (chosen - logits.logsumexp(-1)).numpy()
        return found

    def _forward_backward(self, batch: PackedBatch, denominators: Denominators) -> LearnStats:
        scored = np.flatnonzero(scored_tokens(batch))
        logprobs = np.full(len(batch.token_ids), np.nan, np.float32)
        losses = np.zeros(len(batch.token_ids))
        sums: dict[str, float] = defaultdict(float)
        if len(scored):
            starts = torch.from_numpy(batch.cu_seqlens.astype(np.int64))
            ids = torch.from_numpy(batch.token_ids.astype(np.int64))
            hidden, _ = self.model(ids, starts)
            read = hidden.index_select(0, torch.from_numpy(scored - 1))
            slopes = []
            for rows, part in zip(
                np.split(scored, range(HEAD_TOKENS, len(scored), HEAD_TOKENS)),
                read.detach().split(HEAD_TOKENS),
                strict=True,
            ):
                leaf = part.requires_grad_()
                loss, found = self._chunk(batch, rows, leaf, sums)
                torch.autograd.backward((loss / denominators.num_policy_tokens).sum())
                assert leaf.grad is not None
                slopes.append(leaf.grad)
                losses[rows] = loss.detach().double().numpy() / denominators.num_policy_tokens
                logprobs[rows] = found
            # Not `backward(read, slopes)`: torch would import sympy first, which takes seconds.
            torch.autograd.backward((read * torch.cat(slopes)).sum())
        self.policy_logprobs = logprobs
        shares = np.add.reduceat(losses, batch.cu_seqlens[:-1])
        return LearnStats(
            len(batch.token_ids), len(scored), dict(sums), tuple(float(share) for share in shares)
        )

    def _chunk(
        self, batch: PackedBatch, rows: NDArray[np.int64], hidden: Tensor, sums: dict[str, float]
    ) -> tuple[Tensor, Float32Array]:
        """Weighted loss and log-probs of the tokens `rows` [C], read from hidden [C, d]."""
        logits = self.model.head(hidden)
        total = logits.logsumexp(-1)
        ids = torch.from_numpy(batch.token_ids[rows].astype(np.int64))
        policy = logits.gather(-1, ids[:, None])[:, 0] - total
        rollout = torch.from_numpy(batch.rollout_logprobs[rows])
        advantages = torch.from_numpy(batch.advantages[rows]).to(policy.dtype)
        valid = torch.ones_like(policy, dtype=torch.bool)
        window = self._objective.log_ratio_window
        loss = token_loss(
            policy,
            rollout,
            advantages,
            valid,
            log_ratio_window=window,
            log_ratio_sq_coef=value_at(self._objective.log_ratio_sq_coef, self.update),
        )
        found = token_sums(policy, rollout, valid, log_ratio_window=window)
        if batch.ref_logprobs is not None:
            reference = torch.from_numpy(batch.ref_logprobs[rows])
            pull, drift = reference_loss(policy, reference, coef=self._objective.reference_coef)
            loss = loss + pull
            found["reference_drift"] = float(drift.sum())
        for name, value in found.items():
            sums[name] += value
        with torch.no_grad():
            mean = ((logits - total[:, None]).exp_() * logits).sum(-1)
            sums["entropy"] += float((total - mean).sum())
        weight = torch.from_numpy(batch.token_weight[rows]).to(loss.dtype)
        return loss * weight, policy.detach().float().numpy()

    def _step(self, rates: Rates) -> tuple[float, bool]:
        """The norm of the whole gradient, and whether the step was skipped."""
        grads = [p.grad for p in self.optimiser.parameters.values() if p.grad is not None]
        norms = torch._foreach_norm(grads) if grads else [torch.zeros(())]
        norm = float(torch.stack(norms).double().norm())
        is_skipped = not grads or not np.isfinite(norm)
        if not is_skipped:
            limit = self._settings.max_grad_norm
            if limit is not None and norm > limit:
                torch._foreach_mul_(grads, limit / norm)
            self.optimiser.step(rates)
        self.optimiser.zero_grad()
        return norm, is_skipped
