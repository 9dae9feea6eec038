"""A layer with its weights and residual connections."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specdec.kernels.table import Kernels
from specdec.models import spec
from specdec.models.mixers.base import LoadedMixer, MixerPlacement, Step
from specdec.models.norm import Norm
from specdec.models.shards import Shard
from specdec.models.weights import Weights

Part = Callable[[Tensor, Step], Tensor]


class LoadedHalfLayer:
    """Half a layer: parts that read the residual stream x and add to it."""

    def __init__(
        self,
        frame: spec.Frame,
        parts: Sequence[Part],
        norm: Norm,
        weights: Weights,
        kernels: Kernels,
        *,
        name: str,
        hidden: int,
        narrow: torch.dtype | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Load the norms by the half's name; inputs from a wider stream are rounded to `narrow`.

        The parts of a `shard` compute a summand of their outputs.
        """
        self.frame, self.eps, self.kernels, self.narrow = frame, norm.eps, kernels, narrow
        self.shard = shard
        self.side: Part | None = parts[0] if frame.side else None
        self.parts = parts[1:] if frame.side else parts
        count = len(self.parts)
        self.inputs, self.outputs = (
            factors * count if len(factors) == 1 else factors for factors in (frame.inputs, frame.outputs)
        )
        assert len(self.inputs) == len(self.outputs) == count, "each part has its multipliers"
        self.pre_D = norm.load(weights, f"{name}_norm.weight", hidden) if frame.pre else None
        self.post_D = norm.load(weights, f"{name}_post_norm.weight", hidden) if frame.post else None

    def __call__(self, x_TD: Tensor, added_TD: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """Return the stream and its pending addition, given the previous half's.

        May mutate x: the norm that reads the stream also adds the pending addition.
        """
        x_TD, read_TD = self._read(x_TD, added_TD, step)
        added_TD = self.run(read_TD, step)
        if self.frame.keeps_normed:
            x_TD = read_TD
        return scaled(x_TD, self.frame.keep, self.kernels), added_TD

    def run(self, read_TD: Tensor, step: Step) -> Tensor:
        """Run the parts in parallel on the half's input, and return their addition to the stream."""
        ops, mixed_TD = self.kernels, None
        for part, input_scale, output_scale in zip(self.parts, self.inputs, self.outputs, strict=True):
            own_TD = scaled(part(scaled(read_TD, input_scale, ops), step), output_scale, ops)
            mixed_TD = own_TD if mixed_TD is None else ops.add(mixed_TD, own_TD)
        assert mixed_TD is not None
        if self.shard is not None:
            mixed_TD = self.shard.sum(mixed_TD)
        return mixed_TD if self.post_D is None else ops.rms_norm(mixed_TD, self.post_D, self.eps)

    def _read(self, x_TD: Tensor, added_TD: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        ops = self.kernels
        if self.pre_D is not None and self.side is None and x_TD.dtype == (self.narrow or x_TD.dtype):
            return x_TD, ops.add_rms_norm(x_TD, added_TD, self.pre_D, self.eps)
        x_TD = joined(x_TD, added_TD, ops)
        read_TD = x_TD.to(self.narrow or x_TD.dtype)
        if self.side is not None:
            read_TD = ops.add(read_TD, self.side(read_TD, step))
        return x_TD, read_TD if self.pre_D is None else ops.rms_norm(read_TD, self.pre_D, self.eps)


class LoadedLayer:
    """One layer: its mixers, then its feed-forward."""

    def __init__(
        self,
        layer: spec.LayerSpec,
        hidden: int,
        norm: Norm,
        weights: Weights,
        kernels: Kernels,
        first: MixerPlacement,
        *,
        narrow: torch.dtype | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Load the weights; `first` is the first mixer's place, and others follow it."""
        args = (norm, weights, kernels)
        self.mixers = tuple(_build_mixers(layer, weights, kernels, first))
        self.mixing = self.feeding = None
        if self.mixers:
            frame = layer.frame if layer.reads is None else spec.Frame(pre=False)
            self.mixing = LoadedHalfLayer(
                frame, self.mixers, *args, name="mixer", hidden=hidden, narrow=narrow, shard=shard
            )
        self.ffn = ffn = layer.ffn.build(hidden, weights.within("ffn"), kernels) if layer.ffn else None
        if ffn:
            parts = (lambda read_TD, step: ffn(read_TD),)
            self.feeding = LoadedHalfLayer(
                layer.ffn_frame, parts, *args, name="ffn", hidden=hidden, narrow=narrow, shard=shard
            )

    @property
    def halves(self) -> tuple[LoadedHalfLayer, ...]:
        """Return the halves in order of execution."""
        return tuple(half for half in (self.mixing, self.feeding) if half)


def joined(x_TD: Tensor, added_TD: Tensor | None, kernels: Kernels) -> Tensor:
    """Return the stream plus its pending addition, in new memory if there is one."""
    if added_TD is None:
        return x_TD
    return kernels.add(x_TD, added_TD if added_TD.dtype == x_TD.dtype else added_TD.to(x_TD.dtype))


def scaled(x_TD: Tensor, by: float, kernels: Kernels) -> Tensor:
    """Multiply, rounded to the tensor's dtype; a factor of 1 returns the tensor itself."""
    return x_TD if by == 1 else kernels.scale(x_TD, by)


def _build_mixers(
    layer: spec.LayerSpec, weights: Weights, kernels: Kernels, placement: MixerPlacement
) -> Iterator[LoadedMixer]:
    for i, mixer in enumerate(layer.mixers):
        yield mixer.build(weights.within(f"mixer{i + 1}" if i else "mixer"), kernels, placement)
        placement = placement.after(mixer)
