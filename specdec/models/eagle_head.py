"""An EAGLE head for its target; its layers' KV follows the target's in the arena."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.models import spec
from specdec.models.frame import LoadedLayer
from specdec.models.linear import Linear
from specdec.models.mixers.base import ArenaViews
from specdec.models.network import Network, begin_step, first_place
from specdec.models.replay import Replays
from specdec.models.rope import rope_tables
from specdec.models.shortlist import Shortlist
from specdec.models.weights import Weights
from specdec.state_slots.window import Window


class EagleHead:
    """Predicts the token after next from the target's hidden state and the token chosen there."""

    block: int | None = None

    def __init__(
        self, s: spec.Eagle, target: Network, weights: Weights, ids_C: Tensor | None, *, max_length: int
    ) -> None:
        """Build the head; `ids_C` are the tokens that its output head ranks, None: all, in order."""
        kernels, width = target.kernels, s.width
        self.spec, self.target, self.kernels = s, target, kernels
        self.width, self.aux_hidden_layers, self.eps = width, s.aux_hidden_layers, s.norm.eps
        device = target.embed_VD.device
        self.embed_VD = load_embedding(s, target, weights)
        streams = len(s.aux_hidden_layers)
        reads = streams * s.target_width or 2 * width
        self.fc = Linear.load(weights, kernels, {"fc": width}, reads, bias=s.fc_bias, exact=("fc",))
        if streams:
            self.embed_norm_D, self.hidden_norm_D, self.norm_D = (
                s.norm.load(weights, f"{name}.weight", width)
                for name in ("embed_norm", "hidden_norm", "norm")
            )
        self.aux_norms_D = [
            s.norm.load(weights, f"fc_norm.{i}.weight", s.target_width)
            for i in range(streams if s.norms_each else 0)
        ]
        self.input_norm_D = s.norm.load(weights, "input_norm.weight", reads) if s.norms_joined else None
        placement = first_place(target.spec.layers, width, reads=s.layers[0].reads)
        self.blocks: list[LoadedLayer] = []
        for i, layer in enumerate(s.layers):
            self.blocks.append(
                LoadedLayer(layer, width, s.norm, weights.within(f"layers.{i}"), kernels, placement)
            )
            placement = replace(placement.after(*layer.mixers), reads=width)
        ropes = (rope for layer in s.layers for mixer in layer.mixers for rope in mixer.ropes())
        self.rope = rope_tables(ropes, max_length, kernels, device)
        self._replays = Replays(self._run, kernels)
        self.project = load_output(s, target, weights, ids_C) if s.own_head else target.project_drafts

    def combine_hidden_states(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        """Fuse the target's auxiliary hidden states; without any, return its last hidden states."""
        if not self.aux_hidden_layers:
            return hidden_TD
        if self.aux_norms_D:
            norms = zip(aux, self.aux_norms_D, strict=True)
            aux = [self.kernels.rms_norm(own_TD, norm_D, self.eps) for own_TD, norm_D in norms]
        joined_TD = self.kernels.concat(*aux)
        if self.input_norm_D is not None:
            joined_TD = self.kernels.rms_norm(joined_TD, self.input_norm_D, self.eps)
        return self.fc(joined_TD)

    def forward(self, window: Window, hidden_TD: Tensor, memory: ArenaViews) -> Tensor:
        """Return the last layer's output for each token, given the hidden state of the previous position.

        The first input is the target's fused state; recursion feeds the output back unchanged.
        """
        return self._replays(window, memory, hidden_TD)[0]

    def _run(self, window: Window, memory: ArenaViews, hidden_TD: Tensor) -> tuple[Tensor, ...]:
        step = begin_step(window, memory, self.rope, self.kernels)
        x_TD, read_TD = self._enter(self.kernels.embedding(self.embed_VD, window.token_T), hidden_TD)
        mixing, *halves = (half for block in self.blocks for half in block.halves)
        added_TD = mixing.run(read_TD, step)
        for half in halves:
            x_TD, added_TD = half(x_TD, added_TD, step)
        if self.spec.returns_normed:
            return (self.kernels.add_rms_norm(x_TD, added_TD, self.norm_D, self.eps),)
        return (self.kernels.add(x_TD, added_TD),)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits over the target's tokens; tokens that the head cannot draft get minus infinity."""
        if self.aux_hidden_layers and not self.spec.returns_normed:
            hidden_TD = self.kernels.rms_norm(hidden_TD, self.norm_D, self.eps)
        return self.project(hidden_TD)

    def _enter(self, embed_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return a writable residual stream and the input of attention."""
        if not self.aux_hidden_layers:
            x_TD = self.fc(self.kernels.concat(embed_TD, hidden_TD))
            return x_TD, x_TD
        normed_TD = self.kernels.rms_norm(hidden_TD, self.hidden_norm_D, self.eps)
        embed_TD = self.kernels.rms_norm(embed_TD, self.embed_norm_D, self.eps)
        x_TD = self.kernels.concat(normed_TD if self.spec.normed_residual else hidden_TD)
        return x_TD, self.kernels.concat(embed_TD, normed_TD)


def load_output(s: spec.Head, target: Network, weights: Weights, ids_C: Tensor | None) -> Shortlist:
    """Load a head's own output head, limited to draftable tokens."""
    head_CD, only = weights.take("head.weight", (s.ranked, s.width)), target.shortlist
    ids_C = None if ids_C is None else ids_C.to(head_CD.device)
    if only:
        assert only.ids_C is not None
        ids_C = torch.arange(len(head_CD), device=head_CD.device) if ids_C is None else ids_C
        kept_C = torch.isin(ids_C, only.ids_C)
        head_CD, ids_C = head_CD[kept_C], ids_C[kept_C]
        if not len(ids_C):
            raise ConfigError(
                f"draft_vocab: of the {len(only.ids_C)} most frequent tokens the head can draft none; "
                "raise draft_vocab, or leave it out.",
                field="draft_vocab",
            )
    ranked_CD = weights.output("head.weight", head_CD)
    return Shortlist(ranked_CD, ids_C, target.spec.vocab, target.kernels)


def load_embedding(s: spec.Head, target: Network, weights: Weights) -> Tensor:
    """Load a head's own embedding, or share the target's if equal."""
    shared_VD = target.embed_VD
    if not s.own_embed:
        return shared_VD
    own_VD = weights.take("embed.weight", (s.vocab, s.width))
    if own_VD.is_meta or own_VD.shape != shared_VD.shape or not torch.equal(own_VD, shared_VD):
        return own_VD
    return shared_VD
