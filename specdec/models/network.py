"""A network as a list of layers, run over one packed window."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.kernels.group import RecordIds
from specdec.kernels.table import Kernels
from specdec.models import spec
from specdec.models.frame import LoadedLayer, joined, scaled
from specdec.models.linear import Linear, Projection
from specdec.models.mixers.base import ArenaViews, MixerPlacement, Step
from specdec.models.replay import Replays
from specdec.models.rope import Rotations, rope_tables
from specdec.models.shards import Shard
from specdec.models.shortlist import Shortlist
from specdec.models.weights import Weights
from specdec.state_slots.layout import Layout
from specdec.state_slots.window import Window

LOGITS = 256
"""Nodes with logits in memory at once: with a large vocabulary, sampling takes several times their memory."""


def memory_layout(
    network: spec.NetworkSpec,
    dtype: torch.dtype,
    *,
    head: Sequence[spec.LayerSpec] = (),
    state_dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> Layout:
    """Return the arena's layout per token and sequence of this network and its head's layers."""
    mixers = [mixer for layer in (*network.layers, *head) for mixer in layer.mixers]
    kv = tuple(kv_shape for mixer in mixers if (kv_shape := mixer.kv_shape()))
    states = tuple(shape for mixer in mixers if (shape := mixer.state_shape()))
    assert len({state.conv_inputs for state in states}) <= 1, "a window's conv indices serve all layers"
    return Layout(kv, states, dtype, state_dtype, kv_dtype=kv_dtype)


def run_blocks(
    blocks: Sequence[LoadedLayer],
    x_TD: Tensor,
    step: Step,
    norm_D: Tensor,
    eps: float,
    *,
    aux_hidden_layers: Collection[int] = (),
    narrow: torch.dtype | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run the layers on the residual stream x, which is overwritten, and normalise the result.

    Also return copies of the stream as it enters the layers in `aux_hidden_layers`; the number of layers
    means the end. Outputs of a wider stream are rounded to `narrow`.
    """
    ops, added_TD, dtype = step.kernels, None, narrow or x_TD.dtype
    aux: dict[int, Tensor] = {}
    for i, block in enumerate(blocks):
        if i in aux_hidden_layers:
            input_TD = ops.concat(x_TD) if added_TD is None else joined(x_TD, added_TD, ops)
            aux[i] = input_TD.to(dtype)
        for half in block.halves:
            x_TD, added_TD = half(x_TD, added_TD, step)
    if x_TD.dtype == dtype:
        out_TD = ops.add_rms_norm(x_TD, added_TD, norm_D, eps)
    else:
        x_TD = joined(x_TD, added_TD, ops)
        out_TD = ops.rms_norm(x_TD, norm_D, eps).to(dtype)
    if len(blocks) in aux_hidden_layers:
        aux[len(blocks)] = x_TD.to(dtype)
    return out_TD, aux


def build_blocks(
    layers: Sequence[spec.LayerSpec],
    network: spec.NetworkSpec,
    weights: Weights,
    kernels: Kernels,
    *,
    target_layers: Sequence[spec.LayerSpec] = (),
    narrow: torch.dtype | None = None,
    shard: Shard | None = None,
) -> list[LoadedLayer]:
    """Build the layers in order; their indices in the arena's views follow those of `target_layers`."""
    blocks: list[LoadedLayer] = []
    placement = first_place(target_layers, network.hidden)
    for i, layer in enumerate(layers):
        taken = weights.within(f"layers.{i}")
        lender = None if layer.shares is None else blocks[layer.shares].mixers[0]
        first = replace(placement, lender=lender)
        blocks.append(
            LoadedLayer(
                *(layer, network.hidden, network.norm, taken, kernels, first), narrow=narrow, shard=shard
            )
        )
        placement = placement.after(*layer.mixers)
    return blocks


def first_place(layers: Sequence[spec.LayerSpec], writes: int, *, reads: int | None = None) -> MixerPlacement:
    """Return the place of a mixer that follows the layers of another network."""
    return MixerPlacement(reads or writes, writes).after(
        *(mixer for layer in layers for mixer in layer.mixers)
    )


def begin_step(window: Window, memory: ArenaViews, tables: Rotations, kernels: Kernels) -> Step:
    """Return a step with the rotations of the window's positions."""
    at_T = window.position_T
    rope = {
        key: (kernels.embedding(cos_LR, at_T), kernels.embedding(sin_LR, at_T))
        for key, (cos_LR, sin_LR) in tables.items()
    }
    return Step(window, memory, rope, kernels)


class Network:
    """The target: embeds a window's tokens, runs every layer, normalises, and projects to the vocabulary."""

    def __init__(
        self,
        s: spec.NetworkSpec,
        weights: Weights,
        kernels: Kernels,
        *,
        max_length: int,
        device: torch.device,
        shortlist_C: Tensor | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Build the network, or a `shard` of it, whose layers `s` describes.

        `shortlist_C` are the tokens that may be drafted, None: all.
        """
        self.spec, self.kernels = s, kernels
        self.embed_VD = weights.take("embed.weight", (s.vocab, s.hidden))
        self.narrow = self.embed_VD.dtype if s.wide_residual else None
        self.blocks = build_blocks(s.layers, s, weights, kernels, narrow=self.narrow, shard=shard)
        self.norm_D = s.norm.load(weights, "norm.weight", s.hidden)
        if s.wide_residual:
            self.norm_D = _at_least_float32(self.norm_D)
        ids = range(s.vocab) if shard is None else shard.part(s.vocab)
        head_VD = (
            self.embed_VD[ids.start : ids.stop]
            if s.tied
            else weights.take("head.weight", (len(ids), s.hidden))
        )
        head = Linear(kernels, weights.output("head.weight", head_VD))
        self.head: Projection = head if shard is None else shard.joined(head, s.vocab)
        self.shortlist: Shortlist | None = None
        if shortlist_C is not None:
            shortlist_C = shortlist_C.to(device)
            ranked_CD = weights.output("shortlist.weight", head_VD[shortlist_C])
            self.shortlist = Shortlist(ranked_CD, shortlist_C, s.vocab, kernels)
        ropes = (rope for mixer in s.mixers() for rope in mixer.ropes())
        self.rope = rope_tables(ropes, max_length, kernels, device)
        self._replays = Replays(self._run, kernels, alone=shard is None)

    def begin(self, window: Window, memory: ArenaViews) -> Step:
        """Return the state shared by all layers of this pass."""
        return begin_step(window, memory, self.rope, self.kernels)

    def forward(self, window: Window, memory: ArenaViews) -> Tensor:
        """Return the hidden states after the final norm; updates KV, states and records in `memory`."""
        return self.forward_with_aux(window, memory, ())[0]

    def forward_with_aux(
        self, window: Window, memory: ArenaViews, aux_hidden_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Do `forward`; also return the residual streams that enter the given layers."""
        hidden_TD, *aux = self._replays(window, memory, aux_hidden_layers=tuple(aux_hidden_layers))
        return hidden_TD, aux

    def _run(
        self, window: Window, memory: ArenaViews, *, aux_hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        ops = self.kernels
        x_TD = scaled(ops.embedding(self.embed_VD, window.token_T), self.spec.embed_scale, ops)
        step = self.begin(window, memory)
        if any(layer.frame.side for layer in self.spec.layers):
            step = replace(step, embed_TD=ops.concat(x_TD))  # a copy, because the stream is overwritten
        x_TD = x_TD if self.narrow is None else _at_least_float32(x_TD)
        hidden_TD, aux = run_blocks(
            *(self.blocks, x_TD, step, self.norm_D, self.spec.norm.eps),
            aux_hidden_layers=aux_hidden_layers,
            narrow=self.narrow,
        )
        return hidden_TD, *(aux[layer] for layer in aux_hidden_layers)

    def materialize(self, memory: ArenaViews, slot_B: Tensor, path: RecordIds, length_B: Tensor) -> None:
        """Fold the rows' paths into the recurrent states, in place, as the next window would.

        A shorter length gives the state at an earlier position of the path. The records are not needed
        afterwards.
        """
        for block in self.blocks:
            for mixer in block.mixers:
                mixer.fold(memory, slot_B, path, length_B)

    def move(self, memory: ArenaViews, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
        """Move keys and values to other positions of their rows in every attention layer of the target.

        After tree verification the accepted path's must directly follow the committed tokens.
        """
        for block in self.blocks:
            for mixer in block.mixers:
                mixer.move(memory, table_BN, from_BP, to_BP)

    def project(self, hidden_TD: Tensor) -> Tensor:
        """Project hidden states (after the final norm) to the vocabulary's logits, in the model's dtype."""
        return scaled(self.head(hidden_TD), self.spec.logit_scale, self.kernels)

    def project_drafts(self, hidden_TD: Tensor) -> Tensor:
        """Project a head's hidden states; tokens outside the shortlist get minus infinity."""
        if self.shortlist is None:
            return self.project(hidden_TD)
        return scaled(self.shortlist(hidden_TD), self.spec.logit_scale, self.kernels)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return float logits."""
        logits_TV = self.project(hidden_TD)
        return logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class MTPHead:
    """Predicts the token after next from a hidden state and the token chosen there.

    Its attention layers have their own KV, after the target's in the arena.
    """

    aux_hidden_layers: tuple[int, ...] = ()
    block: int | None = None

    def __init__(self, target: Network, weights: Weights) -> None:
        s, kernels = target.spec, target.kernels
        self.target, self.eps, self.width = target, s.norm.eps, s.hidden
        weights = weights.within("mtp")
        self.embed_norm_D = s.norm.load(weights, "embed_norm.weight", s.hidden)
        self.hidden_norm_D = s.norm.load(weights, "hidden_norm.weight", s.hidden)
        self.fc = Linear.load(weights, kernels, {"fc": s.hidden}, 2 * s.hidden, exact=("fc",))
        self.blocks = build_blocks(s.mtp, s, weights, kernels, target_layers=s.layers)
        self.norm_D = s.norm.load(weights, "norm.weight", s.hidden)
        self._replays = Replays(self._run, kernels)

    def combine_hidden_states(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        """Return the target's last hidden states unchanged."""
        return hidden_TD

    def forward(self, window: Window, hidden_TD: Tensor, memory: ArenaViews) -> Tensor:
        """Return h' for each token of the window, given the hidden state of the previous position.

        The first input is the target's hidden state after its final norm; recursion feeds back h'.
        """
        return self._replays(window, memory, hidden_TD)[0]

    def _run(self, window: Window, memory: ArenaViews, hidden_TD: Tensor) -> tuple[Tensor, ...]:
        step, ops = self.target.begin(window, memory), self.target.kernels
        embed_TD = ops.embedding(self.target.embed_VD, window.token_T)
        embed_TD = ops.rms_norm(embed_TD, self.embed_norm_D, self.eps)
        hidden_TD = ops.rms_norm(hidden_TD, self.hidden_norm_D, self.eps)
        x_TD = self.fc(ops.concat(embed_TD, hidden_TD))
        return (run_blocks(self.blocks, x_TD, step, self.norm_D, self.eps)[0],)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Project the head's hidden states as the target's, in the model's dtype."""
        return self.target.project_drafts(hidden_TD)
