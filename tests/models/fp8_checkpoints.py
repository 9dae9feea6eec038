"""Checkpoints in the published FP8 layout, each with a twin that holds the same weights widened."""

import json
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.models.random_checkpoints import Sample, draw, edit_config, read_tensors, save

BLOCK = 128
EXACT = re.compile(
    r".*(norm|embed\w*|lm_head|\w*conv1d|conv\.conv|in_proj_ba|in_proj_[ba]|"
    r"(mlp|mixer|feed_forward|block_sparse_moe)\.gate|router|shared_expert_gate|A_log|dt_bias|\w+_decay|"
    r"slope_rate|mtp\.fc|visual)(\W.*|$)"
)
"""Tensors that no published checkpoint quantizes."""
ODD = {
    "qwen2": 0,
    "granitemoehybrid": 0,
    "falcon_h1": 0,
    "jamba": 0,
    "lfm2_moe": 0,
    "minimax": 2,
    "kimi_linear": 2,
}
"""Families with other weight structures, and seeds of models without a whole block."""
ANNOUNCED: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.08,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


def sample(family: str, *, fused: bool = False, mtp: bool = False, multimodal: bool = False) -> Sample:
    """Describe a model whose matrices consist of whole blocks."""
    config = {
        "qwen3_next": lambda: transformers.Qwen3NextConfig(**_COMMON, **_EXPERTS),
        "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_COMMON, intermediate_size=384),
        "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**_COMMON, **_EXPERTS),
    }[family]()
    config.mtp_num_hidden_layers = int(mtp)
    return Sample(family, 0, config, mtp, fused, False, multimodal)


def odd_sample(family: str) -> Sample:
    """Describe a model without a whole block: every matrix is part of one, so rows cannot move with it."""
    drawn = (draw(family, seed) for seed in range(99))
    return next(s for s in drawn if {"linear_attention", "full_attention"} <= set(s.config.layer_types))


def write(own: Sample, folder: Path, twin: Path) -> None:
    """Write a model in FP8, and the same model with its weights widened to float32."""
    save(own, twin)
    rng = torch.Generator().manual_seed(Random(own.family).randrange(99))
    narrow: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, value in read_tensors(twin).items():
        if value.ndim < 2 or EXACT.match(name) or not value.is_floating_point():
            narrow[name] = wide[name] = value
            continue
        numbers, scales = _round(value * torch.exp(torch.randn(value.shape[-2:], generator=rng)))
        narrow[name], narrow[f"{name}_scale_inv"] = numbers, scales
        wide[name] = _widen(numbers, scales)
    shutil.copytree(twin, folder)
    for place, tensors in ((folder, narrow), (twin, wide)):
        for file in place.glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, place / "model.safetensors")
    edit_config(folder, quantization_config=ANNOUNCED)


def edit(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace tensors of a folder; None removes one."""
    tensors = {**read_tensors(folder), **changes}
    kept = {name: value.contiguous() for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def announce(folder: Path, **changes: Any) -> None:
    """Change fields of the config's FP8 description."""
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, quantization_config={**config["quantization_config"], **changes})


def _round(value: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize block by block, with loops."""
    *experts, rows, columns = value.shape
    numbers = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(*experts, -(-rows // BLOCK), -(-columns // BLOCK))
    for m, k in ((m, k) for m in range(scales.shape[-2]) for k in range(scales.shape[-1])):
        at = (..., slice(m * BLOCK, (m + 1) * BLOCK), slice(k * BLOCK, (k + 1) * BLOCK))
        scale = value[at].abs().amax((-2, -1), keepdim=True) / 448
        numbers[at] = (value[at] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales[..., m, k] = scale[..., 0, 0]
    return numbers, scales


def _widen(numbers: Tensor, scales: Tensor) -> Tensor:
    wide = numbers.float()
    for m, k in ((m, k) for m in range(scales.shape[-2]) for k in range(scales.shape[-1])):
        at = (..., slice(m * BLOCK, (m + 1) * BLOCK), slice(k * BLOCK, (k + 1) * BLOCK))
        wide[at] *= scales[..., m : m + 1, k : k + 1]
    return wide
