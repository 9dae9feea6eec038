"""The supported families, and loading a checkpoint as a network and its weights."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from specdec.errors import CheckpointError
from specdec.models import (
    bailing_hybrid,
    bamba,
    dense,
    falcon_h1,
    granite,
    jamba,
    kimi_linear,
    lfm2,
    lfm3,
    mamba,
    mamba2,
    minimax,
    nemotron_h,
    olmo_hybrid,
    qwen3,
    qwen3_5,
    qwen3_next,
    spec,
    zamba,
    zamba2,
)
from specdec.models.blocks import model_type, text_fields
from specdec.models.checkpoint import Checkpoint
from specdec.models.checkpoint_weights import CheckpointWeights
from specdec.models.fields import Fields
from specdec.models.formats import QuantisationConfig, WeightFormat, announced
from specdec.models.layouts import CheckpointLayout, numbered
from specdec.models.packed.base import QuantisationScheme
from specdec.models.tensors import Tensors
from specdec.models.unread import Watched


class Family(Protocol):
    """Interface of a family's module."""

    NAME: str
    MODEL_TYPES: tuple[str, ...]
    TITLES: Mapping[str, str]
    """Model types that tests distinguish, and their titles in the documentation."""

    def network(self, config: Mapping[str, Any]) -> spec.NetworkSpec: ...

    def layout(self, network: spec.NetworkSpec) -> CheckpointLayout: ...


_FAMILIES: tuple[Family, ...] = (
    *(qwen3, dense, qwen3_next, qwen3_5, nemotron_h),
    *(granite, bamba, mamba2, olmo_hybrid, falcon_h1, mamba, jamba, lfm2, lfm3, minimax, kimi_linear),
    *(bailing_hybrid, zamba2, zamba),
)
TITLES: Mapping[str, str] = {kind: title for family in _FAMILIES for kind, title in family.TITLES.items()}
_WITH_MTP: tuple[Family, ...] = (qwen3_next, qwen3_5, nemotron_h)
HEADLESS = tuple(kind for family in _FAMILIES if family not in _WITH_MTP for kind in family.TITLES)
"""Model types without a multi-token head."""


def supported() -> tuple[str, ...]:
    """Return the model types that can be loaded."""
    return tuple(name for family in _FAMILIES for name in family.MODEL_TYPES)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a config's model_type."""
    kind = model_type(Fields(config))
    for family in _FAMILIES:
        if kind in family.MODEL_TYPES:
            return family
    code = "; the checkpoint brings code of its own, which specdec never runs" if "auto_map" in config else ""
    raise CheckpointError(
        f"config.json: model_type {kind!r} is not supported{code}. Supported: {', '.join(supported())}",
        field="model_type",
    )


def network(config: Mapping[str, Any]) -> spec.NetworkSpec:
    """Describe the network of a Hugging Face config."""
    return family_of(config).network(config)


def unread_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the config fields that are neither read nor known to be harmless."""
    watched = Watched(config)
    network(watched)
    return watched.unread()


def layout(network: spec.NetworkSpec) -> CheckpointLayout:
    """Return a network's tensor layout on disk."""
    return next(family for family in _FAMILIES if network.family == family.NAME).layout(network)


def read_network(checkpoint: Checkpoint) -> spec.NetworkSpec:
    """Describe a checkpoint's network; the files decide if the config leaves something open.

    The generation config's end tokens override the config's. A multi-token head requires its tensors: savers
    drop them and keep the config. A stored output head that differs from the embedding is used even if the
    config ties them, as in transformers.
    """
    network_spec = network(checkpoint.config)
    generation = Fields(checkpoint.generation_config, file="generation_config.json")
    eos = generation.tokens("eos_token_id", network_spec.vocab) or network_spec.eos
    has_mtp = any(name.startswith("mtp.") for name in checkpoint.names())
    tied = network_spec.tied and not _own_head(checkpoint, network_spec)
    return replace(network_spec, eos=eos, mtp=network_spec.mtp if has_mtp else (), tied=tied)


def _own_head(checkpoint: Checkpoint, network: spec.NetworkSpec) -> bool:
    tensors = open_tensors(checkpoint)
    table, names = layout(network), tensors.names
    embed, head = (
        next((s.disk[0] for s in table.sources(name, table.prefix(names)) if s.present(names, 1)), None)
        for name in ("embed.weight", "head.weight")
    )
    if embed is None or head is None:
        return False
    if tensors.scheme(embed) or tensors.scheme(head):
        return True
    return not torch.equal(checkpoint.tensor(embed), checkpoint.tensor(head))


def open_weights(
    checkpoint: Checkpoint,
    network: spec.NetworkSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mtp: bool = False,
    quantize: WeightFormat | None = None,
    headers_only: bool = False,
    progress: bool | None = None,
) -> CheckpointWeights:
    """Open a checkpoint's tensors by our names, with the multi-token head's only if `mtp`.

    `quantize` quantises large matrices while loading. With `headers_only` shapes are compared and no tensor
    is read.
    """
    return CheckpointWeights(
        checkpoint,
        layout(network),
        dtype=dtype,
        device=device,
        mtp=mtp,
        announced=stored_format(checkpoint.config),
        quantize=quantize,
        headers_only=headers_only,
        progress=progress,
    )


def stored_format(config: Mapping[str, Any]) -> QuantisationConfig | None:
    """Return a config's storage format of large matrices; None: the model's dtype."""
    outer = Fields(config)
    return announced(outer, text_fields(outer))


def open_tensors(checkpoint: Checkpoint) -> Tensors:
    """Open a checkpoint's tensors under the names they have unquantised."""
    return Tensors(checkpoint, stored_format(checkpoint.config))


def stored_scheme(
    checkpoint: Checkpoint, network: spec.NetworkSpec
) -> Callable[[str], QuantisationScheme | None]:
    """Return a function from our name of a matrix to its integer storage, or None."""
    table, tensors = layout(network), open_tensors(checkpoint)
    prefix = table.prefix(tensors.names)

    def scheme(name: str) -> QuantisationScheme | None:
        names = (name, "embed.weight") if name == "head.weight" and network.tied else (name,)
        sources = (source for each in names for source in table.sources(each, prefix))
        found = next((source for source in sources if source.present(tensors.names, 1)), None)
        return tensors.scheme(numbered(found.disk[0], 0)) if found else None

    return scheme


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the weights' dtype according to a config, by default float32."""
    outer = Fields(config)
    for fields in (text_fields(outer), outer):
        for name in ("dtype", "torch_dtype"):
            fields.only(name, "float32", "float16", "bfloat16")
            if name in fields:
                dtype: torch.dtype = getattr(torch, fields.get(name))
                return dtype
    return torch.float32
