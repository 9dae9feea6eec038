"""Typed access to a GGUF file's metadata and tensor table, to describe its network."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from specdec.errors import CheckpointError
from specdec.models.fields import LARGEST, Fields
from specdec.models.gguf.blocks import widen
from specdec.models.gguf.file import OTHERWISE, GgufFile, GgufTensor
from specdec.models.rope import yarn_attention

logger = logging.getLogger(__name__)

MOST_LAYERS = 1024
"""Maximum layers, as for checkpoints."""
MOST_EXPERTS = 1 << 12
MOST_ROTATED = 1 << 16
"""Maximum rotated dimensions of a head, whose divisors are read with the metadata."""
FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"
"""Kinds of layers, as in config.json."""


class Metadata:
    """The fields that every architecture has, and readers for architecture-specific ones."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.fields = Fields(file.metadata, file=file.path.name)
        self.name = self.fields.string("general.architecture")
        self._read: set[str] = set()
        blocks = self.integer("block_count", most=MOST_LAYERS)
        self._blocks: set[tuple[int, str]] = set()
        for name in file.entries:
            if (block := self.block(name)) is None:
                continue
            if block >= blocks:
                self.refuse(name, f"{name} is not in one of the {blocks} blocks")
            self._blocks.add((block, name.split(".", 2)[2].removesuffix(".weight")))
        self._stems = {stem for _, stem in self._blocks}
        self.layers = blocks - self.integer("nextn_predict_layers", default=0, least=0)
        if self.layers < 1:
            self.fields.refuse(f"{self.name}.nextn_predict_layers", f"less than block_count ({blocks})")
        head = [stem for block, stem in self._blocks if block == self.layers]
        if head and not any(stem.startswith("nextn.") for stem in head):
            self.refuse(
                f"{self.name}.nextn_predict_layers",
                f"block {self.layers} has no nextn tensors, and nextn_predict_layers says that it is a head",
            )
        self.hidden = self.integer("embedding_length")
        self.heads = self.integer("attention.head_count", default=0, least=0)
        """0: no attention layers."""
        self.kv_heads = self.by_layer("attention.head_count_kv", self.heads)
        """0: the layer is recurrent."""
        width = self.hidden // self.heads if self.heads else 1
        self.head_dim = self.integer("attention.key_length", default=width)

    @property
    def experts(self) -> int:
        """Return the experts per layer; 0 without any."""
        return self.integer("expert_count", default=0, least=0, most=MOST_EXPERTS)

    def refuse(self, field: str, why: str) -> NoReturn:
        """Raise an error for an intact file that is unsupported."""
        raise CheckpointError(f"{self.file.path.name}: {why}"[:400] + f"; {OTHERWISE}", field=field[:200])

    def block(self, name: str) -> int | None:
        """Return the number of a tensor's block; None: it is outside blocks."""
        if not name.startswith("blk."):
            return None
        if not (found := _BLOCK.match(name)):
            self.refuse(name, f"{name} is no name of a tensor in a block")
        return int(found[1])

    def refuse_value(self, name: str, needs: str) -> NoReturn:
        """Raise an error for the value of an architecture's field."""
        self.fields.refuse(f"{self.name}.{name}", needs)

    def field(self, name: str) -> str:
        """Return the full name of an architecture's field, and count it as read."""
        self._read.add(f"{self.name}.{name}")
        return f"{self.name}.{name}"

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        return self.fields.integer(self.field(name), default=default, least=least, most=most)

    def number(self, name: str, default: float | None = None) -> float:
        return self.fields.number(self.field(name), default=default)

    def string(self, name: str, default: str) -> str:
        return self.fields.string(self.field(name), default)

    def flag(self, name: str, *, default: bool) -> bool:
        return self.fields.flag(self.field(name), default=default)

    def by_layer(self, name: str, default: int | None = None) -> list[int]:
        """Read an integer per layer, or one for all."""
        if not isinstance(self.fields.get(self.field(name)), np.ndarray):
            return [self.integer(name, default=default, least=0)] * self.layers
        return self.listed(name)

    def listed(self, name: str) -> list[int]:
        """Read an integer or boolean per layer."""
        value = self.fields.get(self.field(name))
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biu" or len(value) < self.layers:
            self.refuse_value(name, f"an integer for each of {self.layers} layers")
        found = [int(own) for own in value[: self.layers]]
        if min(found) < 0:
            self.refuse_value(name, f"an integer of at least 0 for each of {self.layers} layers")
        return found

    def numbers(self, name: str) -> list[float]:
        """Read a number per layer; empty if the field is absent."""
        value = self.fields.get(self.field(name))
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or len(value) < self.layers:
            self.refuse_value(name, f"a number for each of {self.layers} layers")
        return [float(own) for own in value[: self.layers]]

    def entry(self, name: str) -> GgufTensor:
        """Return a tensor's entry, or refuse a file without it."""
        if name not in self.file.entries:
            self.refuse(name, f"it has no tensor {name}")
        return self.file.entries[name]

    def holds(self, stem: str) -> bool:
        """Return whether any block has a tensor."""
        return stem in self._stems

    def block_holds(self, block: int, stem: str) -> bool:
        """Return whether a block has a tensor."""
        return (block, stem) in self._blocks

    def eps(self) -> float:
        """Read the norms' epsilon, which has two field names."""
        other = self.fields.get(self.field("attention.layer_norm_epsilon"))
        return self.number("attention.layer_norm_rms_epsilon", other)

    def rope(self) -> dict[str, Any]:
        """Read rotary positions; for Llama 3.1 the file stores divisors of the frequencies."""
        theta, scaling = self.number("rope.freq_base", 10_000.0), self._scaling()
        entry = self.file.entries.get("rope_freqs.weight")
        if entry is None:
            return {"rope_theta": theta, **scaling}
        if scaling["rope_type"] != "default":
            self.refuse(
                "rope_freqs.weight",
                f"{scaling['rope_type']} scaling and rope_freqs.weight exclude each other",
            )
        rotated = self.integer("rope.dimension_count", default=self.head_dim)
        if entry.shape != (rotated // 2,) or rotated > MOST_ROTATED:
            shape = list(entry.shape)
            self.refuse(
                "rope_freqs.weight",
                f"rope_freqs.weight has the shape {shape}, and heads have {rotated} rotated dimensions",
            )
        divisor_N = widen(entry.data, entry.kind, entry.shape)
        low, high, context = 1.0, 4.0, 8192
        factor = round(float(divisor_N.max()), 3)
        wave_N = 2 * math.pi * theta ** (torch.arange(len(divisor_N)) / len(divisor_N))
        part_N = ((context / wave_N - low) / (high - low)).clamp(0, 1)
        if not torch.allclose(divisor_N, 1 / ((1 - part_N) / factor + part_N), rtol=1e-3):
            self.refuse("rope_freqs.weight", "rope_freqs.weight is not scaled as in Llama 3.1 to 3.3")
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }

    def _scaling(self) -> dict[str, Any]:
        """Read the frequency scaling; without a type it is linear, as in llama.cpp."""
        kind = self.string("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn"):
            self.refuse_value("rope.scaling.type", "none, linear or yarn")
        factor = self.number("rope.scaling.factor", self.number("rope.scale_linear", 1.0)) or 1.0
        if factor < 0:
            self.refuse_value("rope.scaling.factor", "a number above 0")
        if kind == "none" or factor == 1:
            return {"rope_type": "default"}
        if kind != "yarn":
            return {"rope_type": "linear", "factor": factor}
        own, context = "rope.scaling.", self.integer("context_length")
        flatter = self.number(f"{own}attn_factor", 1.0) or 1.0
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.integer(
                f"{own}original_context_length", default=context
            ),
            "beta_fast": self.number(f"{own}yarn_beta_fast", 32.0),
            "beta_slow": self.number(f"{own}yarn_beta_slow", 1.0),
            "attention_factor": flatter * yarn_attention(factor),
        }

    def whole_heads(self) -> dict[str, Any]:
        """Refuse partial rotation of heads."""
        if self.integer("rope.dimension_count", default=self.head_dim) != self.head_dim:
            self.refuse_value("rope.dimension_count", f"whole heads of {self.head_dim}")
        return {}

    def refuse_unread(self) -> None:
        """Refuse fields that the architecture did not read and that matter; log unknown ones."""
        own = f"{self.name}."
        unread = [field for field in self.fields.names() if field.startswith(own) and field not in self._read]
        unknown = []
        for name in (field.removeprefix(own) for field in unread):
            neutral = _CHANGES.get(name)
            if neutral is None:
                unknown += [name] if name not in _HARMLESS else []
            elif np.any(~np.isin(self.fields.get(own + name), neutral)):
                self.refuse_value(name, " or ".join(repr(value) for value in neutral))
        if unknown:
            told = ", ".join(unknown)[:400].encode("unicode_escape").decode()
            logger.warning("%s: unknown fields of %s, ignored: %s", self.file.path.name, self.name, told)


_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(?=.)", re.ASCII)
"""The block's number, without leading zeros."""

_CHANGES: Mapping[str, tuple[int, ...]] = {
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_shared_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "moe_latent_size": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "swiglu_clamp_exp": (0,),
    "swiglu_clamp_shexp": (0,),
    "use_parallel_residual": (0,),
}
"""Fields, and the values at which they have no effect."""
_HARMLESS = ("vocab_size", "rope.dimension_sections", "rope.dimension_count")
"""Fields that repeat a tensor's shape, concern images, or describe rotation in models without it."""
