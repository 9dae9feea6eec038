"""Write checkpoints as llama.cpp's converter does: the inverse of the reader's tables, written independently.

Names are those of the package gguf, except for tensors that it does not know yet.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.models.checkpoint import Checkpoint

Config = Mapping[str, Any]
Named = Iterator[tuple[str, Tensor]]

MULTIPLIERS = ("z", "x", "b", "c", "dt")
NEWER: Mapping[str, str] = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.out_proj": "attn_output",
    "self_attn.output_gate": "attn_gate",
    "self_attn.norm": "attn_norm_2",
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"attention.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    "attention.f_proj": "ssm_f_a",
    "attention.b_proj": "ssm_beta",
    "attention.dt_proj": "ssm_dt",
    "attention.o_norm": "ssm_norm",
    "attention.dense": "attn_output",
    "attention.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "attention.kv_a_layernorm": "attn_kv_a_norm",
    "attention.k_b_proj": "attn_k_b",
    "attention.v_b_proj": "attn_v_b",
    "mlp.e_score_correction": "exp_probs_b",
    "post_attention_layernorm": "post_attention_norm",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""Layer tensors of Ling-3.0 and MiniMax, and head tensors, which the package does not know yet."""
SPELLED: Mapping[str, str] = {
    r"\.dt_bias$": ".dt_proj.bias",
    r"\.\w+\.gate\.(?:e_score_correction_bias|expert_bias)$": ".mlp.e_score_correction.bias",
    r"\.feed_forward\.expert_bias$": ".mlp.e_score_correction.bias",
    r"\.\w+\.experts\.": ".mlp.experts.",
    r"experts\.w1\.": "experts.gate_proj.",
    r"experts\.w2\.": "experts.down_proj.",
    r"experts\.w3\.": "experts.up_proj.",
}
"""Names that the converter changes before it looks them up in the package."""
BODIES = ("model", "backbone")


@dataclass(frozen=True, slots=True)
class Written:
    """How to write files of one architecture."""

    name: str
    family: str
    change: Callable[[str, Tensor, Config], Named]
    fields: Callable[[Config], Mapping[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the family's small model config."""
    head: bool = False
    known: str = ""
    """The architecture's name in the package gguf, if it differs."""


NO_FORMS: Mapping[str, str] = {}
ALL = "*"
"""Key of `forms` for every matrix that may be quantized."""


def write_folder(
    name: str,
    folder: Path,
    path: Path,
    *,
    form: str = "F32",
    extend: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write a checkpoint's file, its matrices and its embedding in one type."""
    checkpoint = Checkpoint(folder)
    tensors = {disk: checkpoint.tensor(disk).float() for disk in checkpoint.names()}
    forms = {ALL: form, "token_embd": form}
    return write(WRITTEN[name], path, tensors, checkpoint.config, forms, extend)


def write(
    own: Written,
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Config,
    forms: Mapping[str, str],
    extend: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write a file: tensors in float32, except those for which `forms` names another type."""
    import gguf

    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = num_layers(config)
    known = gguf.get_tensor_name_map(by_name[own.known or own.name], layers + 2)
    writer = gguf.GGUFWriter(path, own.name)
    add_fields(writer, own, config)
    writer.add_bool("tests.flag", True)
    for name, tensor in stack(dict(tensors)).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        for new, changed in own.change(renamed(name, layers), tensor, config):
            disk = named(new, known)
            named_form = next((form for part, form in forms.items() if f".{part}." in f".{disk}"), "F32")
            form = forms.get(ALL, "F32") if is_matrix(disk, changed) else "F32"
            kind = gguf.GGMLQuantizationType[form if named_form == "F32" else named_form]
            data = gguf.quants.quantize(changed.float().contiguous().numpy(), kind)
            writer.add_tensor(disk, data, raw_dtype=kind)
    extend(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_fields(writer: Any, own: Written, config: Config) -> None:
    for key, value in {**common(config), **own.fields(config)}.items():
        add(writer, key.format(own.name), value)


def add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, list(value))


def is_matrix(disk: str, own: Tensor) -> bool:
    """Return whether the converter would store a tensor in blocks of 32."""
    wide = any(part in disk for part in ("conv", "norm", "gate_inp", "ssm_d.", "token_embd"))
    return disk.endswith(".weight") and own.dim() in (2, 3) and own.shape[-1] % 32 == 0 and not wide


def stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts of a layer into one tensor."""
    experts: dict[str, dict[int, Tensor]] = {}
    for name in list(tensors):
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(f"{found[1]}.{found[3]}.weight", {})[int(found[2])] = tensors.pop(name)
    return tensors | {name: torch.stack([own[i] for i in sorted(own)]) for name, own in experts.items()}


def renamed(name: str, layers: int) -> str:
    """Rename the multi-token head's tensors to those of an additional layer."""
    head = {
        "mtp.fc.": "eh_proj.",
        "mtp.pre_fc_norm_embedding.": "enorm.",
        "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.norm.": "shared_head.norm.",
        "mtp.layers.0.eh_proj.": "eh_proj.",
        "mtp.layers.0.enorm.": "enorm.",
        "mtp.layers.0.hnorm.": "hnorm.",
        "mtp.layers.1.final_layernorm.": "shared_head.norm.",
        "mtp.layers.1.norm.": "post_attention_layernorm.",
    }
    for old, new in head.items():
        if name.startswith(old):
            return f"model.layers.{layers}.{new}{name.removeprefix(old)}"
    return re.sub(r"^mtp\.layers\.\d+", f"model.layers.{layers}", name)


def named(name: str, known: Any) -> str:
    """Translate a checkpoint's name; GGUF names pass unchanged."""
    if name.startswith("blk."):
        return name
    for old, new in SPELLED.items():
        name = re.sub(old, new, name)
    stem, _, suffix = name.rpartition(".")
    tail = stem.partition(".")[2]
    for whole, end in ((name, ""), (stem, f".{suffix}"), *((f"{x}.{tail}", f".{suffix}") for x in BODIES)):
        if found := known.get_name(whole):
            return f"{found}{end}"
    part = stem.partition(".layers.")[2].partition(".")[2]
    return f"blk.{block_of(name)}.{NEWER[part]}.{suffix}"


def common(config: Config) -> dict[str, Any]:
    """Return the metadata that most architectures share."""
    rope = config.get("rope_parameters") or {}
    eps = next(config[name] for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if name in config)
    length = config.get("max_position_embeddings") or config.get("model_max_length") or 1 << 20
    return {
        "{}.block_count": num_layers(config),
        "{}.context_length": length,
        "{}.embedding_length": config["hidden_size"],
        "{}.feed_forward_length": config.get("intermediate_size"),
        "{}.attention.head_count": config.get("num_attention_heads", 0),
        "{}.attention.head_count_kv": config.get("num_key_value_heads"),
        "{}.attention.key_length": config.get("head_dim"),
        "{}.attention.value_length": config.get("head_dim"),
        "{}.attention.layer_norm_rms_epsilon": eps,
        "{}.rope.freq_base": rope.get("rope_theta"),
    }


def block_of(name: str) -> str:
    """Return the layer index in a tensor's name."""
    return name.partition(".layers.")[2].partition(".")[0]


def num_layers(config: Config) -> int:
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


def attending(config: Config, kv: int | None = None) -> list[int]:
    """List the number of KV heads of each layer."""
    kinds = config.get("layer_types") or config["layers_block_type"]
    own = config["num_key_value_heads"] if kv is None else kv
    return [own if kind in ("full_attention", "attention") else 0 for kind in kinds]


def pair_rows(own: Tensor, heads: int) -> Tensor:
    """Put the two rows of a rotated pair next to each other."""
    return own.reshape(heads, 2, -1, *own.shape[1:]).swapaxes(1, 2).reshape(own.shape)


def as_stored(name: str, own: Tensor, config: Config) -> Named:
    yield name, own.squeeze(1) if name.endswith("conv.conv.weight") else own


def paired(name: str, own: Tensor, config: Config) -> Named:
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        if f".{part}_proj." in name:
            own = pair_rows(own, config[heads])
    yield name, own


def delta_net(name: str, own: Tensor, config: Config) -> Named:
    """Write Qwen3-Next's tensors: norms plus one, decays as -exp(A_log), separate projections."""
    if name.endswith("linear_attn.A_log"):
        own = -own.exp()
    elif name.endswith("conv1d.weight"):
        own = own.squeeze(1)
    elif name.endswith("shared_expert_gate.weight"):
        own = own.squeeze(0)
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        own = own + 1
    if not name.endswith("in_proj_qkvz.weight"):
        yield name, own
        return
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = own.view(keys, -1, own.shape[-1]).split([key, key, values, values], dim=1)
    q, k, v, z = (part.reshape(-1, own.shape[-1]) for part in parts)
    block = block_of(name)
    yield f"blk.{block}.attn_qkv.weight", torch.cat([q, k, v])
    yield f"blk.{block}.attn_gate.weight", z


def tiled(name: str, own: Tensor, config: Config) -> Named:
    """Write Qwen3.5's tensors, whose value heads are tiled over key heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    head = config["linear_value_head_dim"]
    first = 2 * keys * config["linear_key_head_dim"]

    def turn(rows: Tensor, width: int) -> Tensor:
        by_key = rows.reshape(keys, values // keys, width, *rows.shape[1:])
        return by_key.transpose(0, 1).reshape(rows.shape)

    part = name.rpartition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        own = torch.cat([own[:first], turn(own[first:], head)])
    elif part == "in_proj_z.weight":
        own = turn(own, head)
    elif part == "out_proj.weight":
        own = turn(own.T, head).T
    elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        own = turn(own, 1)
    yield from delta_net(name, own, config)


def delta_net_fields(config: Config) -> Mapping[str, Any]:
    kinds, head = config["layer_types"], config["head_dim"]
    return {
        "{}.block_count": len(kinds) + 1,
        "{}.nextn_predict_layers": 1,
        "{}.expert_count": config.get("num_experts"),
        "{}.expert_used_count": config.get("num_experts_per_tok"),
        "{}.expert_feed_forward_length": config.get("moe_intermediate_size"),
        "{}.expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "{}.ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "{}.ssm.state_size": config["linear_key_head_dim"],
        "{}.ssm.group_count": config["linear_num_key_heads"],
        "{}.ssm.time_step_rank": config["linear_num_value_heads"],
        "{}.ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "{}.attention.recurrent_layers": [*(kind == "linear_attention" for kind in kinds), False],
        "{}.rope.dimension_count": int(head * config["rope_parameters"]["partial_rotary_factor"]),
    }


def mamba2(name: str, own: Tensor, config: Config) -> Named:
    """Write Mamba-2's tensors: two-dimensional decays and skips, the norm by groups."""
    groups = config.get("n_groups") or config.get("mamba_n_groups", 1)
    if name.endswith("A_log"):
        own = -own.exp()[:, None]
    elif name.endswith((".mixer.D", ".mamba.D")):
        own = own[:, None]
    elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        own = own.reshape(groups, -1)
    elif name.endswith("conv1d.weight"):
        own = own.squeeze(1)
    yield name, own


def granite(name: str, own: Tensor, config: Config) -> Named:
    """Write Granite's tensors: rotated pairs, Mamba-2, separate gate and up projections."""
    block = block_of(name)
    kind = "shexp" if config["num_local_experts"] else ""
    if "input_linear" in name:
        stem, rows = ("exps", 1) if "block_sparse_moe" in name else (kind, 0)
        for part, half in zip(("gate", "up"), own.chunk(2, rows), strict=True):
            yield f"blk.{block}.{'_'.join(filter(None, ('ffn', part, stem)))}.weight", half
    elif "output_linear" in name:
        stem = "exps" if "block_sparse_moe" in name else kind
        yield f"blk.{block}.{'_'.join(filter(None, ('ffn_down', stem)))}.weight", own
    else:
        for new, changed in paired(name, own, config):
            yield from mamba2(new, changed, config)


def granite_fields(config: Config) -> Mapping[str, Any]:
    heads, hybrid = attending(config), not all(attending(config))
    own: dict[str, Any] = {
        "{}.attention.key_length": None,
        "{}.attention.value_length": None,
        "{}.attention.scale": config["attention_multiplier"],
        "{}.embedding_scale": config["embedding_multiplier"],
        "{}.residual_scale": config["residual_multiplier"],
        "{}.logit_scale": config["logits_scaling"],
        "{}.rope.scaling.finetuned": not hybrid,
        "{}.rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "{}.expert_count": config["num_local_experts"],
        "{}.expert_used_count": config["num_experts_per_tok"],
        "{}.expert_shared_feed_forward_length": config["shared_intermediate_size"] or None,
    }
    return own | {"{}.attention.head_count_kv": heads, **mamba2_fields(config)} if hybrid else own


def mamba2_fields(config: Config) -> Mapping[str, Any]:
    return {
        "{}.ssm.conv_kernel": config["mamba_d_conv"],
        "{}.ssm.state_size": config["mamba_d_state"],
        "{}.ssm.group_count": config["mamba_n_groups"],
        "{}.ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "{}.ssm.time_step_rank": config["mamba_n_heads"],
    }


def nemotron(name: str, own: Tensor, config: Config) -> Named:
    for new, changed in paired(name, own, config):
        yield from mamba2(new, changed, config)


def nemotron_fields(config: Config) -> Mapping[str, Any]:
    kinds, heads = config["layers_block_type"], attending(config)
    sparse = "moe" in kinds
    width = config["moe_intermediate_size" if sparse else "intermediate_size"]
    widths = [width if kind in ("moe", "mlp") else 0 for kind in kinds]
    own: dict[str, Any] = {
        "{}.feed_forward_length": widths,
        "{}.attention.head_count_kv": heads,
        "{}.ssm.conv_kernel": config["conv_kernel"],
        "{}.ssm.state_size": config["ssm_state_size"],
        "{}.ssm.group_count": config["n_groups"],
        "{}.ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "{}.ssm.time_step_rank": config["mamba_num_heads"],
        "{}.rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
    }
    if not sparse:
        return own
    return {
        **own,
        "{}.block_count": len(kinds) + 1,
        "{}.nextn_predict_layers": 1,
        "{}.feed_forward_length": [*widths, width],
        "{}.attention.head_count_kv": [*heads, config["num_key_value_heads"]],
        "{}.expert_count": config["n_routed_experts"],
        "{}.expert_used_count": config["num_experts_per_tok"],
        "{}.expert_feed_forward_length": config["moe_intermediate_size"],
        "{}.expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "{}.expert_shared_count": 1,
        "{}.expert_weights_norm": config["norm_topk_prob"],
        "{}.expert_weights_scale": config["routed_scaling_factor"],
        "{}.expert_group_count": config["n_group"],
        "{}.expert_group_used_count": config["topk_group"],
        "{}.moe_latent_size": config["moe_latent_size"],
    }


def falcon(name: str, own: Tensor, config: Config) -> Named:
    """Write Falcon-H1's tensors, with all multipliers folded into the weights."""
    before, groups = config["attention_in_multiplier"], config["mamba_n_groups"] * config["mamba_d_state"]
    gate, down = config["mlp_multipliers"]
    factors = {
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "q_proj": before,
        "k_proj": before * config["key_multiplier"],
        "v_proj": before,
        "o_proj": config["attention_out_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"],
        "feed_forward.gate_proj": gate,
        "feed_forward.down_proj": down,
    }
    if "mamba.in_proj" in name:
        inner = config["mamba_d_ssm"]
        sizes = torch.tensor([inner, inner, groups, groups, config["mamba_n_heads"]])
        rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)
        own = own * rows[:, None] * config["ssm_in_multiplier"]
    for part, factor in factors.items():
        if f".{part}." in f".{name}":
            own = own * factor
    yield from mamba2(name, own, config)


def mamba1(name: str, own: Tensor, config: Config) -> Named:
    if name.endswith("A_log"):
        own = -own.exp()
    yield name, own.squeeze(1) if name.endswith("conv1d.weight") else own


def jamba_fields(config: Config) -> Mapping[str, Any]:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    attends = [i % period == offset for i in range(config["num_hidden_layers"])]
    return {
        "{}.attention.head_count_kv": [config["num_key_value_heads"] * attend for attend in attends],
        "{}.ssm.conv_kernel": config["mamba_d_conv"],
        "{}.ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "{}.ssm.state_size": config["mamba_d_state"],
        "{}.ssm.time_step_rank": config["mamba_dt_rank"],
        "{}.expert_count": config["num_experts"],
        "{}.expert_used_count": config["num_experts_per_tok"],
    }


def mamba_fields(config: Config) -> Mapping[str, Any]:
    """Return the metadata of Mamba and Falcon-Mamba, which have no attention."""
    return {
        "{}.feed_forward_length": 0,
        "{}.ssm.conv_kernel": config["conv_kernel"],
        "{}.ssm.inner_size": config["intermediate_size"],
        "{}.ssm.state_size": config["state_size"],
        "{}.ssm.time_step_rank": config["time_step_rank"],
        "{}.ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
    }


def pure_mamba2_fields(config: Config) -> Mapping[str, Any]:
    return {
        "{}.feed_forward_length": 0,
        "{}.attention.key_length": None,
        "{}.attention.value_length": None,
        "{}.ssm.conv_kernel": config["conv_kernel"],
        "{}.ssm.inner_size": config["expand"] * config["hidden_size"],
        "{}.ssm.state_size": config["state_size"],
        "{}.ssm.group_count": config["n_groups"],
        "{}.ssm.time_step_rank": config["num_heads"],
    }


def latent(name: str, own: Tensor, config: Config) -> Named:
    """Write delta attention's decays and convolutions, and both halves of latent keys and values."""
    if name.endswith(".attention.A_log"):  # Ling's
        name, own = f"blk.{block_of(name)}.ssm_a", own.exp().reshape(-1, 1)
    elif name.endswith("A_log"):
        own = -own.exp()
    elif "_conv1d." in name:
        own = own.reshape(1, own.shape[0], 1, -1)
    if not name.endswith("kv_b_proj.weight"):
        block, g = block_of(name), name.endswith("attention.g_proj.weight")
        full = g and own.shape[0] == config["num_attention_heads"]
        yield (f"blk.{block}.{'attn_gate' if full else 'ssm_g_a'}.weight" if g else name), own
        return
    by_head = own.view(config["num_attention_heads"], -1, own.shape[-1])
    k, v = by_head.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), v


def kimi(name: str, own: Tensor, config: Config) -> Named:
    """Write Kimi's tensors; transformers saves dense feed-forwards under another name than published."""
    yield from latent(re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name), own, config)


def latent_fields(config: Config) -> Mapping[str, Any]:
    shared = config["qk_rope_head_dim"]
    dense = config["mlp_layer_types"].count("dense")
    return {
        "{}.attention.head_count_kv": attending(config, 1),
        "{}.attention.key_length": config["kv_lora_rank"] + shared,
        "{}.attention.value_length": None,
        "{}.attention.key_length_mla": config["qk_nope_head_dim"] + shared,
        "{}.attention.value_length_mla": config["v_head_dim"],
        "{}.attention.kv_lora_rank": config["kv_lora_rank"],
        "{}.attention.q_lora_rank": config.get("q_lora_rank"),
        "{}.rope.dimension_count": shared,
        "{}.ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "{}.kda.head_dim": config["linear_head_dim"],
        "{}.expert_count": config["num_experts"],
        "{}.expert_used_count": config["num_experts_per_token"],
        "{}.expert_feed_forward_length": config["moe_intermediate_size"],
        "{}.expert_shared_count": config["num_shared_experts"],
        "{}.expert_weights_scale": config["routed_scaling_factor"],
        "{}.expert_gating_func": 2,
        "{}.leading_dense_block_count": dense,
    }


def ling_fields(config: Config) -> Mapping[str, Any]:
    layers = config["num_hidden_layers"]
    limits = {name: config.get(f"{name}_swiglu_limit_list") for name in ("expert", "share_expert")}
    return {
        **latent_fields(config),
        "{}.expert_group_count": config["num_expert_group"],
        "{}.expert_group_used_count": config["topk_group"],
        "{}.expert_weights_norm": config["moe_renormalize"],
        "{}.kda.safe_gate": True,
        "{}.kda.gate_lower_bound": config["kda_lower_bound"],
        "{}.swiglu_clamp_exp": limits["expert"] or [0.0] * layers,
        "{}.swiglu_clamp_shexp": limits["share_expert"] or [0.0] * layers,
    }


def lfm2_fields(config: Config) -> Mapping[str, Any]:
    return {
        "{}.attention.head_count_kv": attending(config),
        "{}.shortconv.l_cache": config["conv_L_cache"],
    }


def lfm2_moe_fields(config: Config) -> Mapping[str, Any]:
    return {
        **lfm2_fields(config),
        "{}.expert_count": config["num_experts"],
        "{}.expert_used_count": config["num_experts_per_tok"],
        "{}.expert_feed_forward_length": config["moe_intermediate_size"],
        "{}.expert_gating_func": 2,
        "{}.leading_dense_block_count": config["num_dense_layers"],
    }


def qwen3_moe_fields(config: Config) -> Mapping[str, Any]:
    return {
        "{}.expert_count": config["num_local_experts"],
        "{}.expert_used_count": config["num_experts_per_tok"],
        "{}.expert_feed_forward_length": config["moe_intermediate_size"],
    }


def minimax(name: str, own: Tensor, config: Config) -> Named:
    if "decay" not in name and "slope_rate" not in name:
        yield name, own


def minimax_fields(config: Config) -> Mapping[str, Any]:
    return {
        "{}.rope.dimension_count": config["head_dim"],
        "{}.residual_scale": config["mlp_alpha_factor"],
        "{}.expert_count": config["num_local_experts"],
        "{}.expert_used_count": config["num_experts_per_tok"],
    }


def nothing(config: Config) -> Mapping[str, Any]:
    return {}


ATTENDS = ["full_attention"] * 3
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
NEMOTRON = ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]
FALCON = {"embedding_multiplier": 5.6, "lm_head_multiplier": 0.3, "attention_in_multiplier": 0.7}
FALCON |= {"attention_out_multiplier": 1.25, "ssm_out_multiplier": 0.4}
MINIMAX = {f"{half}_alpha_factor": 1.3 for half in ("full_attn", "linear_attn", "mlp")}
LIMITS = {"expert_swiglu_limit_list": [0.0, 0.05, 0.1], "share_expert_swiglu_limit_list": [0.0, 0.1, 0.0]}
GRANITE_PLAIN = {"layer_types": ATTENDS, "position_embedding_type": "rope", "rope_parameters": ROPE}
NO_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 21}

WRITTEN: Mapping[str, Written] = {
    "llama": Written("llama", "llama", paired, nothing, {"rope_parameters": ROPE}),
    "qwen2": Written(
        "qwen2", "qwen2", as_stored, nothing, {"use_sliding_window": False, "layer_types": ATTENDS[:2]}
    ),
    "qwen3": Written("qwen3", "qwen3", as_stored, nothing),
    "qwen35": Written("qwen35", "qwen3_5", tiled, delta_net_fields, head=True),
    "lfm2": Written("lfm2", "lfm2", as_stored, lfm2_fields, {"block_auto_adjust_ff_dim": False}),
    "qwen3moe": Written("qwen3moe", "qwen3_moe", as_stored, qwen3_moe_fields, {"norm_topk_prob": True}),
    "qwen35moe": Written("qwen35moe", "qwen3_5_moe", tiled, delta_net_fields, head=True),
    "qwen3next": Written("qwen3next", "qwen3_next", delta_net, delta_net_fields, head=True),
    "lfm2moe": Written("lfm2moe", "lfm2_moe", as_stored, lfm2_moe_fields, {"tie_word_embeddings": True}),
    "granitehybrid": Written("granitehybrid", "granitemoehybrid", granite, granite_fields),
    "granitehybrid, dense": Written(
        "granitehybrid",
        "granitemoehybrid",
        granite,
        granite_fields,
        {**NO_EXPERTS, "shared_intermediate_size": 21},
    ),
    "granitemoe": Written(
        "granitemoe", "granitemoehybrid", granite, granite_fields, GRANITE_PLAIN, known="granitehybrid"
    ),
    "granite": Written(
        *("granite", "granitemoehybrid", granite, granite_fields),
        {**GRANITE_PLAIN, **NO_EXPERTS, "shared_intermediate_size": 21},
        known="granitehybrid",
    ),
    "nemotron_h": Written(
        "nemotron_h",
        "nemotron_h",
        nemotron,
        nemotron_fields,
        {
            "layers_block_type": [kind.replace("moe", "mlp") for kind in NEMOTRON],
            "num_nextn_predict_layers": 0,
        },
    ),
    "nemotron_h_moe": Written(
        *("nemotron_h_moe", "nemotron_h", nemotron, nemotron_fields),
        {
            "layers_block_type": NEMOTRON,
            "mtp_layers_block_type": ["full_attention", "moe"],
            "moe_latent_size": 12,
        },
        head=True,
    ),
    "falcon-h1": Written(
        "falcon-h1",
        "falcon_h1",
        falcon,
        lambda c: {**mamba2_fields(c), "{}.ssm.inner_size": c["mamba_d_ssm"]},
        FALCON,
    ),
    "jamba": Written("jamba", "jamba", mamba1, jamba_fields),
    "mamba": Written("mamba", "mamba", mamba1, mamba_fields),
    "mamba2": Written("mamba2", "mamba2", mamba2, pure_mamba2_fields),
    "smollm3": Written(
        "smollm3",
        "smollm3",
        paired,
        nothing,
        {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "layer_types": ["full_attention"] * 5},
    ),
    "mistral3": Written(
        "mistral3", "mistral", paired, nothing, {"sliding_window": None, "layer_types": None}
    ),
    "kimi-linear": Written(
        "kimi-linear",
        "kimi_linear",
        kimi,
        latent_fields,
        {"num_expert_group": 1, "topk_group": 1, "q_lora_rank": 7},
    ),
    "bailingmoe3": Written(
        "bailingmoe3",
        "bailing_hybrid",
        latent,
        ling_fields,
        {"q_lora_rank": None, **LIMITS},
        known="kimi-linear",
    ),
    "minimax-01": Written("minimax-01", "minimax", minimax, minimax_fields, MINIMAX, known="minimax-m2"),
}
