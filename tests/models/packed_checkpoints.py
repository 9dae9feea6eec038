"""Checkpoints in the published integer layouts, each with a twin that holds the same weights widened.

Each layout is packed here as its format describes it, one integer of a word at a time.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from tests.models import fp8_checkpoints
from tests.models.fp8_checkpoints import EXACT, ODD
from tests.models.random_checkpoints import Sample, draw, edit_config, read_tensors, save

Ints = NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Order of eight outputs within a word, from its lowest bits."""


@dataclass(frozen=True)
class Rounded:
    """A matrix [N, K] of unsigned integers, with a scale and a zero point for each group of an output."""

    number_NK: Ints
    scale_NG: Tensor
    zero_NG: Ints
    group: int

    def wide(self) -> Tensor:
        out = np.zeros(self.number_NK.shape, np.float32)
        scale_NG = self.scale_NG.float().numpy()
        for group in range(scale_NG.shape[1]):
            at = slice(group * self.group, (group + 1) * self.group)
            above = self.number_NK[:, at] - self.zero_NG[:, group : group + 1]
            out[:, at] = above.astype(np.float32) * scale_NG[:, group : group + 1]
        return torch.from_numpy(out)


@dataclass(frozen=True)
class Layout:
    """One published layout of a model."""

    write: Callable[[Rounded, int], dict[str, Tensor]]
    """Return the tensors of a matrix, by suffix, for integers of the given bits."""
    config: Mapping[str, Any]
    bits: int = 4
    group: int | None = 128
    symmetric: bool = True
    scale: torch.dtype = torch.float16
    left_out: str = "$^"
    """Layers that the config excludes, besides those that no checkpoint quantizes."""
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Bits, group and symmetry of layers with matching names."""

    def of(self, name: str) -> dict[str, Any]:
        own = {"bits": self.bits, "group": self.group, "symmetric": self.symmetric}
        return next((own | dict(v) for pattern, v in self.others.items() if re.match(pattern, name)), own)


def rounded(weight: Tensor, *, bits: int, group: int | None, symmetric: bool, scale: torch.dtype) -> Rounded:
    """Quantize each group over its range or, if symmetric, over twice its largest magnitude."""
    outputs, inputs = weight.shape
    group = group or inputs
    count, last, middle = -(-inputs // group), (1 << bits) - 1, 1 << bits - 1
    number_NK, zero_NG = np.zeros((outputs, inputs), np.int64), np.full((outputs, count), middle)
    scale_NG = torch.zeros(outputs, count, dtype=scale)
    for g in range(count):
        own = weight[:, g * group : (g + 1) * group].double()
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        step = (own.abs().amax(1) / (middle - 1) if symmetric else (high - low) / (last - 1)).to(scale)
        scale_NG[:, g] = step
        if not symmetric:
            zero_NG[:, g] = (-low / step.double()).round().clamp(1, last - 1).long().numpy()
        zero = torch.from_numpy(zero_NG[:, g : g + 1])
        number_NK[:, g * group : (g + 1) * group] = (
            (own / step.double()[:, None]).round().long().add(zero).clamp(0, last).numpy()
        )
    return Rounded(number_NK, scale_NG, zero_NG, group)


def words(value: Ints, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack integers along an axis, the first (or the first of `order`) in a word's lowest bits."""
    value = np.moveaxis(value, axis, 0)
    per = 32 // bits
    filled = np.zeros((-(-len(value) // per) * per, *value.shape[1:]), np.int64)
    filled[: len(value)] = value
    packed = np.zeros((len(filled) // per, *value.shape[1:]), np.int64)
    for place, number in enumerate(order or range(per)):
        packed |= filled[number::per] << (bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, 0, axis))).to(torch.int32)


def gptq(own: Rounded, bits: int, *, less: int) -> dict[str, Tensor]:
    inputs = own.number_NK.shape[1]
    return {
        "qweight": words(own.number_NK.T, bits, 0),
        "qzeros": words(own.zero_NG.T - less, bits, 1),
        "scales": own.scale_NG.T.contiguous(),
        "g_idx": torch.tensor([k // own.group for k in range(inputs)], dtype=torch.int32),
    }


def gptq_v1(own: Rounded, bits: int) -> dict[str, Tensor]:
    return gptq(own, bits, less=1)


def gptq_v2(own: Rounded, bits: int) -> dict[str, Tensor]:
    return gptq(own, bits, less=0)


def awq(own: Rounded, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": words(own.number_NK.T, bits, 1, AWQ_ORDER),
        "qzeros": words(own.zero_NG.T, bits, 1, AWQ_ORDER),
        "scales": own.scale_NG.T.contiguous(),
    }


def pack_quantized(own: Rounded, bits: int) -> dict[str, Tensor]:
    found = {
        "weight_packed": words(own.number_NK, bits, 1),
        "weight_scale": own.scale_NG,
        "weight_shape": torch.tensor(own.number_NK.shape),
    }
    is_symmetric = (own.zero_NG == 1 << bits - 1).all()
    return found if is_symmetric else {**found, "weight_zero_point": words(own.zero_NG, bits, 0)}


def int_quantized(own: Rounded, bits: int) -> dict[str, Tensor]:
    middle = 1 << bits - 1
    found = {
        "weight": torch.from_numpy(own.number_NK - middle).to(torch.int8),
        "weight_scale": own.scale_NG,
    }
    zero_NG = torch.from_numpy(own.zero_NG - middle).to(torch.int8)
    return {**found, "weight_zero_point": zero_NG} if zero_NG.any() else found


def gptq_config(bits: int, group: int, **other: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "damp_percent": 0.01,
        "lm_head": False,
        "true_sequential": True,
        **other,
    }


def compressed_config(form: str, *ignore: str, **groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "ignore": ["lm_head", "re:.*norm.*", *ignore],
        "config_groups": groups,
    }


def compressed_group(
    bits: int, group: int | None, *targets: str, symmetric: bool = True, **other: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return {"targets": list(targets or ["Linear"]), "weights": weights, "input_activations": None, **other}


DYNAMIC_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_BF16: dict[str, Any] = {"scale": torch.bfloat16}

LAYOUTS: dict[str, Layout] = {
    "gptq": Layout(gptq_v1, gptq_config(4, 128)),
    "gptq v2, asymmetric": Layout(
        gptq_v2, gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"), group=32, symmetric=False
    ),
    "gptq v1, asymmetric": Layout(
        gptq_v1, gptq_config(4, 64, sym=False, checkpoint_format="gptq"), group=64, symmetric=False
    ),
    "gptq, 8 bits": Layout(gptq_v1, gptq_config(8, 128), bits=8),
    "gptq, 8 bits by output": Layout(gptq_v1, gptq_config(8, -1), bits=8, group=None),
    "gptq, dynamic": Layout(
        gptq_v1,
        gptq_config(
            4, 128, dynamic={"+:.*down_proj": {"bits": 8, "group_size": 64}, "-:.*attn.*": {}, "-:mtp": {}}
        ),
        left_out=r".*attn\.|mtp",
        others={".*down_proj": {"bits": 8, "group": 64}},
    ),
    "awq": Layout(
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["self_attn", "gate"],
        },
        symmetric=False,
        left_out=r".*self_attn",
    ),
    "packed": Layout(
        pack_quantized,
        compressed_config("pack-quantized", group_0=compressed_group(4, 32)),
        group=32,
        **_BF16,
    ),
    "packed, asymmetric": Layout(
        pack_quantized,
        compressed_config("pack-quantized", group_0=compressed_group(4, 128, symmetric=False)),
        symmetric=False,
        **_BF16,
    ),
    "packed by output": Layout(
        pack_quantized, compressed_config("pack-quantized", group_0=compressed_group(4, None)), group=None
    ),
    "packed, 8 bits, asymmetric by output": Layout(
        pack_quantized,
        compressed_config("pack-quantized", group_0=compressed_group(8, None, symmetric=False)),
        bits=8,
        group=None,
        symmetric=False,
        **_BF16,
    ),
    "int8": Layout(
        int_quantized,
        compressed_config(
            "int-quantized",
            "re:.*self_attn.k_proj",
            group_0=compressed_group(8, None, input_activations=DYNAMIC_INPUTS),
        ),
        bits=8,
        group=None,
        left_out=r".*self_attn\.k_proj",
        **_BF16,
    ),
    "int8, mixed": Layout(
        int_quantized,
        compressed_config(
            "int-quantized",
            group_0=compressed_group(8, 32, symmetric=False),
            group_1=compressed_group(8, None, "re:.*self_attn.*"),
        ),
        bits=8,
        group=32,
        symmetric=False,
        others={".*self_attn": {"group": None, "symmetric": True}},
        **_BF16,
    ),
}


_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "initializer_range": 0.08,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
_MAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96,
}


def sample(family: str, *, mtp: bool = False) -> Sample:
    """Describe a small model; except for the odd ones, matrix rows consist of whole groups of 32."""
    if family == "qwen3":
        config = transformers.Qwen3Config(**_SMALL, num_hidden_layers=2)
    elif family == "nemotron_h":
        config = transformers.NemotronHConfig(**_SMALL, **_MAMBA)
    elif family in ODD:
        return draw(family, ODD[family])
    else:
        return fp8_checkpoints.sample(family, mtp=mtp)
    return Sample(family, 0, config, mtp=False, fused=False, sharded=False, multimodal=False)


def write(own: Sample, layout: Layout, folder: Path, twin: Path, *, head: bool = False) -> None:
    """Write a model in a layout, and the same model with its weights widened to float32.

    With `head` the output matrix is quantized too.
    """
    save(own, twin)
    rng = torch.Generator().manual_seed(len(own.family))
    stored: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, value in read_tensors(twin).items():
        layer = name.removesuffix(".weight")
        exact = EXACT.match(name) and not (head and layer == "lm_head")
        if value.ndim != 2 or exact or re.match(layout.left_out, layer):
            stored[name] = wide[name] = value
            continue
        how = layout.of(layer)
        # Columns differ in size, so that misordered groups would be detected.
        uneven = value * torch.exp(torch.randn(value.shape[1], generator=rng))
        matrix = rounded(uneven, **how, scale=layout.scale)
        wide[name] = matrix.wide()
        stored |= {f"{layer}.{suffix}": own for suffix, own in layout.write(matrix, how["bits"]).items()}
    shutil.copytree(twin, folder)
    for place, tensors in ((folder, stored), (twin, wide)):
        for file in place.glob("*.safetensors*"):
            file.unlink()
        save_file({name: value.contiguous() for name, value in tensors.items()}, place / "model.safetensors")
    edit_config(folder, quantization_config=dict(layout.config))
