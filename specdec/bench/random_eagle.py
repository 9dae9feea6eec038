"""Random EAGLE heads in their published layouts, for any target. Their drafts are noise."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.models import spec

Kind = Literal["eagle", "eagle3"]


def eagle_config(target: spec.NetworkSpec, kind: Kind, **changes: Any) -> dict[str, Any]:
    """Return the config of a head as wide as its target. An EAGLE-3 head ranks half of the vocabulary."""
    width, heads, layers = target.hidden, max(target.hidden // 64, 1), len(target.layers)
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if kind == "eagle3" else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": target.max_length,
        "vocab_size": target.vocab,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if kind == "eagle3":
        aux_hidden_layers = [2, layers // 2, layers - 3] if layers > 5 else [0, layers // 2, layers]
        config |= {
            "draft_vocab_size": -(-target.vocab // 2),
            "eagle_aux_hidden_state_layer_ids": aux_hidden_layers,
        }
    return config | changes


def eagle_tensors(
    config: Mapping[str, Any], target: spec.NetworkSpec, *, seed: int, spread: float = 0.15
) -> dict[str, Tensor]:
    """Draw the tensors of a head with this config; one with `draft_vocab_size` is EAGLE-3's.

    An embedding is included if the head's width differs from the target's.
    """
    generator = torch.Generator().manual_seed(seed)
    width, dtype = config["hidden_size"], getattr(torch, config["torch_dtype"])
    inner, ffn = config["head_dim"], config["intermediate_size"]
    fuses = "draft_vocab_size" in config

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    layer, reads = ("midlayer", 2 * width) if fuses else ("layers.0", width)
    queries, keys = (inner * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    tensors = {
        f"{layer}.self_attn.q_proj.weight": draw(queries, reads),
        f"{layer}.self_attn.k_proj.weight": draw(keys, reads),
        f"{layer}.self_attn.v_proj.weight": draw(keys, reads),
        f"{layer}.self_attn.o_proj.weight": draw(width, queries),
        f"{layer}.mlp.gate_proj.weight": draw(ffn, width),
        f"{layer}.mlp.up_proj.weight": draw(ffn, width),
        f"{layer}.mlp.down_proj.weight": draw(width, ffn),
        f"{layer}.post_attention_layernorm.weight": 1 + draw(width),
    }
    if width != target.hidden:
        tensors["embed_tokens.weight"] = draw(config["vocab_size"], width)
    if not fuses:
        return tensors | {"fc.weight": draw(width, 2 * width), "fc.bias": draw(width)}
    ranked = config["draft_vocab_size"]
    ids_C = torch.randperm(target.vocab, generator=generator)[:ranked].sort().values
    known_V = torch.zeros(target.vocab, dtype=torch.bool)
    known_V[ids_C] = True
    return tensors | {
        f"{layer}.input_layernorm.weight": 1 + draw(width),
        f"{layer}.hidden_norm.weight": 1 + draw(width),
        "fc.weight": draw(width, 3 * target.hidden),
        "norm.weight": 1 + draw(width),
        "lm_head.weight": draw(ranked, width),
        "d2t": ids_C - torch.arange(ranked),
        "t2d": known_V,
    }


def write_eagle(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1), "utf-8")
    held = {name: value.contiguous() for name, value in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def write_random_eagle(
    folder: Path,
    target: spec.NetworkSpec,
    *,
    seed: int,
    kind: Kind = "eagle3",
    spread: float = 0.15,
    **changes: Any,
) -> None:
    """Write a random head for a target; `changes` override fields of the head's config."""
    config = eagle_config(target, kind, **changes)
    write_eagle(folder, config, eagle_tensors(config, target, seed=seed, spread=spread))
