"""K3 as one module: packed training, prefill behind a carried state, and one-token steps.

    embedding -> per layer [mix -> norm -> attention; mix -> norm -> feed-forward] -> mix -> norm

There is no residual stream. `bank` holds the embedding and the sums of finished blocks, `prefix`
the running sum of the present block; a mixer in front of every sub-layer weighs them.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.errors import EngineError
from k3rl.model.attn_res import mix
from k3rl.model.config import ModelConfig
from k3rl.model.init import initialise
from k3rl.model.kda import KdaState, KimiDeltaAttention
from k3rl.model.layout import Layout
from k3rl.model.mla import GatedMla
from k3rl.model.moe import GluMlp, LatentMoe
from k3rl.model.ops import rms_norm, wide
from k3rl.model.routing import Routing
from k3rl.model.state import BatchState, StatePool
from k3rl.model.stepping import StepPlan
from k3rl.model.weights import Weight


class DecoderLayer(nn.Module):
    """The parts of one layer; `Decoder` decides what flows between them."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.is_kda = config.layer_kinds[index] == "kda"
        self.self_attn = KimiDeltaAttention(config) if self.is_kda else GatedMla(config)
        if index < config.moe.num_dense_layers:
            self.mlp = GluMlp(config, config.moe.dense_size)
        else:
            self.block_sparse_moe = LatentMoe(config)
        self.is_dense = index < config.moe.num_dense_layers
        self.input_layernorm = Weight(d)
        self.post_attention_layernorm = Weight(d)
        self.self_attention_res_norm = Weight(d)
        self.self_attention_res_proj = Weight(1, d)
        self.mlp_res_norm = Weight(d)
        self.mlp_res_proj = Weight(1, d)

    def feed_forward(self, x: Tensor, routing: Routing | None) -> Tensor:
        """[T, d] -> [T, d], dense or routed."""
        if self.is_dense:
            return cast(Tensor, self.mlp(x))
        return cast(Tensor, self.block_sparse_moe(x, routing))


class Cells:
    """How a pass answers the attention of each layer: x [T, d] of layer `index` -> [T, d]."""

    def __init__(self, layers: nn.ModuleList, layout: Layout, state: BatchState | None) -> None:
        self.layers, self.layout, self.state = layers, layout, state
        self.kda: list[KdaState] = []
        self.latents: list[Tensor] = []

    def attend(self, index: int, x: Tensor) -> Tensor:
        """Run the attention of one layer and keep what it leaves behind."""
        layer = cast(DecoderLayer, self.layers[index])
        if layer.is_kda:
            number = len(self.kda)
            past = None
            if self.state is not None:
                past = KdaState(self.state.kda[number], self.state.conv[number])
            out, after = cast(KimiDeltaAttention, layer.self_attn)(x, self.layout, past)
            self.kda.append(after)
            return cast(Tensor, out)
        past_latents = lengths = None
        if self.state is not None:
            past_latents, lengths = self.state.latents[len(self.latents)], self.state.lengths
        out, latents = cast(GatedMla, layer.self_attn)(x, self.layout, past_latents, lengths)
        self.latents.append(latents)
        return cast(Tensor, out)

    def collect(self) -> BatchState | None:
        """The state after the tokens; None when the pass started from none."""
        if self.state is None:
            return None
        old = self.state
        return BatchState(
            torch.stack([after.memory for after in self.kda]) if self.kda else old.kda,
            torch.stack([after.history for after in self.kda]) if self.kda else old.conv,
            torch.stack(self.latents) if self.latents else old.latents,
            old.lengths + self.layout.length_array,
        )


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = Weight(config.hidden_size)
        self.output_attn_res_norm = Weight(config.hidden_size)
        self.output_attn_res_proj = Weight(1, config.hidden_size)

    def forward(self, token_ids: Tensor, cells: Cells, routing: Routing | None) -> Tensor:
        """Token ids [T] -> hidden [T, d] after the final norm."""
        eps = self.config.norm_eps
        bank: list[Tensor] = []
        prefix: Tensor | None = F.embedding(token_ids, self.embed_tokens.weight)
        for index, module in enumerate(self.layers):
            layer = cast(DecoderLayer, module)
            mixed = self._mix(bank, prefix, layer.self_attention_res_norm,
                              layer.self_attention_res_proj)  # fmt: skip
            if index % self.config.attn_res_block_size == 0:
                bank.append(cast(Tensor, prefix))
                prefix = None
            out = cells.attend(index, rms_norm(mixed, layer.input_layernorm.weight, eps))
            prefix = out if prefix is None else prefix + out
            mixed = self._mix(bank, prefix, layer.mlp_res_norm, layer.mlp_res_proj)
            normed = rms_norm(mixed, layer.post_attention_layernorm.weight, eps)
            prefix = prefix + layer.feed_forward(normed, routing)
        mixed = self._mix(bank, prefix, self.output_attn_res_norm, self.output_attn_res_proj)
        return rms_norm(mixed, self.norm.weight, eps)

    def _mix(self, bank: list[Tensor], prefix: Tensor | None, norm: Weight, proj: Weight) -> Tensor:
        sources = bank if prefix is None else [*bank, prefix]
        if not bank:
            return sources[0]
        return mix(sources, norm.weight, proj.weight, self.config.norm_eps)


class K3Model(nn.Module):
    """The policy. Parameter names are those of the release below its text prefix."""

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        """Float32 weights that follow from `config` and `seed` alone; None: left to be loaded."""
        super().__init__()
        self.config = config
        self.num_router_layers = config.num_router_layers
        self.model = Decoder(config)
        self.lm_head = Weight(config.vocab_size, config.hidden_size)
        self._plan: StepPlan | None = None
        if seed is not None:
            initialise(self, config, seed)

    def forward(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        state: BatchState | None = None,
        routing: Routing | None = None,
    ) -> tuple[Tensor, BatchState | None]:
        """Packed sequences, each behind its own state.

        Args:
            token_ids: [T] int64.
            cu_seqlens: [N + 1] int64, from 0 to T; no sequence is empty.
            state: Of the N sequences. None: zero states, and no state is returned.
            routing: Records or pins the experts of these tokens.

        Returns:
            Hidden [T, d] after the final norm, and the state after the tokens: a new object,
            through which gradients flow.

        """
        layout = Layout.of(cu_seqlens, len(token_ids))
        cells = Cells(self.model.layers, layout, state)
        return cast(Tensor, self.model(token_ids, cells, routing)), cells.collect()

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden [..., d] -> logits [..., V], float32 or wider."""
        return wide(F.linear(hidden, self.lm_head.weight))

    def step(
        self, token_ids: Tensor, pool: StatePool, slots: Tensor, routing: Routing | None = None
    ) -> Tensor:
        """Feed one token to each sequence in `slots` [B]; ids [B] -> hidden [B, d], no gradient.

        The pool is updated in place. Neighbouring slots in rising order are fastest. Raises
        EngineError, with the pool unchanged, when a sequence has reached `pool.max_tokens`.

        Runs on copies of the weights, made at the first step and again after any change of them
        but one through `.data` (see `StepPlan.fits`).
        """
        if self._plan is None or not self._plan.fits():
            self._plan = StepPlan(self.model)
        with torch.inference_mode():
            hidden = self._plan.step(token_ids, pool, slots, routing)
        # A copy made outside is an ordinary tensor again, fit for any use.
        return hidden.clone()

    @torch.no_grad()
    def extend(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        pool: StatePool,
        slots: Tensor,
        routing: Routing | None = None,
    ) -> Tensor:
        """`forward` from and back to the sequences in `slots` [N]; ids [T] -> hidden [T, d].

        Raises EngineError, with the pool unchanged, when a sequence would exceed `pool.max_tokens`.
        """
        if len(slots) != len(cu_seqlens) - 1:
            raise EngineError(f"{len(slots)} slots for {len(cu_seqlens) - 1} sequences")
        pool.require_room(int((pool.lengths[slots] + cu_seqlens.diff()).max()))
        hidden, state = self.forward(token_ids, cu_seqlens, pool.gather(slots), routing)
        pool.scatter(slots, cast(BatchState, state))
        return hidden
