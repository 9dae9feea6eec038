"""Write the trained models in Hugging Face's layout: the target with its MTP head, and the EAGLE head."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.train_tiny.heads import MTP, Eagle3
from tools.train_tiny.trunk import Trunk

WEIGHTS, EAGLE = "model.safetensors", "eagle3"
EXACT = ("A_log", "dt_bias")
"""Kept in float32: the decay is an exponential of an exponential."""


def export(folder: Path, config: dict[str, Any], trunk: Trunk, mtp: MTP | None, dtype: torch.dtype) -> None:
    """Write config.json and the weights of the target, and of its MTP head if given."""
    named = str(dtype).removeprefix("torch.")
    whole = {"architectures": ["Qwen3_5ForCausalLM"], **config, "dtype": named}
    whole |= {
        "mtp_num_hidden_layers": int(mtp is not None),
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    _write(folder / "config.json", whole)
    tensors = {f"model.{name}": tensor for name, tensor in _narrow(trunk, dtype).items()}
    if mtp:
        tensors |= {f"mtp.{name}": tensor for name, tensor in _narrow(mtp, dtype).items()}
    _save(tensors, folder / WEIGHTS)


def export_eagle(folder: Path, head: Eagle3, dtype: torch.dtype) -> None:
    """Write an EAGLE-3 head in its published layout; it shares the target's embedding."""
    folder.mkdir(exist_ok=True)
    shape, vocabulary = head.shape, head.vocabulary
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": len(vocabulary),
        "eagle_aux_hidden_state_layer_ids": list(head.aux_hidden_layers),
        "tie_word_embeddings": False,
    }
    _write(folder / "config.json", config)
    known = torch.zeros(shape.vocab_size, dtype=torch.bool)
    known[vocabulary] = True
    maps = {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": known}
    _save(_narrow(head, dtype) | maps, folder / WEIGHTS)


def _narrow(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Round the weights to the checkpoint's type."""
    return {
        name: tensor.detach().cpu().to(torch.float32 if name.endswith(EXACT) else dtype).contiguous()
        for name, tensor in module.state_dict().items()
    }


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a world-readable file."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
