"""K3 as one module: packed training, prefill behind a carried state, and one-token steps.

    embedding -> per layer [mix -> norm -> attention; mix -> norm -> feed-forward] -> mix -> norm

There is no residual stream: a mixer in front of every sub-layer weighs what was added so far
(`attn_res`).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3rl.errors import EngineError, UserInputError
from k3rl.model.attn_res import Residuals
from k3rl.model.config import ModelConfig
from k3rl.model.init import initialise
from k3rl.model.kda import KdaState, KimiDeltaAttention
from k3rl.model.layout import Layout
from k3rl.model.mla import GatedMla
from k3rl.model.moe import GluMlp, LatentMoe
from k3rl.model.ops import linear, rms_norm, wide
from k3rl.model.routing import Routing
from k3rl.model.state import BatchState, StatePool
from k3rl.model.stepping import StepPlan
from k3rl.model.vision import Patches, Projector, Spliced, VisionTower, feature_counts, splice
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
        if config.attn_res != "off":
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

    def _no_latents(self, old: BatchState) -> Tensor:
        """Of a model without latent caches: no layers, but room for every token as elsewhere."""
        longest = int((old.lengths + self.layout.length_array).max())
        return old.latents.new_zeros(0, len(old.lengths), longest, old.latents.shape[3])

    def collect(self) -> BatchState | None:
        """The state after the tokens; None when the pass started from none."""
        if self.state is None:
            return None
        old = self.state
        return BatchState(
            torch.stack([after.memory for after in self.kda]) if self.kda else old.kda,
            torch.stack([after.history for after in self.kda]) if self.kda else old.conv,
            torch.stack(self.latents) if self.latents else self._no_latents(old),
            old.lengths + self.layout.length_array,
        )


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.two_phase = False
        """Whether mixers read the bank once per block (`attn_res`): the same function."""
        self.embed_tokens = Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = Weight(config.hidden_size)
        if config.attn_res != "off":
            self.output_attn_res_norm = Weight(config.hidden_size)
            self.output_attn_res_proj = Weight(1, config.hidden_size)

    def sites(self) -> list[tuple[Weight, Weight]]:
        """Norm and pseudo-query of every mixer in order; none without attention residuals."""
        if self.config.attn_res == "off":
            return []
        pairs: list[tuple[Weight, Weight]] = []
        for module in self.layers:
            layer = cast(DecoderLayer, module)
            pairs.append((layer.self_attention_res_norm, layer.self_attention_res_proj))
            pairs.append((layer.mlp_res_norm, layer.mlp_res_proj))
        return [*pairs, (self.output_attn_res_norm, self.output_attn_res_proj)]

    def forward(self, embedded: Tensor, cells: Cells, routing: Routing | None) -> Tensor:
        """Embeddings [T, d] -> hidden [T, d] after the final norm."""
        eps = self.config.norm_eps
        sources = Residuals(embedded, self.sites(), self.config, self.two_phase)
        for index, module in enumerate(self.layers):
            layer = cast(DecoderLayer, module)
            mixed = sources.mix(2 * index)
            sources.begin(index)
            sources.add(cells.attend(index, rms_norm(mixed, layer.input_layernorm.weight, eps)))
            mixed = rms_norm(sources.mix(2 * index + 1), layer.post_attention_layernorm.weight, eps)
            sources.add(layer.feed_forward(mixed, routing))
        return rms_norm(sources.mix(2 * len(self.layers)), self.norm.weight, eps)


class K3Model(nn.Module):
    """The policy. Parameter names are those of the release below its text prefix."""

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        """Float32 weights that follow from `config` and `seed` alone; None: left to be loaded."""
        super().__init__()
        self.config = config
        self.num_router_layers = config.num_router_layers
        self.model = Decoder(config)
        self.lm_head = Weight(config.vocab_size, config.hidden_size)
        if config.vision is not None:
            self.vision_tower = VisionTower(config.vision)
            self.mm_projector = Projector(config.vision, config.hidden_size)
        self._plan: StepPlan | None = None
        if seed is not None:
            initialise(self, config, seed)

    def forward(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        state: BatchState | None = None,
        routing: Routing | None = None,
        media: Patches | None = None,
    ) -> tuple[Tensor, BatchState | None]:
        """Packed sequences, each behind its own state.

        Args:
            token_ids: [T] int64.
            cu_seqlens: [N + 1] int64, from 0 to T; no sequence is empty.
            state: Of the N sequences. None: zero states, and no state is returned.
            routing: Records or pins the experts of these tokens.
            media: Items of the media tokens, one token each. A token takes as many positions as
                its item has features; states and routing count positions. None: a media token is
                embedded as any other, as in the release.

        Returns:
            Hidden [T, d] after the final norm (of a media token: behind its last feature), and the
            state after the tokens: a new object, through which gradients flow.

        Raises:
            UserInputError: there is no sequence, or an empty one; media tokens and items differ in
                number; a routing that was used, or does not fit.

        """
        if media is None:
            embedded = F.embedding(token_ids, self.model.embed_tokens.weight)
            return self.forward_embedded(embedded, cu_seqlens, state, routing)
        spliced = self.splice_media(token_ids, cu_seqlens, media)
        hidden, after = self.forward_embedded(spliced.embeds, spliced.cu_seqlens, state, routing)
        return hidden[spliced.rows], after

    def splice_media(self, token_ids: Tensor, cu_seqlens: Tensor, media: Patches) -> Spliced:
        """Embeddings of ids [T] with the features of `media` in place of media tokens.

        Raises:
            UserInputError: media tokens and items differ in number, or the model has no tower.

        """
        vision = self.config.vision
        if vision is None:
            raise UserInputError("this model has no vision tower")
        embedded = F.embedding(token_ids, self.model.embed_tokens.weight)
        features = self.mm_projector(self.vision_tower(*media))
        counts = feature_counts(media.grid_thws, vision.merge_size)
        return splice(token_ids, embedded, features, counts, vision.media_token_id, cu_seqlens)

    def forward_embedded(
        self,
        embedded: Tensor,
        cu_seqlens: Tensor,
        state: BatchState | None = None,
        routing: Routing | None = None,
    ) -> tuple[Tensor, BatchState | None]:
        """As `forward`, of embeddings [T, d]."""
        if state is not None and len(state.lengths) != len(cu_seqlens) - 1:
            raise UserInputError(
                f"a state of {len(state.lengths)} sequences for {len(cu_seqlens) - 1}"
            )
        starts_empty = state is None or state.latents.shape[2] == 0
        layout = Layout.of(
            cu_seqlens, len(embedded), starts_empty and embedded.device.type == "cpu"
        )
        embedded = F.pad(embedded, (0, 0, 0, layout.num_rows - layout.num_tokens))
        if routing is not None:
            routing.begin(layout.num_tokens, self.config)
        cells = Cells(self.model.layers, layout, state)
        hidden = cast(Tensor, self.model(embedded, cells, routing))
        return hidden[: layout.num_tokens], cells.collect()

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden [..., d] -> logits [..., V], float32 or wider."""
        return wide(linear(hidden, self.lm_head.weight))

    def step(
        self, token_ids: Tensor, pool: StatePool, slots: Tensor, routing: Routing | None = None
    ) -> Tensor:
        """Feed one token to each sequence in `slots` [B]; ids [B] -> hidden [B, d], no gradient.

        The pool is updated in place. Neighbouring slots in rising order are fastest. Raises
        EngineError, with the pool unchanged, when a sequence has reached `pool.max_tokens`, there
        is none, or the pool is of another dtype than steps compute in (float32, or float64 with
        float64 weights).

        Runs on copies of the weights, made at the first step and again after any change of them
        but one through `.data` (see `StepPlan.fits`). A config that `StepPlan` has no layout for
        runs as `extend`.
        """
        if not StepPlan.lays_out(self.config):
            starts = torch.arange(len(slots) + 1, device=slots.device)
            return self.extend(token_ids, starts, pool, slots, routing)
        dtype = wide(self.lm_head.weight).dtype
        if not len(slots) or pool.kda.dtype != dtype:
            raise EngineError(f"{len(slots)} sequences in a pool of {pool.kda.dtype}, not {dtype}")
        if routing is not None:
            routing.begin(len(slots), self.config)
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
        media: Patches | None = None,
    ) -> Tensor:
        """`forward` from and back to the sequences in `slots` [N]; ids [T] -> hidden [T, d].

        Raises as `forward`, and EngineError when a sequence would exceed `pool.max_tokens`; the
        pool is then unchanged.
        """
        if not len(slots) or len(slots) != len(cu_seqlens) - 1:
            raise EngineError(f"{len(slots)} slots for {len(cu_seqlens) - 1} sequences")
        pool.require_room(int((pool.lengths[slots] + cu_seqlens.diff()).max()))
        hidden, state = self.forward(token_ids, cu_seqlens, pool.gather(slots), routing, media)
        pool.scatter(slots, cast(BatchState, state))
        return hidden
