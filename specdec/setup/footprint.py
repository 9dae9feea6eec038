"""What a model costs, told before anything is loaded: its parameters and the bytes that a step reads."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.config.engine import EngineConfig
from specdec.config.folders import model_name
from specdec.kernels.native.forms import describe_kernels
from specdec.kernels.table import load_kernels, on_gpu
from specdec.models import spec
from specdec.models.checkpoint import Checkpoint
from specdec.models.eagle import find_head
from specdec.models.families import open_tensors, stored_numbers
from specdec.models.feed_forward import MoE
from specdec.models.files import GGUF_TYPES
from specdec.models.formats import FORMATS, WeightFormat
from specdec.models.heads import HeadSource
from specdec.models.mixers.shared_block import SHARED
from specdec.models.network import MTPHead, Network
from specdec.models.packed.base import Numbers
from specdec.models.rounded import COPIED_IN
from specdec.models.weights import Scoped, Weights
from specdec.setup.drafters import has_copy
from specdec.setup.resolve import copied_in, open_model
from specdec.setup.settings import Resolved

CAT = torch.ops.aten.cat.default
ARITHMETIC = 0.05
"""What a token takes beside reading its experts, of both: it is paid again for experts that others met."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    count: int
    bytes: int
    experts: tuple[int, int] | None
    """(experts chosen per token, experts there are), for the weights that only some tokens read."""
    uses: int = 1
    """Layers that read it."""

    def expected_bytes(self, tokens: int) -> float:
        """Count the bytes that a step over `tokens` tokens reads if each picks its experts at random."""
        if self.experts is None:
            return float(self.bytes * self.uses)
        return self.bytes * _share_met(*self.experts, tokens)


def token_work(network: spec.Network) -> Callable[[int], float]:
    """Return a function: what a step over some tokens adds to one over none, in the work of one token.

    With experts most of that is to read those that are met: many are new to the second token, few to the
    fiftieth. Without any, it is the number of tokens.
    """
    layers = Counter((own.ffn.top_k, own.ffn.experts) for own in network.layers if isinstance(own.ffn, MoE))
    if not layers:
        return float
    first = sum(count * chosen / total for (chosen, total), count in layers.items())

    @functools.cache
    def work(tokens: int) -> float:
        met = sum(count * _share_met(*experts, tokens) for experts, count in layers.items())
        return ARITHMETIC * tokens + (1 - ARITHMETIC) * met / first

    return work


def _share_met(chosen: int, total: int, tokens: int) -> float:
    """Return which part of the experts this many tokens are expected to use that choose at random."""
    return 1.0 - (1 - chosen / total) ** tokens


class ShapeArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute only the shapes of sums, products and concatenations of tensors on the meta device.

    Torch does it in Python decompositions, for which it first imports its compiler: a second.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` unwrapped: the wrapper imports the compiler too."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute a shape where the rule is simple, with the first tensor's dtype; else run the operation."""
        tensors = args[0] if op is CAT else [arg for arg in args if isinstance(arg, Tensor)]
        if tensors and all(own.is_meta for own in tensors):
            first = tensors[0]
            if op is CAT and len(args) == 1:
                return first.new_empty((sum(map(len, tensors)), *first.shape[1:]))
            if torch.Tag.pointwise in op.tags:
                return first.new_empty(torch.broadcast_tensors(*tensors)[0].shape)  # type: ignore[no-untyped-call]
        return op(*args, **(kwargs or {}))


class ShapeWeights:
    """Answer a network with tensors that have a shape and no memory, and keep the list."""

    def __init__(
        self,
        network: spec.Network,
        dtype: torch.dtype,
        *,
        quantize: WeightFormat | None,
        numbers: Callable[[str], Numbers | None] = lambda name: None,
    ) -> None:
        """Count large matrices in `quantize`, but those stored in integers as `numbers` says."""
        self.network, self.dtype, self.quantize, self.numbers = network, dtype, quantize, numbers
        self.parameters: list[Parameter] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Note one parameter."""
        dtype = dtype or self.dtype
        return self._note(name, shape, dtype, prod(shape) * dtype.itemsize)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Note one large matrix, which may be quantised."""
        if form := self.numbers(name) or self.quantize:
            return self._note(name, shape, self.dtype, form.num_bytes(shape))
        return self.take(name, shape)

    def output(self, name: str, weight_ND: Tensor) -> Tensor:
        """Note how the matrix that makes logits is held, where that is not how it was taken."""
        if form := self.numbers(name) or (self.quantize and self.quantize.output):
            count = sum(own.count for own in self.parameters if own.name == name)
            self.parameters = [own for own in self.parameters if own.name != name]
            self.parameters.append(Parameter(name, count, form.num_bytes(weight_ND.shape), None))
        return weight_ND

    def _note(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int) -> Tensor:
        self.parameters.append(Parameter(name, prod(shape), num_bytes, self._experts(name), self._uses(name)))
        return torch.empty(shape, dtype=dtype, device="meta")

    def has(self, name: str) -> bool:
        """Any tensor can be had."""
        return True

    def within(self, prefix: str) -> Weights:
        """Note the parameters below a prefix."""
        return Scoped(self, prefix)

    def _experts(self, name: str) -> tuple[int, int] | None:
        if ".experts." not in name:
            return None
        layers = self.network.mtp if name.startswith("mtp.") else self.network.layers
        ffn = layers[int(name.removeprefix("mtp.").split(".")[1])].ffn
        assert isinstance(ffn, MoE)
        return ffn.top_k, ffn.experts

    def _uses(self, name: str) -> int:
        """Count the layers that read a weight: one that is lent goes by the name of its lender."""
        lent = re.match(rf"layers\.(\d+)\.mixer\.{SHARED}\.", name)
        return 1 + (sum(own.shares == int(lent[1]) for own in self.network.layers) if lent else 0)


class CopyShapes(ShapeWeights):
    """Keep the list of what a rounded copy holds of its own; it shares what is not rounded.

    That is in `quantize`, or in `dtype` where kernels widen it.
    """

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Note nothing."""
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Note one large matrix."""
        return self._note_in(self.quantize, name, shape)

    def output(self, name: str, weight_ND: Tensor) -> Tensor:
        """Note the matrix that makes logits."""
        return self._note_in(self.quantize and self.quantize.output, name, tuple(weight_ND.shape))

    def _note_in(self, form: WeightFormat | None, name: str, shape: tuple[int, ...]) -> Tensor:
        num_bytes = form.num_bytes(shape) if form else prod(shape) * self.dtype.itemsize
        return self._note(name, shape, self.dtype, num_bytes)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sum up a network's weights; what drafts beside it, a head or a copy, is counted apart."""

    network: spec.Network
    target: tuple[Parameter, ...]
    mtp: tuple[Parameter, ...]
    eagle: tuple[Parameter, ...] = ()
    copy: tuple[Parameter, ...] = ()
    """What a copy that drafts holds beside what it shares."""

    @property
    def parameters(self) -> int:
        return sum(p.count for p in self.target)

    @property
    def mtp_parameters(self) -> int:
        return sum(p.count for p in self.mtp)

    @property
    def eagle_parameters(self) -> int:
        return sum(p.count for p in self.eagle)

    @property
    def weight_bytes(self) -> int:
        return sum(p.bytes for p in self.target)

    @property
    def copy_bytes(self) -> int:
        return sum(p.bytes for p in self.copy)

    def step_bytes(self, tokens: int) -> float:
        """Count the bytes of weights that one step over `tokens` tokens must read.

        An embedding beside an output matrix is read by row, which is nothing beside the rest.
        """
        return sum(p.expected_bytes(tokens) for p in self.target if p.name != self.table)

    @property
    def table(self) -> str | None:
        """Name the embedding where it does not make logits too."""
        return "embed.weight" if any(p.name == "head.weight" for p in self.target) else None

    def kinds(self) -> dict[str, int]:
        """Count the target's mixers and feed-forwards by kind."""
        return dict(Counter(part.kind for layer in self.network.layers for part in layer.parts))


def measure(
    network: spec.Network,
    dtype: torch.dtype,
    *,
    quantize: WeightFormat | None = None,
    head: HeadSource | None = None,
    copied: bool = False,
    copied_in: WeightFormat | None = FORMATS[COPIED_IN],
    numbers: Callable[[str], Numbers | None] = lambda name: None,
) -> Footprint:
    """List every parameter of a network without holding any; large matrices are counted in `quantize`.

    Those that a checkpoint stores in integers are counted as `numbers` says. With `copied` a rounded
    copy is counted too, as it is kept: `copied_in` a format, or (None) widened.
    """
    weights = ShapeWeights(network, dtype, quantize=quantize, numbers=numbers)
    own = ShapeWeights(network, dtype, quantize=quantize)
    copy = CopyShapes(network, dtype, quantize=copied_in)
    kernels, device = load_kernels("reference"), torch.device("cpu")
    with ShapeArithmetic():  # type: ignore[no-untyped-call]
        target = Network(network, weights, kernels, max_length=1, device=device)
        split = len(weights.parameters)
        if network.mtp:
            MTPHead(target, weights)
        if head and head.checkpoint:
            head.fill(target, own, max_length=1)
        if copied:
            Network(network, copy, kernels, max_length=1, device=device)
    found, parts = weights.parameters, (own.parameters, copy.parameters)
    return Footprint(network, tuple(found[:split]), tuple(found[split:]), *map(tuple, parts))


def measure_stored(
    checkpoint: Checkpoint, network: spec.Network, settings: Resolved, head: HeadSource | None = None
) -> Footprint:
    """List every parameter of a checkpoint's network as an engine with these settings keeps it."""
    found = stored_numbers(checkpoint, network)

    def whole(name: str) -> Numbers | None:
        own = found(name) if settings.weights else None
        return None if own and on_gpu(settings.kernels) and not own.fits_tiles else own

    return measure(
        *(network, settings.dtype),
        quantize=settings.weight_format,
        head=head,
        copied=has_copy(settings.drafters),
        copied_in=copied_in(settings.kernels),
        numbers=whole,
    )


def describe_model(folder: str | Path, config: EngineConfig, lengths: Sequence[int]) -> dict[str, Any]:
    """Describe a checkpoint and what an engine with this configuration would need for it.

    `sequences` counts how many of each length fit in the arena, of those that the engine would take, or of
    its longest. `record_share` is a draft token's record over a state, of which a window alone
    has none; drafters in records have it.
    """
    opened = open_model(folder, config)
    network, settings = opened.network, opened.settings
    stored = open_tensors(opened.checkpoint).sizes()
    whole_bytes = stored.packed.bytes_by_bits if stored.packed else {4: 0, 6: 0, 8: 0}
    footprint = measure_stored(opened.checkpoint, network, settings, opened.head)
    layout, figures = settings.layout, settings.layout.describe()
    lengths = [length for length in lengths if length <= settings.max_model_len] or [settings.max_model_len]
    eagle = find_head(opened.checkpoint.folder, "eagle", config.draft_model)
    heads = [*(["mtp"] if network.mtp else []), *([f"eagle ({model_name(eagle)})"] if eagle else [])]
    draft: dict[str, Any] = {"draft": ", ".join(settings.drafters) or "none"}
    if footprint.copy:
        draft["copy_bytes"] = footprint.copy_bytes
    if settings.drafters:
        draft["draft_slot"] = settings.config.slots
        if settings.config.slots == "record":
            draft |= {"record_bytes": figures.record_bytes, "record_share": figures.record_share}
    return {
        "family": network.family,
        "layers": footprint.kinds(),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "kernels": describe_kernels(settings.kernels),
        "parameters": footprint.parameters,
        "mtp_parameters": footprint.mtp_parameters,
        "eagle_parameters": footprint.eagle_parameters,
        "heads": ", ".join(heads) or "none",
        **({"stored_types": types} if (types := opened.checkpoint.config.get(GGUF_TYPES)) else {}),
        "stored_bytes": stored.stored,
        "stored_8bit_bytes": stored.float8 + whole_bytes[8],
        "stored_6bit_bytes": whole_bytes[6],
        "stored_4bit_bytes": whole_bytes[4],
        "weight_bytes": footprint.weight_bytes,
        "read_bytes_per_token": round(footprint.step_bytes(1)),
        "kv_dtype": str(layout.page_dtype).removeprefix("torch."),
        "kv_bytes_per_token": figures.token_bytes,
        "state_bytes": figures.state_bytes,
        **draft,
        "max_model_len": settings.max_model_len,
        "max_running": settings.config.max_running,
        "slab_bytes": figures.slab_bytes,
        "slab_padding": figures.padding,
        "arena_bytes": settings.memory_bytes,
        "sequences": {
            f"{length} tokens": layout.sequences_in(settings.memory_bytes, length) for length in lengths
        },
    }
