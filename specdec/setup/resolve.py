"""Resolve every "auto" of an EngineConfig for one model and machine, once."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from specdec.config.drafters import only_chains
from specdec.config.engine import HEAD_FIELDS, MAX_WINDOW, PREFIX_FIELDS, EngineConfig
from specdec.draft.proposal import DraftShape
from specdec.errors import ConfigError
from specdec.kernels.attention.quantise import FP8
from specdec.kernels.native.compiled import compiled
from specdec.kernels.native.signatures import SUFFIX
from specdec.kernels.table import on_gpu
from specdec.models import spec
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import open_tensors, read_network, stored_dtype, unread_fields
from specdec.models.formats import FORMATS, WHOLE, WeightFormat
from specdec.models.headers import check_headers
from specdec.models.heads import HeadSource
from specdec.models.network import memory_layout
from specdec.models.rounded import COPIED_IN
from specdec.models.shards import shard_network
from specdec.models.shortlist import commonest
from specdec.models.tensors import PackedSizes
from specdec.setup.capabilities import resolve_drafters
from specdec.setup.devices import pick_device
from specdec.setup.drafters import (
    DRAFTERS,
    SELF_IS_PACKED,
    SELF_IS_TARGET,
    SELF_ON_GPU,
    find_heads,
    has_copy,
    has_head,
    head_of,
    quoted_heads,
)
from specdec.setup.memory import arena_bytes, copy_bytes, longest_that_fits, weight_bytes
from specdec.setup.settings import Resolved
from specdec.state_slots.layout import Layout
from specdec.verify.synthetic import rates_for

logger = logging.getLogger(__name__)

CACHED_WEIGHTS = 64 << 20
"""Smaller bfloat16 weights stay in the CPU cache, and are faster in float32 with torch's kernels."""
DEFAULT_STEPS, DEFAULT_TOPK, DEFAULT_TOKENS = 5, 4, 8
"""Default largest draft: as deep as single-layer heads are run in other engines."""
BLOCK_STEPS = 15
"""Default maximum depth of a head that drafts a block: deeper tokens take no further pass."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's folder with its description and draft head, before loading."""

    checkpoint: Checkpoint
    network: spec.NetworkSpec
    head: HeadSource | None
    settings: Resolved
    shortlist_C: Tensor | None
    """Tokens that a head may draft; None: all."""


def open_model(folder: str | Path, config: EngineConfig) -> OpenedModel:
    """Read a folder's description and draft head, and resolve settings; loads no weights."""
    checkpoint = Checkpoint(folder)
    network = read_network(checkpoint)
    if unknown := unread_fields(checkpoint.config):
        logger.warning(
            "config.json: unknown fields, ignored: %s; the model may need them", ", ".join(unknown)
        )
    heads = find_heads(checkpoint.folder, network, config)
    drafters = resolve_drafters(config.draft, heads)
    head = head_of(drafters, heads)
    check_headers(checkpoint, network, head)
    checkpoints = [checkpoint, *([head.checkpoint] if head and head.checkpoint else [])]
    sizes = [open_tensors(item).sizes() for item in checkpoints]
    settings = resolve(
        config,
        network,
        stored_dtype(checkpoint.config),
        sum(item.stored for item in sizes),
        sum(item.float8 for item in sizes),
        packed=sizes[0].packed,
        heads=heads,
    )
    count = settings.config.draft_vocab
    shortlist_C = commonest(checkpoint.folder, count, network.vocab) if count else None
    return OpenedModel(checkpoint, network, head, settings, shortlist_C)


def resolve(
    config: EngineConfig,
    network: spec.NetworkSpec,
    stored: torch.dtype,
    stored_bytes: int,
    narrow_bytes: int = 0,
    *,
    packed: PackedSizes | None = None,
    heads: Mapping[str, HeadSource] | None = None,
) -> Resolved:
    """Resolve a configuration, given the checkpoint's dtype and size.

    `narrow_bytes` are those of 8-bit floats, `packed` describes matrices stored as integers. `heads` are the
    available heads by drafter name; None: those of a network with random weights.
    """
    heads = find_heads(None, network, config) if heads is None else heads
    _refuse_unbuilt(config)
    device = pick_device(config.device)
    dtype = _dtype(config, device, stored, stored_bytes)
    kernels = _kernels(config.kernels, device, dtype)
    if config.draft in DRAFTERS and has_copy([config.draft]):
        _refuse_copy(config, kernels, packed)
    weights = _weights(
        config.quantize, kernels, stored_narrow=narrow_bytes > 0, packed=packed.format if packed else None
    )
    synthetic = config.synthetic_acceptance is not None
    graphs = device.type == "cuda" if config.graphs is None else config.graphs
    local = network
    if config.tp > 1:
        refuse_unshared(config, device, stored=bool(narrow_bytes or packed))
        local, _ = shard_network(network, config.tp)
    # On a GPU, the host does not wait between steps.
    looks = not graphs or device.type == "cpu"
    drafters = resolve_drafters(config.draft, heads, synthetic=synthetic, graphs=graphs, looks=looks)
    if config.graphs is None and kernels == "native" and config.tp == 1:
        graphs = not any(DRAFTERS[name].host_only for name in drafters)
    head = head_of(drafters, heads)
    _refuse_without_head(config, drafters)
    if drafters:
        _refuse_backing(config.slots, network)
    layout = _layout(config, local, head, dtype, kernels)
    bounds = bounds_of(config, deepest=head.deepest if head else None)
    longest = _longest(config, network)
    sizes = network, dtype, stored, stored_bytes, narrow_bytes
    total_bytes = weight_bytes(
        *sizes,
        quantize=config.quantize,
        kept=FORMATS.get(weights) if weights else None,
        packed=packed,
        packed_bytes=_packed_bytes(packed, kernels, dtype) if packed else 0,
    )
    if has_copy(drafters):
        rounded = copied_in(kernels)
        total_bytes += copy_bytes(*sizes, kept=rounded, packed=packed)
        if rounded is None:
            logger.warning("self-int4 copy: widened to %s, so it costs as much as the model", dtype)
    memory_bytes = arena_bytes(
        config,
        layout,
        bounds if drafters else None,
        longest,
        device=device,
        weights=total_bytes,
        copied=has_copy(drafters),
    )
    longest = longest_that_fits(config, layout, memory_bytes, longest)
    settings = Resolved(
        config=config,
        device=device,
        dtype=dtype,
        kernels=kernels,
        quantize=config.quantize,
        weights=weights,
        layout=layout,
        weight_bytes=total_bytes,
        memory_bytes=memory_bytes,
        max_model_len=longest,
        drafters=drafters,
        bounds=bounds,
        synthetic=_synthetic(config, bounds),
        graphs=graphs,
        prefix_alpha=_alpha(config),
    )
    logger.info("settings:%s", settings)
    return settings


def _layout(
    config: EngineConfig, network: spec.NetworkSpec, head: HeadSource | None, dtype: torch.dtype, kernels: str
) -> Layout:
    kv_dtype = FP8 if config.kv_dtype == "fp8" else None
    if kv_dtype and kernels == "native":
        logger.info("attention: the C kernels read FP8 keys from a copy that is widened in each step")
    return memory_layout(
        network,
        dtype,
        head=head.layers if head else (),
        state_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        kv_dtype=kv_dtype,
    )


def refuse_unshared(config: EngineConfig, device: torch.device, *, stored: bool) -> None:
    """Raise for settings that do not work with several ranks; `stored`: the checkpoint is quantised."""
    for field, refused, remedy in (
        ("device", device.type != "cpu", "use device='cpu'"),
        ("graphs", bool(config.graphs), "leave it out"),
        ("quantize", config.quantize is not None, "leave it out"),
        ("quantize", stored, "use the unquantised checkpoint"),
        ("draft_vocab", config.draft_vocab is not None, "leave it out"),
        ("draft", config.draft in DRAFTERS and has_copy([config.draft]), "use another drafter"),
        ("host_cache_bytes", config.host_cache_bytes > 0, "leave it out"),
    ):
        if refused:
            raise ConfigError(
                f"{field}: it does not work with tp={config.tp} yet; {remedy}, or use tp=1.", field=field
            )


def _longest(config: EngineConfig, network: spec.NetworkSpec) -> int:
    max_model_len = config.max_model_len or network.max_length
    if max_model_len > network.max_length:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model supports {network.max_length} tokens; "
            "lower it.",
            field="max_model_len",
        )
    return max_model_len


def _refuse_unbuilt(config: EngineConfig) -> None:
    """Raise for combinations that this version does not support."""
    for field in PREFIX_FIELDS:
        if not config.prefix_cache and getattr(config, field) != EngineConfig.model_fields[field].default:
            raise ConfigError(
                f"{field}: it has no effect without prefix_cache; leave out one of them.", field=field
            )


def _alpha(config: EngineConfig) -> float:
    """Return the initial eviction weight."""
    if config.prefix_policy == "flops":
        return 1.0 if config.prefix_alpha is None else config.prefix_alpha
    if config.prefix_alpha is not None:
        raise ConfigError(
            f"prefix_alpha: prefix_policy {config.prefix_policy} ignores it; leave it out, or choose flops.",
            field="prefix_alpha",
        )
    return 0.0


def _refuse_without_head(config: EngineConfig, drafters: Sequence[str]) -> None:
    """Raise for head settings without a head."""
    for field in HEAD_FIELDS:
        if getattr(config, field) is not None and not has_head(drafters):
            raise ConfigError(
                f"{field}: only a head has a use for it, and {' and '.join(drafters) or 'nothing'} drafts; "
                f"leave it out, or choose draft={quoted_heads()}.",
                field=field,
            )


def _refuse_copy(config: EngineConfig, kernels: str, packed: PackedSizes | None) -> None:
    """Raise for a copy that these kernels do not support, or that equals the target's format."""
    for refused, refusal in (
        (on_gpu(kernels), SELF_ON_GPU),
        (config.quantize == COPIED_IN, SELF_IS_TARGET),
        (packed is not None and packed.bytes_by_bits[4] > 0, SELF_IS_PACKED),
    ):
        if refused:
            raise ConfigError(str(refusal), field=refusal.field)


def _refuse_backing(slots: str, network: spec.NetworkSpec) -> None:
    """Raise for draft slots from which one of the model's mixers cannot roll back."""
    for mixer in network.mixers():
        if slots not in mixer.backings:
            supported = " or ".join(sorted(mixer.backings))
            raise ConfigError(
                f"slots: {mixer.kind} cannot undo drafts with {slots}s; use {supported}, or draft='none'.",
                field="slots",
            )


def bounds_of(config: EngineConfig, *, deepest: int | None = None) -> DraftShape:
    """Return the largest draft; settings not given follow from the others.

    `num_steps` alone requests a chain, as in other engines; without settings there is a tree. `deepest` is
    the depth of a head that drafts a block.
    """
    if deepest is not None and (config.num_steps or 0) > deepest:
        raise ConfigError(
            f"num_steps: the head drafts {deepest} tokens in its one pass; lower it, or leave it out.",
            field="num_steps",
        )
    usual = DEFAULT_STEPS if deepest is None else min(deepest, BLOCK_STEPS)
    is_chain = only_chains(config.draft)
    requested = config.num_steps, 1 if is_chain else config.topk, config.num_draft_tokens
    if requested == (None, None, None):
        return DraftShape(usual, DEFAULT_TOPK, max(DEFAULT_TOKENS, usual + 1))
    steps, topk, tokens = requested
    if topk is None:
        widest = (MAX_WINDOW - 1) // max((steps or 1) - 1, 1)
        topk = min(DEFAULT_TOPK, widest) if steps and tokens and tokens > steps + 1 else 1
    if steps is None:
        steps = tokens - 1 if tokens and topk == 1 else min(usual, 1 + (MAX_WINDOW - 1) // topk)
        steps = min(steps, deepest or steps)
    max_nodes = 1 + topk + topk**2 * (steps - 1)
    if tokens is None:
        tokens = min(max_nodes, steps + 1 if topk == 1 else max(DEFAULT_TOKENS, steps + 1), MAX_WINDOW)
    bounds = DraftShape(min(steps, tokens - 1), topk, min(tokens, max_nodes))
    # Before the last level, a head processes the nodes of all levels above at once.
    if (nodes := 1 + bounds.topk * (bounds.num_steps - 1)) > MAX_WINDOW:
        raise ConfigError(
            f"topk: {topk} for {bounds.num_steps} steps makes a tree of {nodes} nodes while it grows, and "
            f"{MAX_WINDOW} is the most; lower topk or num_steps.",
            field="topk",
        )
    return bounds


def _synthetic(config: EngineConfig, bounds: DraftShape) -> tuple[float, ...] | None:
    acceptance = config.synthetic_acceptance
    if acceptance is None:
        return None
    num_steps = bounds.num_steps
    if isinstance(acceptance, list):
        if not 0 < len(acceptance) <= num_steps:
            raise ConfigError(
                f"synthetic_acceptance: {len(acceptance)} rates were given for drafts of {num_steps} steps; "
                "give one to each depth that may be accepted.",
                field="synthetic_acceptance",
            )
        return tuple(acceptance)
    if acceptance > num_steps + 1:
        steps = math.ceil(acceptance) - 1
        raise ConfigError(
            f"synthetic_acceptance: drafts of {num_steps} steps cannot reach a length of {acceptance}; "
            f"raise num_steps to at least {steps}, and num_draft_tokens, if it is given, to {steps + 1}; "
            "or request less.",
            field="synthetic_acceptance",
        )
    return rates_for(acceptance, bounds.num_steps)


def _kernels(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the kernels: C on a CPU and Triton on a GPU if available, or the requested ones."""
    preferred = ("native" if device.type == "cpu" else "triton") if name == "auto" else name
    if preferred == "native":
        is_supported = device.type == "cpu" and dtype in SUFFIX and compiled() is not None
        requirement = "a CPU, float32 or bfloat16, and a C compiler (cc, gcc, clang or $CC)"
    elif preferred == "triton":
        runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
        is_supported = runs and dtype != torch.float64 and find_spec("triton") is not None
        requirement = "a CUDA device, the triton package, and another dtype than float64"
    elif preferred == "flashinfer":
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        is_supported = hopper and dtype.itemsize == 2 and all(map(find_spec, ("triton", "flashinfer")))
        requirement = "an H100 or H200, the packages triton and flashinfer, and bfloat16 or float16"
    else:
        return preferred
    if name != "auto" and not is_supported:
        raise ConfigError(f"kernels: {name!r} needs {requirement}; use kernels='cpu'.", field="kernels")
    return preferred if is_supported else "cpu"


def _weights(quantize: str | None, kernels: str, *, stored_narrow: bool, packed: str | None) -> str | None:
    """Return the weight format that these kernels multiply directly; None: weights are widened."""
    if packed:
        if quantize:
            raise ConfigError(
                f"quantize: the checkpoint is already quantised ({packed}); leave {quantize!r} out, or use "
                "the unquantised checkpoint.",
                field="quantize",
            )
        return None if kernels == "cpu" else packed
    if quantize in WHOLE:
        return None if kernels == "cpu" else quantize
    format_name = quantize or ("fp8" if stored_narrow else None)
    return format_name if kernels == "reference" or on_gpu(kernels) else None


def copied_in(kernels: str) -> WeightFormat | None:
    """Return the format in which these kernels multiply a quantised copy; None: it is widened."""
    name = _weights(COPIED_IN, kernels, stored_narrow=False, packed=None)
    return FORMATS[name] if name else None


def _packed_bytes(packed: PackedSizes, kernels: str, dtype: torch.dtype) -> int:
    """Return the bytes of published integer weights: a GPU keeps those that fit its tiles, `cpu` none."""
    if on_gpu(kernels):
        return packed.tiled + packed.untiled * dtype.itemsize
    return packed.entries * dtype.itemsize if kernels == "cpu" else packed.multiplied


def _dtype(config: EngineConfig, device: torch.device, stored: torch.dtype, stored_bytes: int) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if device.type != "cpu" or stored.itemsize != 2:
        return stored
    if stored == torch.float16:
        return torch.float32
    if config.kernels in ("auto", "native") and compiled() is not None:
        return stored
    in_library = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return stored if in_library and stored_bytes > CACHED_WEIGHTS else torch.float32
