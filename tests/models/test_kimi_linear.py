"""Kimi-Linear's published spellings, latent attention with GPU kernels, and its tapes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.kernels.native.compiled import compiled
from specdec.kernels.native.tape import REFUSED
from specdec.models import families, spec
from specdec.models.checkpoint import Checkpoint
from specdec.models.mixers import KimiDeltaAttention, LatentAttention
from specdec.models.rope import Rope
from specdec.models.shapes import SHAPES
from tests.models.random_checkpoints import draw, read_tensors, save
from tests.models.runner import Runner
from tests.models.test_network import relative
from tests.models.test_probe_mixer import FFN, NORM, make, texts
from tests.tolerances import LOGITS_RELATIVE

MIXERS = (
    LatentAttention(4, 6, 2, 12, 16, 16, NORM),
    KimiDeltaAttention(2, 16, 4, 1e-6, 16),
    LatentAttention(2, 16, 8, 8, 32, None, NORM, Rope(8, 1e4), gated=True),
)
"""Values wider than keys, and keys wider than values, with positions and gates."""
LAYERS = tuple(spec.LayerSpec((mixer,), FFN) for mixer in MIXERS)
NETWORK = spec.NetworkSpec("latent", 97, 32, LAYERS, NORM, True, 512, ())
SEED = 0
"""Seed of a model with both layer kinds, and dense feed-forwards next to experts."""
SPELLED: Mapping[str, str] = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def publish(folder: Path) -> dict[str, Any]:
    """Rewrite a folder of transformers' in the published layout: nested, counted from 1, dense in `mlp`."""
    config = json.loads((folder / "config.json").read_text())
    kinds, forwards = config.pop("layer_types"), config.pop("mlp_layer_types")
    nested: dict[str, Any] = {published: config.pop(name) for name, published in SPELLED.items()}
    for name, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention")):
        nested[name] = [i + 1 for i, own in enumerate(kinds) if own == kind]
    config |= {"linear_attn_config": nested, "first_k_dense_replace": forwards.index("sparse")}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, value in read_tensors(folder).items():
        dense = any(f"moe.{part}_proj." in name for part in ("gate", "up", "down"))
        tensors[name.replace("block_sparse_moe", "mlp") if dense else name] = value
    save_file(tensors, folder / "model.safetensors")
    return config


def test_published_files_say_the_same(tmp_path: Path) -> None:
    sample = replace(draw("kimi_linear", SEED), fused=False, sharded=False)
    sample.config.mlp_layer_types = ["dense", "sparse", "sparse"]
    model = save(sample, tmp_path)
    saved = families.network(Checkpoint(tmp_path).config)
    config = publish(tmp_path)
    assert families.network(config) == saved and len({layer.mixers for layer in saved.layers}) == 2
    names = Checkpoint(tmp_path).names()
    assert any("layers.0.mlp.gate_proj" in name for name in names)
    tokens = list(range(3, 50))
    with torch.inference_mode():
        expected_TV = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert relative(Runner(tmp_path, torch.float32).read(tokens, 7), expected_TV) < LOGITS_RELATIVE
    found_TV = Runner(tmp_path, torch.float32, kernels="triton").read(tokens[:10], 5)
    assert relative(found_TV, expected_TV[:10]) < LOGITS_RELATIVE


def test_layers_are_where_they_are_published() -> None:
    """Of 27 layers the fourth, eighth … and the last attend; all but the first have experts."""
    network = families.network(SHAPES["kimi-linear-48b"])
    attend = [i + 1 for i, own in enumerate(network.layers) if isinstance(own.mixers[0], LatentAttention)]
    assert attend == [4, 8, 12, 16, 20, 24, 27]
    assert [i for i, own in enumerate(network.layers) if own.ffn != network.layers[-1].ffn] == [0]


@pytest.mark.skipif(not compiled(), reason="there is no C compiler")
def test_passes_are_recorded() -> None:
    """Refused recordings would only be slower, so no text would show them."""
    model = make(NETWORK, dtype="bfloat16", kernels="native", draft="none")
    assert texts(model) == texts(model)
    (tapes,) = model.network._replays._by_memory.values()
    assert tapes.sizes()[0] > 0 and REFUSED not in tapes._by_key.values()
