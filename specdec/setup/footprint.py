"""A model's cost, computed before loading: parameters, and bytes that a step reads."""

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

from specdec.config.drafters import drafters_of_folders
from specdec.config.engine import EngineConfig
from specdec.config.folders import model_name
from specdec.kernels.native.instruction_sets import describe_kernels
from specdec.kernels.table import load_kernels, on_gpu
from specdec.models import spec
from specdec.models.block_head import CONTEXT
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import open_tensors, stored_scheme
from specdec.models.feed_forward import MoE
from specdec.models.files import GGUF_TYPES
from specdec.models.formats import FORMATS, WeightFormat
from specdec.models.heads import HeadSource, find_head, kind_of
from specdec.models.mixers.shared_block import SHARED
from specdec.models.network import MTPHead, Network
from specdec.models.packed.base import QuantisationScheme
from specdec.models.rounded import COPIED_IN
from specdec.models.shards import Shard, shard_network
from specdec.models.weights import Scoped, Weights
from specdec.setup.drafters import has_copy
from specdec.setup.resolve import copied_in, open_model
from specdec.setup.settings import Resolved

CAT = torch.ops.aten.cat.default
ARITHMETIC = 0.05
"""Fraction of a token's cost besides loading its experts, paid again for experts loaded by other tokens."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    count: int
    bytes: int
    experts: tuple[int, int] | None
    """(experts chosen per token, number of experts), for weights that only some tokens use."""
    uses: int = 1
    """Number of layers that use it."""

    def expected_bytes(self, tokens: int) -> float:
        """Return the bytes a step over `tokens` tokens reads if each picks its experts at random."""
        if self.experts is None:
            return float(self.bytes * self.uses)
        return self.bytes * _expected_share(*self.experts, tokens)


def token_work(network: spec.NetworkSpec) -> Callable[[int], float]:
    """Return a function from tokens to the extra work of a step, in units of one token.

    With experts, most of it is loading those used: many are new to the second token, few to the fiftieth.
    Without, it is the number of tokens.
    """
    layers = Counter(
        (layer.ffn.top_k, layer.ffn.experts) for layer in network.layers if isinstance(layer.ffn, MoE)
    )
    if not layers:
        return float
    one_token = sum(count * chosen / total for (chosen, total), count in layers.items())

    @functools.cache
    def work(tokens: int) -> float:
        used = sum(count * _expected_share(*experts, tokens) for experts, count in layers.items())
        return ARITHMETIC * tokens + (1 - ARITHMETIC) * used / one_token

    return work


def _expected_share(chosen: int, total: int, tokens: int) -> float:
    """Return the expected fraction of experts used by this many tokens that choose at random."""
    return 1.0 - (1 - chosen / total) ** tokens


class ShapeArithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes only shapes of sums, products and concatenations of meta tensors.

    Torch uses Python decompositions for this, and imports its compiler first, which takes a second.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` unwrapped, since the wrapper imports the compiler too."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return an empty result of simple operations, with the first tensor's dtype; run all others."""
        tensors = args[0] if op is CAT else [arg for arg in args if isinstance(arg, Tensor)]
        if tensors and all(tensor.is_meta for tensor in tensors):
            first = tensors[0]
            if op is CAT and len(args) == 1:
                return first.new_empty((sum(map(len, tensors)), *first.shape[1:]))
            if torch.Tag.pointwise in op.tags:
                return first.new_empty(torch.broadcast_tensors(*tensors)[0].shape)  # type: ignore[no-untyped-call]
        return op(*args, **(kwargs or {}))


class ShapeWeights:
    """Weights with shapes but no memory, which records all parameters."""

    def __init__(
        self,
        network: spec.NetworkSpec,
        dtype: torch.dtype,
        *,
        quantize: WeightFormat | None,
        numbers: Callable[[str], QuantisationScheme | None] = lambda name: None,
    ) -> None:
        """Count large matrices in `quantize`, except those stored as integers per `numbers`."""
        self.network, self.dtype, self.quantize, self.numbers = network, dtype, quantize, numbers
        self.parameters: list[Parameter] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Record a parameter."""
        dtype = dtype or self.dtype
        return self._note(name, shape, dtype, prod(shape) * dtype.itemsize)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Record a large matrix, which may be quantised."""
        if form := self.numbers(name) or self.quantize:
            return self._note(name, shape, self.dtype, form.num_bytes(shape))
        return self.take(name, shape)

    def output(self, name: str, weight_ND: Tensor) -> Tensor:
        """Record how the output matrix is stored, if it differs from the way it was taken."""
        if form := self.numbers(name) or (self.quantize and self.quantize.output):
            count = sum(parameter.count for parameter in self.parameters if parameter.name == name)
            self.parameters = [parameter for parameter in self.parameters if parameter.name != name]
            self.parameters.append(Parameter(name, count, form.num_bytes(weight_ND.shape), None))
        return weight_ND

    def _note(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int) -> Tensor:
        self.parameters.append(Parameter(name, prod(shape), num_bytes, self._experts(name), self._uses(name)))
        return torch.empty(shape, dtype=dtype, device="meta")

    def has(self, name: str) -> bool:
        """Return True: every tensor exists."""
        return True

    def within(self, prefix: str) -> Weights:
        """Return weights that record parameters below a prefix."""
        return Scoped(self, prefix)

    def _experts(self, name: str) -> tuple[int, int] | None:
        if ".experts." not in name:
            return None
        layers = self.network.mtp if name.startswith("mtp.") else self.network.layers
        ffn = layers[int(name.removeprefix("mtp.").split(".")[1])].ffn
        assert isinstance(ffn, MoE)
        return ffn.top_k, ffn.experts

    def _uses(self, name: str) -> int:
        """Return the number of layers that use a weight; a shared one has its first layer's name."""
        match = re.match(rf"layers\.(\d+)\.mixer\.{SHARED}\.", name)
        return 1 + (sum(layer.shares == int(match[1]) for layer in self.network.layers) if match else 0)


class CopyShapes(ShapeWeights):
    """Records the parameters of a quantised copy that it does not share.

    They are stored in `quantize`, or in `dtype` where kernels widen them.
    """

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Record nothing: it is shared."""
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Record a large matrix."""
        return self._note_in(self.quantize, name, shape)

    def output(self, name: str, weight_ND: Tensor) -> Tensor:
        """Record the output matrix."""
        return self._note_in(self.quantize and self.quantize.output, name, tuple(weight_ND.shape))

    def _note_in(self, form: WeightFormat | None, name: str, shape: tuple[int, ...]) -> Tensor:
        num_bytes = form.num_bytes(shape) if form else prod(shape) * self.dtype.itemsize
        return self._note(name, shape, self.dtype, num_bytes)


@dataclass(frozen=True, slots=True)
class Footprint:
    """A network's weights; a draft head or copy is counted separately."""

    network: spec.NetworkSpec
    target: tuple[Parameter, ...]
    mtp: tuple[Parameter, ...]
    eagle: tuple[Parameter, ...] = ()
    copy: tuple[Parameter, ...] = ()
    """Parameters of a copy that drafts, without shared ones."""

    @property
    def parameters(self) -> int:
        return sum(p.count for p in self.target)

    @property
    def mtp_parameters(self) -> int:
        return sum(p.count for p in self.mtp)

    @property
    def eagle_parameters(self) -> int:
        return sum(p.count for p in self.eagle if not p.name.startswith(CONTEXT))

    @property
    def weight_bytes(self) -> int:
        return sum(p.bytes for p in self.target)

    @property
    def copy_bytes(self) -> int:
        return sum(p.bytes for p in self.copy)

    def step_bytes(self, tokens: int) -> float:
        """Return the weight bytes that a step over `tokens` tokens must read.

        An untied embedding is read by row, which is negligible.
        """
        return sum(p.expected_bytes(tokens) for p in self.target if p.name != self.table)

    @property
    def table(self) -> str | None:
        """Name of the embedding if it is not also the output matrix."""
        return "embed.weight" if any(p.name == "head.weight" for p in self.target) else None

    def kinds(self) -> dict[str, int]:
        """Return the number of the target's mixers and feed-forwards by kind."""
        return dict(Counter(part.kind for layer in self.network.layers for part in layer.parts))


def measure(
    network: spec.NetworkSpec,
    dtype: torch.dtype,
    *,
    quantize: WeightFormat | None = None,
    head: HeadSource | None = None,
    copied: bool = False,
    copied_in: WeightFormat | None = FORMATS[COPIED_IN],
    numbers: Callable[[str], QuantisationScheme | None] = lambda name: None,
    shard: Shard | None = None,
) -> Footprint:
    """Return a network's footprint without allocating it; large matrices are counted in `quantize`.

    With a `shard` it is that of one rank, with the whole draft head, which only rank 0 has.
    Matrices stored as integers are counted per `numbers`. With `copied` a quantised copy is counted too, in
    the format `copied_in`, or widened if that is None.
    """
    weights = ShapeWeights(network, dtype, quantize=quantize, numbers=numbers)
    head_weights = ShapeWeights(network, dtype, quantize=quantize)
    copy = CopyShapes(network, dtype, quantize=copied_in)
    kernels, device = load_kernels("reference"), torch.device("cpu")
    with ShapeArithmetic():  # type: ignore[no-untyped-call]
        local = shard_network(network, shard.ranks)[0] if shard else network
        target = Network(local, weights, kernels, max_length=1, device=device, shard=shard)
        split = len(weights.parameters)
        if network.mtp:
            MTPHead(target, weights)
        if head and head.checkpoint:
            head.fill(target, head_weights, max_length=1)
        if copied:
            Network(network, copy, kernels, max_length=1, device=device)
    parameters, parts = weights.parameters, (head_weights.parameters, copy.parameters)
    return Footprint(network, tuple(parameters[:split]), tuple(parameters[split:]), *map(tuple, parts))


def measure_stored(
    checkpoint: Checkpoint, network: spec.NetworkSpec, settings: Resolved, head: HeadSource | None = None
) -> Footprint:
    """Return the footprint of a checkpoint's network as an engine with these settings stores it."""
    scheme_of = stored_scheme(checkpoint, network)

    def usable(name: str) -> QuantisationScheme | None:
        scheme = scheme_of(name) if settings.weights else None
        return None if scheme and on_gpu(settings.kernels) and not scheme.fits_tiles else scheme

    return measure(
        *(network, settings.dtype),
        shard=Shard(0, settings.config.tp) if settings.config.tp > 1 else None,
        quantize=settings.weight_format,
        head=head,
        copied=has_copy(settings.drafters),
        copied_in=copied_in(settings.kernels),
        numbers=usable,
    )


def describe_model(folder: str | Path, config: EngineConfig, lengths: Sequence[int]) -> dict[str, Any]:
    """Describe a checkpoint and the resources an engine with this configuration would need.

    `sequences` counts how many of each length fit in the arena, for supported lengths, or else for the
    longest. `record_share` is the size of a draft token's record relative to a state; it is only present with
    drafters that use records.
    """
    opened = open_model(folder, config)
    network, settings = opened.network, opened.settings
    stored = open_tensors(opened.checkpoint).sizes()
    whole_bytes = stored.packed.bytes_by_bits if stored.packed else {4: 0, 6: 0, 8: 0}
    footprint = measure_stored(opened.checkpoint, network, settings, opened.head)
    tp, counts = settings.config.tp, footprint
    if tp > 1:
        counts = measure(network, settings.dtype)
    layout, figures = settings.layout, settings.layout.describe()
    lengths = [length for length in lengths if length <= settings.max_model_len] or [settings.max_model_len]
    places = (find_head(opened.checkpoint.folder, name, config.draft_model) for name in drafters_of_folders())
    heads = [f"{kind_of(place)} ({model_name(place)})" for place in dict.fromkeys(places) if place]
    heads = [*(["mtp"] if network.mtp else []), *heads]
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
        "parameters": counts.parameters,
        **({"tp": tp, "rank_parameters": footprint.parameters} if tp > 1 else {}),
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
