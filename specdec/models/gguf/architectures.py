"""A file's metadata as the config.json, and its tensors as those, of the checkpoint that it was made from."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.fields import LARGEST, Fields
from specdec.models.gguf.blocks import BITS, GROUP, widen
from specdec.models.gguf.file import OTHERWISE, Entry, GgufFile

Recipe = Callable[[Tensor], Tensor]

MOST_LAYERS = 1024
"""As many as a checkpoint may have."""
FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"
"""Kinds of layers, as config.json has them."""

EMBEDDING = "model.embed_tokens.weight"
_OUTER = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {
    **_ATTENTION,
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_DELTA_NET = {
    **_DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SHORT_CONV = {
    **_ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")},
    **{f"ffn_{part}": f"feed_forward.w{i}" for i, part in ((1, "gate"), (2, "down"), (3, "up"))},
}
_NEXT = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
"""The multi-token head but for its layer, which is one more block behind the model's."""


class Described:
    """One file's config and tensors."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.fields = Fields(file.metadata, file=file.path.name)
        self.name = self.fields.get("general.architecture")
        if self.name not in ARCHITECTURES:
            known, found = ", ".join(ARCHITECTURES), str(self.name)[:80]
            self.refuse("general.architecture", f"the architectures {known}, and not {found!r}")
        self.architecture = ARCHITECTURES[self.name]
        blocks = self._integer("block_count", most=MOST_LAYERS)
        self.layers = blocks - self._integer("nextn_predict_layers", default=0, least=0)
        if self.layers < 1:
            self.fields.refuse(f"{self.name}.nextn_predict_layers", f"less than block_count ({blocks})")
        self.heads = self._integer("attention.head_count")
        self.kv_heads = self._by_layer("attention.head_count_kv", self.heads)
        self.hidden = self._integer("embedding_length")
        self.head_dim = self._integer("attention.key_length", default=self.hidden // self.heads)
        self._refuse_unread()

    @property
    def dtype(self) -> str:
        """Return what the checkpoint's dtype is taken for, as safetensors spells it."""
        return "F32" if {own.kind.name for own in self.file.entries.values()} == {"F32"} else "BF16"

    @property
    def config(self) -> dict[str, Any]:
        """Return the fields of config.json."""
        return {
            "model_type": self.architecture.model_type,
            "dtype": "float32" if self.dtype == "F32" else "bfloat16",
            "vocab_size": self._rows("token_embd.weight"),
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": max(self.kv_heads),
            "head_dim": self.head_dim,
            "intermediate_size": self._integer("feed_forward_length"),
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self.file.entries,
            **self.architecture.more(self),
            **self._integer_weights(),
        }

    def names(self) -> Mapping[str, str]:
        """Return the file's name of each tensor by that of the checkpoint."""
        return {self._disk(name): name for name in self.file.entries if name != "rope_freqs.weight"}

    def bits(self, disk: str, entry: Entry) -> int | None:
        """Return in how many bits a matrix is kept; None: it is widened."""
        if len(entry.shape) != 2 or disk == EMBEDDING or not self.architecture.keeps(self, disk):
            return None
        return BITS.get(entry.kind.name)

    def _integer_weights(self) -> dict[str, Any]:
        """Announce matrices of integers as compressed-tensors does, whose layout they are given."""
        layers: dict[int, list[str]] = {}
        for disk, name in self.names().items():
            if bits := self.bits(disk, self.file.entries[name]):
                layers.setdefault(bits, []).append(disk.removesuffix(".weight"))
        if not layers:
            return {}
        weights = {"type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
        groups = {
            f"group_{bits}": {"targets": targets, "weights": {**weights, "num_bits": bits}}
            for bits, targets in layers.items()
        }
        announced = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
        return {"quantization_config": announced}

    def recipe(self, disk: str) -> Recipe | None:
        """Return what makes a checkpoint's tensor of the file's, if it is another one."""
        return self.architecture.recipe(self, disk)

    def refuse(self, field: str, needs: str) -> NoReturn:
        raise CheckpointError(f"{self.file.path.name}: specdec reads {needs}; {OTHERWISE}", field=field)

    def _disk(self, name: str) -> str:
        if name in _OUTER:
            return _OUTER[name]
        found = re.fullmatch(r"blk\.(\d{1,4})\.(.+?)(\.weight|\.bias|)", name)
        if found is None:
            return name
        block, stem, suffix = int(found[1]), found[2], found[3]
        if stem in _NEXT:
            return _NEXT[stem] + suffix
        where = f"model.layers.{block}" if block < self.layers else f"mtp.layers.{block - self.layers}"
        if (stem, suffix) in _BARE:
            return f"{where}.{_BARE[stem, suffix]}"
        return f"{where}.{self.architecture.names.get(stem, stem)}{suffix}"

    def _refuse_unread(self) -> None:
        scaling = self.fields.get(f"{self.name}.rope.scaling.type")
        if scaling not in (None, "none"):
            self.refuse(
                f"{self.name}.rope.scaling.type", f"rotary positions without scaling, not {scaling!r}"
            )
        for name in ("rope.scaling.factor", "rope.scale_linear"):  # linear where no type is named
            if scaling is None and self._number(name, 1.0) not in (0, 1):
                self.refuse(f"{self.name}.{name}", "rotary positions without scaling")
        if self._integer("expert_count", default=0, least=0):
            self.refuse(f"{self.name}.expert_count", "GGUF files of dense models so far")

    def _integer(self, name: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        return self.fields.integer(f"{self.name}.{name}", default=default, least=least, most=most)

    def _number(self, name: str, default: float | None = None) -> float:
        return self.fields.number(f"{self.name}.{name}", default=default)

    def _by_layer(self, name: str, default: int) -> list[int]:
        """Read a number for each layer, or one for all."""
        if not isinstance(self.fields.get(f"{self.name}.{name}"), np.ndarray):
            return [self._integer(name, default=default)] * self.layers
        found = self._list(name)
        if not any(found):
            self.fields.refuse(f"{self.name}.{name}", "a layer with a number above 0")
        return found

    def _list(self, name: str) -> list[int]:
        """Read an integer for each layer, or true or false."""
        value = self.fields.get(f"{self.name}.{name}")
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "biu" or len(value) < self.layers:
            self.fields.refuse(f"{self.name}.{name}", f"an integer for each of {self.layers} layers")
        return [int(own) for own in value[: self.layers]]

    def _rows(self, name: str) -> int:
        if name not in self.file.entries:
            self.refuse(name, f"files that hold {name}")
        return self.file.entries[name].shape[0]

    def _rope(self) -> dict[str, Any]:
        """Read rotary positions: of those of Llama 3.1 a file holds what frequencies are divided by."""
        theta = self._number("rope.freq_base", 10_000.0)
        entry = self.file.entries.get("rope_freqs.weight")
        if entry is None:
            return {"rope_type": "default", "rope_theta": theta}
        divisor_N = widen(torch.from_numpy(entry.data.copy()), entry.kind, entry.shape)
        low, high, context = 1.0, 4.0, 8192
        factor = round(float(divisor_N.max()), 3)
        wave_N = 2 * math.pi * theta ** (torch.arange(len(divisor_N)) / len(divisor_N))
        part_N = ((context / wave_N - low) / (high - low)).clamp(0, 1)
        if not torch.allclose(divisor_N, 1 / ((1 - part_N) / factor + part_N), rtol=1e-3):
            self.refuse("rope_freqs.weight", "rotary positions scaled as in Llama 3.1 to 3.3, or not scaled")
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }

    def whole_heads(self) -> dict[str, Any]:
        """Refuse positions that rotate a part of a head."""
        if self._integer("rope.dimension_count", default=self.head_dim) != self.head_dim:
            self.fields.refuse(f"{self.name}.rope.dimension_count", f"whole heads of {self.head_dim}")
        return {}

    def short_conv(self) -> dict[str, Any]:
        """Describe LFM2's layers: those without keys are convolutions."""
        return {
            **self.whole_heads(),
            "layer_types": [FULL if heads else CONV for heads in self.kv_heads],
            "norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "conv_L_cache": self._integer("shortconv.l_cache"),
            "block_auto_adjust_ff_dim": False,
        }

    def delta_net(self) -> dict[str, Any]:
        """Describe Qwen3.5's layers."""
        every = self._integer("full_attention_interval", default=4)
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(self.layers)]
        if f"{self.name}.attention.recurrent_layers" in self.fields:
            kinds = [LINEAR if own else FULL for own in self._list("attention.recurrent_layers")]
        values = self._integer("ssm.time_step_rank")
        rotated = self._integer("rope.dimension_count", default=self.head_dim)
        return {
            "layer_types": kinds,
            "linear_num_key_heads": self._integer("ssm.group_count"),
            "linear_num_value_heads": values,
            "linear_key_head_dim": self._integer("ssm.state_size"),
            "linear_value_head_dim": self._integer("ssm.inner_size") // values,
            "linear_conv_kernel_dim": self._integer("ssm.conv_kernel"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self._number("rope.freq_base"),
                "partial_rotary_factor": rotated / self.head_dim,
            },
            "mtp_num_hidden_layers": int(f"blk.{self.layers}.nextn.eh_proj.weight" in self.file.entries),
        }


_BARE = {
    ("ssm_a", ""): "linear_attn.A_log",
    ("ssm_dt", ".bias"): "linear_attn.dt_bias",
}
"""Tensors whose names have another end in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp's converter writes one family."""

    model_type: str
    names: Mapping[str, str]
    """What a checkpoint calls the tensors of a layer."""
    more: Callable[[Described], dict[str, Any]]
    """Fields of config.json beside those that all have."""
    recipe: Callable[[Described, str], Recipe | None] = lambda described, disk: None
    keeps: Callable[[Described, str], bool] = lambda described, disk: True
    """Whether a matrix may be kept in blocks: what `recipe` does must not cut any."""


def _unpair(described: Described, disk: str) -> Recipe | None:
    """Lay rotated rows back as a checkpoint has them: the converter puts the two of a pair side by side."""
    found = re.search(r"self_attn\.[qk]_proj\.\w+$", disk)
    if found is None:
        return None
    half = described.head_dim // 2

    def recipe(own_NX: Tensor) -> Tensor:
        if half < 1 or len(own_NX) % (2 * half):
            return own_NX  # of a wrong shape, which is told where it is compared
        return own_NX.view(-1, half, 2, *own_NX.shape[1:]).transpose(1, 2).reshape(own_NX.shape)

    return recipe


def _conv(described: Described, disk: str) -> Recipe | None:
    return (lambda own_CK: own_CK.unsqueeze(1)) if disk.endswith("conv.conv.weight") else None


def _delta_net(described: Described, disk: str) -> Recipe | None:
    """Take back what the converter changed: one added to norms, decays as such, the order of value heads."""
    _, inside, part = disk.removesuffix("_scale").rpartition("linear_attn.")
    if not inside:
        is_norm = "norm" in disk.removesuffix(".weight").rpartition(".")[2]
        return (lambda own_D: own_D - 1) if is_norm else None

    def recipe(own_X: Tensor) -> Tensor:
        own_X = _in_order(described, part, own_X)
        if part == "A_log":
            return torch.log(-own_X)
        return own_X.unsqueeze(1) if part == "conv1d.weight" else own_X

    return recipe


def _cuts_none(described: Described, disk: str) -> bool:
    """Columns of a delta net's last projection are put in order by value heads."""
    width: int = described.delta_net()["linear_value_head_dim"]
    return not disk.endswith("linear_attn.out_proj.weight") or width % GROUP == 0


_NARROW = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
_CHANNELS = ("in_proj_qkv.weight", "conv1d.weight")
_VALUES = ("in_proj_z.weight", "out_proj.weight")
"""Tensors of a delta net with a row for each value head, for each channel, and for each entry of a value."""


def _in_order(described: Described, part: str, own_X: Tensor) -> Tensor:
    """Put value heads in a checkpoint's order: in a file key heads take turns.

    What has another shape than the metadata say stays, and is told where shapes are compared.
    """
    if part not in (*_NARROW, *_CHANNELS, *_VALUES):
        return own_X
    config, dim = described.delta_net(), int(part == "out_proj.weight")
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % keys:
        described.refuse(f"{described.name}.ssm.time_step_rank", "as many value heads for each key head")
    width = 1 if part in _NARROW else config["linear_value_head_dim"]
    first = 2 * keys * config["linear_key_head_dim"] if part in _CHANNELS else 0
    size = own_X.shape[dim] if own_X.dim() > dim else 0
    each = (first + values * width) // size if size else 0
    if each not in (1, GROUP) or each * size != first + values * width:
        return own_X
    order_N = torch.arange(values).view(-1, keys).T.reshape(-1, 1) * width + torch.arange(width)
    order_N = torch.cat([torch.arange(first), first + order_N.reshape(-1)])
    return own_X.index_select(dim, order_N[::each] // each)  # a scale belongs to 32 columns


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _DENSE, Described.whole_heads, _unpair),
    "qwen2": Architecture("qwen2", _DENSE, Described.whole_heads),
    "qwen3": Architecture("qwen3", _DENSE, Described.whole_heads),
    "qwen35": Architecture("qwen3_5_text", _DELTA_NET, Described.delta_net, _delta_net, _cuts_none),
    "lfm2": Architecture("lfm2", _SHORT_CONV, Described.short_conv, _conv),
}
"""By the name that files have for them."""
