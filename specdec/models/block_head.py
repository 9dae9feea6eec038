"""A block head for its target: one pass over [last token, mask, mask, ...] drafts every next token.

With transitions (DSpark), each token's logits get a bias by the token drafted before it.

Context keys and values of all layers are products of one vector per position, the fusion of the target's
streams. They are written once, as positions are accepted. A block's own keys and values lie behind them, are
seen by no other pass, and are overwritten.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.models import spec
from specdec.models.eagle_head import load_embedding, load_output
from specdec.models.frame import LoadedLayer
from specdec.models.linear import Linear
from specdec.models.mixers import Attention
from specdec.models.mixers.attention import LoadedAttention
from specdec.models.mixers.base import ArenaViews
from specdec.models.network import Network, begin_step, first_place
from specdec.models.replay import Replays
from specdec.models.rope import rope_tables
from specdec.models.shortlist import Shortlist
from specdec.models.weights import Weights
from specdec.state_slots.window import Window

CONTEXT = "context."
"""Prefix of matrices that are loaded a second time, joined over all layers."""


class BlockHead:
    """Predicts a block of tokens from the target's streams of earlier positions and the last token."""

    def __init__(
        self, s: spec.Block, target: Network, weights: Weights, ids_C: Tensor | None, *, max_length: int
    ) -> None:
        """Build the head; `ids_C` are the tokens that its output head ranks, None: all, in order."""
        kernels, width, layers = target.kernels, s.width, s.layers
        self.spec, self.kernels, self.eps = s, kernels, s.norm.eps
        self.width, self.aux_hidden_layers = width, s.aux_hidden_layers
        self.block, self.mask, self.deepest = s.block, s.mask, s.deepest
        self.embed_VD = load_embedding(s, target, weights)
        reads = len(s.aux_hidden_layers) * s.target_width
        self.fc = Linear.load(weights, kernels, {"fc": width}, reads, exact=("fc",))
        self.hidden_norm_D = s.norm.load(weights, "hidden_norm.weight", width)
        self.norm_D = s.norm.load(weights, "norm.weight", width)
        self.layers: list[LoadedLayer] = []
        placement = first_place(target.spec.layers, width)
        rows, bias = dict[str, int](), False
        for i, layer in enumerate(layers):
            (mixer,) = layer.mixers
            assert isinstance(mixer, Attention)
            layer_weights = weights.within(f"layers.{i}")
            self.layers.append(LoadedLayer(layer, width, s.norm, layer_weights, kernels, placement))
            placement = placement.after(mixer)
            rows |= {f"{CONTEXT}{i}.{name}": mixer.kv_heads * mixer.head_dim for name in "kv"}
            bias = mixer.bias
        self.context = Linear.load(weights, kernels, rows, width, bias=bias)
        """Keys and values of all layers; for tokens of a block, each layer multiplies its own input."""
        ropes = (rope for layer in layers for mixer in layer.mixers for rope in mixer.ropes())
        # The last block may reach beyond the longest sequence.
        self.rope = rope_tables(ropes, max_length + s.block, kernels, target.embed_VD.device)
        self.project = load_output(s, target, weights, ids_C) if s.own_head else target.project_drafts
        self.has_bias = s.transitions > 0
        if self.has_bias:
            self.transitions_VR = weights.take("transition.embed.weight", (s.vocab, s.transitions))
            out_CR = weights.take("transition.head.weight", (s.ranked, s.transitions))
            self.transition = Shortlist(out_CR, ids_C, target.spec.vocab, kernels)
        self._writes, self._passes = Replays(self._write, kernels), Replays(self._pass, kernels)

    def combine_hidden_states(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        """Fuse the target's streams into the vector from which every layer takes keys and values."""
        return self.kernels.rms_norm(self.fc(self.kernels.concat(*aux)), self.hidden_norm_D, self.eps)

    def forward(self, window: Window, hidden_TD: Tensor, memory: ArenaViews) -> Tensor:
        """Write keys and values of accepted positions; return their fused states unchanged."""
        self._writes(_bent(window, None), memory, hidden_TD)
        return hidden_TD

    def draft(self, window: Window, memory: ArenaViews) -> Tensor:
        """Return the hidden states [B, S, D] of the S next tokens, from windows of a block per row."""
        (group,) = window.groups
        assert group.width == self.block
        sees_BMM = torch.ones(
            group.rows, group.width, group.width, dtype=torch.bool, device=window.token_T.device
        )
        (out_TD,) = self._passes(_bent(window, sees_BMM), memory)
        return out_TD.view(group.rows, group.width, self.width)[:, self.spec.first :]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits over the target's tokens; tokens that the head cannot draft get minus infinity."""
        return self.project(hidden_TD)

    def bias(self, token_N: Tensor) -> Tensor:
        """Return what is added to the logits of the position after each token."""
        return self.transition(self.kernels.embedding(self.transitions_VR, token_N))

    def _write(self, window: Window, memory: ArenaViews, hidden_TD: Tensor) -> tuple[Tensor, ...]:
        step, kv_TN, start = begin_step(window, memory, self.rope, self.kernels), self.context(hidden_TD), 0
        for layer in self.layers:
            (mixer,) = layer.mixers
            assert isinstance(mixer, LoadedAttention)
            end = start + sum(mixer.layer.widths[1:])
            mixer.write(kv_TN[:, start:end], step)
            start = end
        return ()

    def _pass(self, window: Window, memory: ArenaViews) -> tuple[Tensor, ...]:
        """Run a block; its window sees all of itself, except in causal layers."""
        step = begin_step(window, memory, self.rope, self.kernels)
        causal = replace(step, window=_bent(window, None))
        x_TD, added_TD = self.kernels.embedding(self.embed_VD, window.token_T), None
        for layer, is_causal in zip(self.layers, self.spec.causal, strict=True):
            for half in layer.halves:
                x_TD, added_TD = half(x_TD, added_TD, causal if is_causal else step)
        return (self.kernels.add_rms_norm(x_TD, added_TD, self.norm_D, self.eps),)


def _bent(window: Window, sees_BMM: Tensor | None) -> Window:
    """Return the window with other relations between its tokens; None: each sees the earlier ones."""
    groups = tuple(replace(group, ancestors_BMM=sees_BMM) for group in window.groups)
    return replace(window, groups=groups)
