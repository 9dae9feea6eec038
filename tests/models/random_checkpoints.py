"""Draw small random models of every family and write them as transformers does.

Sizes are odd on purpose: head ratios, widths that are not powers of two, one layer, one expert group. Weights
are large (0.15), because a random model with small ones repeats one token. Norms and gates are moved off
their initial values, so that a loader that skips them fails.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from specdec.setup.capabilities import AXES
from specdec.setup.drafters import DRAFTERS
from tests.models.drawn import DRAWN

FAMILIES = tuple(family for family in AXES["family"] if family not in DRAWN)
"""Families that every family test covers; the others have tests/models/test_drawn.py."""
HEADS = tuple(family for family in FAMILIES if family not in DRAFTERS["mtp"].lacking)
"""Families with a multi-token head."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Sample:
    """One random model and the layout of its folder."""

    family: str
    seed: int
    config: PreTrainedConfig
    mtp: bool
    """The folder holds a multi-token head."""
    fused: bool
    """Experts are stored in one tensor, and names are those of transformers' modules."""
    sharded: bool
    multimodal: bool
    """The text model is nested in a multimodal config, next to a vision tower."""

    @property
    def cacheable(self) -> bool:
        """Return whether transformers can decode it with a cache: that requires an attention layer."""
        return "full_attention" in getattr(self.config, "layer_types", ["full_attention"])


def draw(family: str, seed: int) -> Sample:
    """Draw a configuration, deterministic for each seed."""
    rng = Random(f"{family} {seed}")
    mtp = family in HEADS and rng.random() < 0.5
    config = DRAWN[family].draw(rng) if family in DRAWN else _DRAW[family](rng, mtp)
    return Sample(
        family=family,
        seed=seed,
        config=config,
        mtp=mtp,
        fused=rng.random() < 0.5,
        sharded=rng.random() < 0.3,
        multimodal=family.startswith("qwen3_5") and rng.random() < 0.4,
    )


def save(
    sample: Sample, folder: Path, *, dtype: torch.dtype = torch.float32, experts: str = "eager"
) -> PreTrainedModel:
    """Write the sample's checkpoint and return the written model, ready to compute logits.

    `experts` is transformers' expert implementation: its default needs widths in multiples of 16 bytes.
    """
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sample.seed)
        model = transformers.AutoModelForCausalLM.from_config(
            sample.config,
            dtype=dtype,
            experts_implementation=experts,
        ).eval()
        _unsettle(dict(model.named_parameters()) | dict(model.named_buffers()))
        size = "10KB" if sample.sharded else "1GB"
        model.save_pretrained(folder, max_shard_size=size, save_original_format=not sample.fused)
        if sample.mtp:
            add_tensors(folder, head_tensors(sample))
    if sample.multimodal:
        _wrap(folder)
    return model


def head_tensors(sample: Sample) -> dict[str, Tensor]:
    """Draw the tensors of a multi-token head, named as on disk; transformers saves none."""
    width = sample.config.hidden_size
    if sample.family == "nemotron_h":
        layers = _nemotron_head_layers(sample.config)
        first, last = "mtp.layers.0.", f"mtp.layers.{len(layers) - 1}."
        names = {
            "enorm": f"{first}enorm",
            "hnorm": f"{first}hnorm",
            "fc": f"{first}eh_proj",
            "norm": f"{last}final_layernorm",
        }
    else:
        layers = [_head_layer(sample)]
        names = {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "fc": "mtp.fc",
            "norm": "mtp.norm",
        }
    tensors = {names[norm] + ".weight": torch.zeros(width) for norm in ("enorm", "hnorm", "norm")}
    tensors[names["fc"] + ".weight"] = torch.randn(width, 2 * width) * 0.15
    for i, layer in enumerate(layers):
        tensors |= {f"mtp.layers.{i}.{name}": value.clone() for name, value in layer.state_dict().items()}
    _unsettle(tensors)
    for name, value in tensors.items():
        if value.ndim > 1:
            torch.nn.init.normal_(tensors[name], std=0.15)
    return tensors if sample.fused else split_experts(tensors)


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store fused experts one by one."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition(".experts.")
        parts = {
            "gate_up_proj": ("gate_proj", "up_proj"),
            "up_proj": ("up_proj",),
            "down_proj": ("down_proj",),
        }
        if not stem or leaf not in parts:
            out[name] = value
            continue
        for expert, weight in enumerate(value):
            for part, piece in zip(parts[leaf], weight.chunk(len(parts[leaf])), strict=True):
                out[f"{stem}.experts.{expert}.{part}.weight"] = piece.clone()
    return out


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, whatever files they are in."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: value.clone() for file in files for name, value in load_file(file).items()}


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a folder written by transformers: to its only file, or as a further shard."""
    if not (folder / _INDEX).exists():
        save_file(read_tensors(folder) | tensors, folder / _SINGLE)
        return
    shard = f"model-extra-{len(list(folder.iterdir()))}.safetensors"
    save_file(tensors, folder / shard)
    index = json.loads((folder / _INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, shard)
    (folder / _INDEX).write_text(json.dumps(index))


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def _unsettle(tensors: dict[str, Tensor]) -> None:
    """Add noise to tensors that initializers leave constant."""
    with torch.no_grad():
        for name, value in tensors.items():
            if "norm" in name or name.endswith((".bias", "dt_bias", ".D", "correction_bias", "expert_bias")):
                value.add_(0.3 * torch.randn(value.shape))


def _wrap(folder: Path) -> None:
    """Nest the config and prefix the body's tensors as multimodal checkpoints do; add a vision tower."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    outer = {key: text.pop(key) for key in ("dtype", "transformers_version") if key in text}
    outer |= {
        "architectures": [text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 16},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    path.write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in read_tensors(folder).items()
    }
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(16, 3, 2, 4, 4)
    tensors["model.visual.blocks.0.attn.qkv.bias"] = torch.zeros(48)
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    save_file(tensors, folder / _SINGLE)


def _head_layer(sample: Sample) -> torch.nn.Module:
    config = type(sample.config)(
        **{**sample.config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    )
    layer = {
        "qwen3_next": Qwen3NextDecoderLayer,
        "qwen3_5": Qwen3_5DecoderLayer,
        "qwen3_5_moe": Qwen3_5MoeDecoderLayer,
    }[sample.family]
    if sample.family == "qwen3_next":
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
    module: torch.nn.Module = layer(config, 0)
    return module


def _nemotron_head_layers(config: PreTrainedConfig) -> list[torch.nn.Module]:
    kinds = config.mtp_layers_block_type
    inner = type(config)(**{**config.to_dict(), "layers_block_type": kinds})
    return [NemotronHBlock(inner, i) for i in range(len(kinds))]


def _common(rng: Random) -> dict[str, Any]:
    kv_heads = rng.choice([1, 2, 3])
    return {
        "vocab_size": rng.choice([61, 96, 131]),
        "hidden_size": rng.choice([24, 40, 56]),
        "num_attention_heads": kv_heads * rng.choice([1, 2, 3]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 16, 24]),
        "initializer_range": 0.15,
        "max_position_embeddings": 512,
        "tie_word_embeddings": rng.random() < 0.5,
        "eos_token_id": rng.choice([None, 7, [5, 9]]),
    }


def _rope(rng: Random, partial: float | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rng.choice([1e4, 1e6])}
    return {"rope_parameters": rope if partial is None else {**rope, "partial_rotary_factor": partial}}


def _draw_qwen3(rng: Random, mtp: bool) -> PreTrainedConfig:
    return transformers.Qwen3Config(
        **_common(rng),
        **_rope(rng, None),
        num_hidden_layers=rng.choice([1, 2, 3]),
        intermediate_size=rng.choice([20, 33, 64]),
        attention_bias=rng.random() < 0.5,
    )


def _hybrid(rng: Random, mtp: bool) -> dict[str, Any]:
    layers, key_heads = rng.choice([1, 4, 4, 5]), rng.choice([1, 2, 3])
    fields = _common(rng) | _rope(rng, rng.choice([0.25, 0.5, 1.0]))
    fields |= {
        "num_hidden_layers": layers,
        "attention_bias": rng.random() < 0.3,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([4, 7, 16]),
        "linear_value_head_dim": rng.choice([4, 9, 16]),
        "linear_conv_kernel_dim": rng.choice([2, 3, 4]),
        "mtp_num_hidden_layers": int(mtp),
    }
    if rng.random() < 0.5:
        kinds = ["linear_attention", "full_attention"]
        drawn = [rng.choice(kinds) for _ in range(layers - 1)]
        fields["layer_types"] = [*drawn, rng.choice(kinds) if layers == 1 else "full_attention"]
    return fields


def _experts(rng: Random) -> dict[str, Any]:
    experts = rng.choice([2, 5, 8])
    return {
        "num_experts": experts,
        "num_experts_per_tok": rng.randint(1, min(experts, 3)),
        "moe_intermediate_size": rng.choice([6, 16]),
        "shared_expert_intermediate_size": rng.choice([10, 24]),
    }


def _draw_qwen3_next(rng: Random, mtp: bool) -> PreTrainedConfig:
    fields = _hybrid(rng, mtp) | _experts(rng)
    return transformers.Qwen3NextConfig(
        **fields,
        intermediate_size=rng.choice([20, 33]),
        norm_topk_prob=rng.random() < 0.5,
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.choice([[], [0]]),
    )


def _draw_qwen3_5(rng: Random, mtp: bool) -> PreTrainedConfig:
    return transformers.Qwen3_5TextConfig(**_hybrid(rng, mtp), intermediate_size=rng.choice([20, 33, 64]))


def _draw_qwen3_5_moe(rng: Random, mtp: bool) -> PreTrainedConfig:
    return transformers.Qwen3_5MoeTextConfig(**_hybrid(rng, mtp), **_experts(rng))


def _draw_nemotron_h(rng: Random, mtp: bool) -> PreTrainedConfig:
    groups, expert_groups = rng.choice([1, 2]), rng.choice([1, 2])
    kinds = [rng.choice("MM*-EE") for _ in range(rng.choice([1, 4, 6, 7]))]
    # At least one layer mixes tokens; without any, logits would depend on the last token only.
    kinds[rng.randrange(len(kinds))] = "*" if len(kinds) > 1 else rng.choice("M*")
    pattern = "".join(kinds)
    return transformers.NemotronHConfig(
        **(_common(rng) | {"tie_word_embeddings": False}),
        hybrid_override_pattern=pattern,
        intermediate_size=rng.choice([20, 33]),
        ssm_state_size=rng.choice([5, 8, 16]),
        mamba_num_heads=groups * rng.choice([1, 2, 3]),
        mamba_head_dim=rng.choice([4, 9]),
        n_groups=groups,
        conv_kernel=rng.choice([2, 3, 4]),
        use_conv_bias=rng.random() < 0.7,
        use_bias=rng.random() < 0.5,
        mlp_bias="E" not in pattern and not mtp and rng.random() < 0.5,
        chunk_size=rng.choice([4, 16]),
        n_routed_experts=4 * expert_groups,
        n_group=expert_groups,
        topk_group=rng.randint(1, expert_groups),
        num_experts_per_tok=rng.choice([1, 2, 3]),
        moe_intermediate_size=rng.choice([6, 16]),
        moe_shared_expert_intermediate_size=rng.choice([10, 24]),
        moe_latent_size=rng.choice([None, 12]),
        norm_topk_prob=rng.random() < 0.5,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
        num_nextn_predict_layers=int(mtp),
        mtp_layers_block_type=["full_attention", rng.choice(["moe", "mlp"])],
    )


_DRAW: dict[str, Callable[[Random, bool], PreTrainedConfig]] = {
    "qwen3": _draw_qwen3,
    "qwen3_next": _draw_qwen3_next,
    "qwen3_5": _draw_qwen3_5,
    "qwen3_5_moe": _draw_qwen3_5_moe,
    "nemotron_h": _draw_nemotron_h,
}
