"""A random MTP head for a random model: `transformers` saves none, though the config describes it."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX, SHARD = "model.safetensors.index.json", "model-mtp.safetensors"
SINGLE, BODY = "model.safetensors", "model-body.safetensors"


def add_random_head(folder: Path, config: Mapping[str, Any], *, seed: int) -> None:
    """Write the head's tensors as an additional shard, if the config has a Qwen-style head.

    Its layer is shaped like the body's last attention layer.
    """
    if not config.get("mtp_num_hidden_layers"):
        return
    generator = torch.Generator().manual_seed(seed)
    spread = config.get("initializer_range", 0.02)

    def draw(like: Tensor) -> Tensor:
        scale = spread if like.ndim > 1 else 0.0
        return torch.randn(like.shape, generator=generator).mul_(scale).to(like.dtype)

    layer = _last_attention_layer(folder)
    wide = next(x for name, x in layer.items() if name == "input_layernorm.weight")
    tensors = {f"mtp.layers.0.{name}": draw(x) for name, x in layer.items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.zeros_like(wide)
    tensors["mtp.fc.weight"] = draw(wide.new_empty(len(wide), 2 * len(wide)))
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    places = dict(_places(folder))
    if (folder / SINGLE).exists():  # readers prefer it to an index
        (folder / SINGLE).rename(folder / BODY)
        places = dict.fromkeys(places, BODY)
    index = {"metadata": {}, "weight_map": places | dict.fromkeys(tensors, SHARD)}
    (folder / INDEX).write_text(json.dumps(index), "utf-8")


def _places(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each tensor of the body and its file."""
    if (folder / INDEX).exists():
        yield from json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].items()
        return
    with safe_open(folder / SINGLE, framework="pt") as file:
        yield from ((name, SINGLE) for name in file.keys())  # noqa: SIM118 - a file is no mapping


def _last_attention_layer(folder: Path) -> dict[str, Tensor]:
    """Load the tensors of the last layer that has queries, by their names within it."""
    found: dict[int, dict[str, str]] = {}
    places = dict(_places(folder))
    for name in places:
        if match := re.fullmatch(r".*?layers\.(\d+)\.(.+)", name):
            found.setdefault(int(match[1]), {})[match[2]] = name
    last = max(number for number, names in found.items() if "self_attn.q_proj.weight" in names)
    tensors = {}
    for inner, name in found[last].items():
        with safe_open(folder / places[name], framework="pt") as file:
            tensors[inner] = file.get_tensor(name)
    return tensors
