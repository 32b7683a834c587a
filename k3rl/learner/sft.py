"""Supervised fine-tuning on demonstrations: the cold start that reinforcement learning begins from.

The loss of an optimiser step is the cross-entropy of the next token, averaged over the policy
tokens of the whole step, so that the gradient does not depend on how a step is cut into passes.
Tokens that the environment wrote are read but not learned. Expert loads are balanced after each
step (quantile balancing, Kimi K3 report, arXiv 2607.24653); reinforcement learning freezes what
comes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from k3rl import metrics
from k3rl.config import Config
from k3rl.errors import EngineError, UserInputError
from k3rl.learner.optim import Optimiser, Rates
from k3rl.model.balance import QuantileBalancer, routers
from k3rl.model.model import K3Model
from k3rl.model.routing import Routing
from k3rl.sections import OptimiserConfig, value_at
from k3rl.types import BoolArray, Int32Array, philox

NUM_EFFORTS = 3
PROBE_SEED = 0
PROBE_SCALE = 0.5
"""Of the probe's logits: the smaller, the larger a part of the hidden state the level must be."""


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """A trajectory to imitate: token ids [T] and which of them the policy wrote [T]."""

    token_ids: Int32Array
    loss_mask: BoolArray
    effort: int
    """Index of the level of effort that its context asks for, below `NUM_EFFORTS`."""

    def __post_init__(self) -> None:
        """Raises UserInputError when there is nothing to predict, or nothing to predict it from."""
        if self.token_ids.shape != self.loss_mask.shape or self.token_ids.ndim != 1:
            raise UserInputError("a demonstration needs one loss mask entry per token")
        if not 0 <= self.effort < NUM_EFFORTS:
            raise UserInputError(f"effort {self.effort} is not below {NUM_EFFORTS}")
        if not self.loss_mask.any() or self.loss_mask[0]:
            raise UserInputError("a demonstration needs policy tokens, the first not among them")


def draw_batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Indices of the demonstrations of each optimiser step, for ever.

    A step takes the fewest demonstrations with at least `batch_tokens` tokens. Each is drawn once
    before any is drawn again; the order of round r comes from `philox(seed, "sft", r)`.
    """
    queue: list[int] = []
    epoch = 0
    while True:
        batch: list[int] = []
        while sum(lengths[index] for index in batch) < batch_tokens:
            if not queue:
                order = philox(seed, "sft", epoch).permutation(len(lengths))
                queue, epoch = [int(index) for index in order], epoch + 1
            batch.append(queue.pop())
        yield batch


def passes(batch: Sequence[Demonstration], max_tokens: int) -> list[list[Demonstration]]:
    """A step cut into forward passes of at most `max_tokens` tokens, alike in length.

    A demonstration that is longer by itself makes a pass of its own.
    """
    cut: list[list[Demonstration]] = []
    room = 0
    for demonstration in sorted(batch, key=lambda each: len(each.token_ids)):
        if not cut or len(demonstration.token_ids) > room:
            cut.append([])
            room = max_tokens
        cut[-1].append(demonstration)
        room -= len(demonstration.token_ids)
    return cut


def rates_at(settings: OptimiserConfig, step: int, warmup_steps: int) -> Rates:
    """The learning rates of step `step` (from 0): risen linearly until `warmup_steps` are over."""
    factor = min(1.0, (step + 1) / (warmup_steps + 1))
    return Rates(
        factor * value_at(settings.matrix_lr, step), factor * value_at(settings.vector_lr, step)
    )


@dataclass(frozen=True, slots=True)
class SftStats:
    """What one optimiser step saw."""

    loss: float
    """Nats per policy token, before the step."""
    gradient_norm: float
    """Before clipping."""
    probe_loss: float
    """Nats per policy token of the effort probe."""
    num_tokens: int
    num_policy_tokens: int

    def scalars(self) -> dict[str, float]:
        """As metrics."""
        return {
            metrics.SFT_LOSS: self.loss,
            metrics.SFT_GRADIENT_NORM: self.gradient_norm,
            metrics.SFT_PROBE_LOSS: self.probe_loss,
        }


class SftLearner:
    """Fine-tunes a model in place.

    Demonstrations do not depend on the level of effort, so a policy that starts from random weights
    would learn to ignore the message that names it, and reinforcement learning would move all
    levels together: gradients of one decision at two levels then have a cosine above 0.999. A
    pre-trained model reads the message. A small one is made to by the effort probe: the level must
    follow from a fixed linear map of the hidden state at every policy token. The map has no
    parameters that train and is no part of the model.
    """

    def __init__(
        self,
        model: K3Model,
        optimiser: Optimiser,
        *,
        micro_batch_tokens: int = 8192,
        max_grad_norm: float | None = 1.0,
        effort_probe: float = 1.0,
    ) -> None:
        """`optimiser` holds the parameters of `model`; `effort_probe` weighs the probe's loss."""
        self.model, self.optimiser = model, optimiser
        self.micro_batch_tokens, self.max_grad_norm = micro_batch_tokens, max_grad_norm
        self.effort_probe = effort_probe
        self._balancer = QuantileBalancer.of(model) if routers(model) else None
        generator = torch.Generator().manual_seed(PROBE_SEED)
        rows = torch.randn(model.config.hidden_size, NUM_EFFORTS, generator=generator)
        self._probe = torch.linalg.qr(rows).Q.T  # [levels, d], orthonormal

    def step(self, batch: Sequence[Demonstration], rates: Rates) -> SftStats:
        """One optimiser step on a batch, then one update of the router biases (`balance`).

        Raises EngineError when the loss or a gradient is not finite; weights are then unchanged.
        """
        num_policy_tokens = sum(int(each.loss_mask.sum()) for each in batch)
        loss = probe_loss = 0.0
        self.optimiser.zero_grad()
        for part in passes(batch, self.micro_batch_tokens):
            routing = Routing.record(keep_scores=True)
            summed, probed = self._losses(part, routing)
            total = (summed + self.effort_probe * probed) / num_policy_tokens
            torch.autograd.backward(total)
            loss += float(summed.detach()) / num_policy_tokens
            probe_loss += float(probed.detach()) / num_policy_tokens
            if not math.isfinite(loss):
                break
            if self._balancer is not None:
                self._balancer.observe(routing.scores)
        gradient_norm = self._clip()
        if not math.isfinite(loss + gradient_norm):
            if self._balancer is not None:
                self._balancer.discard()
            raise EngineError(f"fine-tuning: loss {loss}, gradient norm {gradient_norm}")
        self.optimiser.step(rates)
        self.optimiser.zero_grad()
        if self._balancer is not None:
            self._balancer.step()
        num_tokens = sum(len(each.token_ids) for each in batch)
        return SftStats(loss, gradient_norm, probe_loss, num_tokens, num_policy_tokens)

    @torch.no_grad()
    def loss(self, demonstrations: Sequence[Demonstration]) -> float:
        """Nats per policy token, without a step."""
        summed = 0.0
        for part in passes(demonstrations, self.micro_batch_tokens):
            summed += float(self._losses(part, Routing.record())[0])
        return summed / sum(int(each.loss_mask.sum()) for each in demonstrations)

    def _losses(self, part: Sequence[Demonstration], routing: Routing) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the policy tokens of one pass, and of their level; both summed."""
        ids = torch.as_tensor(np.concatenate([each.token_ids for each in part]), dtype=torch.int64)
        mask = np.concatenate([each.loss_mask for each in part])
        lengths = [len(each.token_ids) for each in part]
        starts = torch.as_tensor(np.cumsum([0, *lengths]))
        levels = torch.as_tensor(np.repeat([each.effort for each in part], lengths)[mask])
        hidden, _ = self.model(ids, starts, routing=routing)
        targets = torch.as_tensor(np.flatnonzero(mask))
        # The first token of a sequence is never a target, so the one before is of the same one.
        hidden = hidden[targets - 1]
        spoken = cross_entropy(self.model.head(hidden), ids[targets], reduction="sum")
        told = PROBE_SCALE * hidden @ self._probe.T.to(hidden.dtype)
        return spoken, cross_entropy(told, levels, reduction="sum")

    def _clip(self) -> float:
        parameters = self.optimiser.parameters.values()
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))


def make_learner(settings: Config, model: K3Model) -> SftLearner:
    """The learner that a config asks for, around `model`."""
    options = settings.optimiser
    first, second = options.betas
    optimiser = Optimiser(
        model,
        model.config,
        momentum=options.momentum,
        betas=(first, second),
        weight_decay=options.weight_decay,
    )
    return SftLearner(
        model,
        optimiser,
        micro_batch_tokens=settings.learner.micro_batch_tokens,
        max_grad_norm=options.max_grad_norm,
    )
