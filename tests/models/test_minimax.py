"""Differences of MiniMax's published configs from transformers', and its state sizes."""

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.minimax import modeling_minimax as reference

from specdec.models import families
from specdec.models.mixers import Attention, Lightning
from specdec.models.shapes import SHAPES
from tests.models.random_checkpoints import draw, edit_config, save
from tests.models.runner import Runner
from tests.models.test_network import relative
from tests.tolerances import LOGITS_RELATIVE

SAVED: Mapping[str, Any] = SHAPES["minimax-text-01"]
PUBLISHED = {
    "layernorm_full_attention_alpha": "full_attn_alpha_factor",
    "layernorm_full_attention_beta": "full_attn_beta_factor",
    "layernorm_linear_attention_alpha": "linear_attn_alpha_factor",
    "layernorm_linear_attention_beta": "linear_attn_beta_factor",
    "layernorm_mlp_alpha": "mlp_alpha_factor",
    "layernorm_mlp_beta": "mlp_beta_factor",
}


@pytest.mark.parametrize("kind", ["minimax_text_01", "minimax_m1"])
def test_published_configs_describe_what_transformers_saves(kind: str) -> None:
    """Every eighth layer attends, 64 of 128 entries are rotated, each half has its own factors."""
    own = {name: 1.5 + 0.25 * i for i, name in enumerate(PUBLISHED)}
    saved = {**SAVED, **{PUBLISHED[name]: value for name, value in own.items()}}
    published = {name: value for name, value in saved.items() if name not in PUBLISHED.values()}
    del published["layer_types"], published["rope_parameters"]
    published |= {**own, "model_type": kind, "rope_theta": 1e7, "postnorm": True}
    published |= {"attn_type_list": [int(i % 8 == 7) for i in range(80)], "shared_intermediate_size": 0}
    network = families.network(published)
    assert network == families.network(saved)
    full, lightning = network.layers[79].mixers[0], network.layers[78].mixers[0]
    assert isinstance(full, Attention) and full.rope and (full.rope.dim, full.rope.theta) == (64, 1e7)
    assert isinstance(lightning, Lightning)
    assert [network.layers[i].frame.keep for i in (0, 7)] == [2.0, 1.5]
    assert network.layers[0].ffn_frame.outputs == (2.75,)
    without = {name: value for name, value in saved.items() if name != "layer_types"}
    kinds = [type(layer.mixers[0]) for layer in families.network(without).layers]
    assert kinds == [Attention, Lightning] * 40


def test_the_first_entries_of_a_head_are_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `rotary_dim`, which transformers ignores: its rotation is patched."""
    sample = next(one for one in (draw("minimax", seed) for seed in range(9)) if one.config.head_dim == 12)
    model, tokens, rotated = save(sample, tmp_path), Random(3).sample(range(61), 20), 4
    whole_TV = Runner(tmp_path, torch.float32, kernels="cpu").read(tokens, 7)
    edit_config(tmp_path, rotary_dim=rotated)
    whole = reference.apply_rotary_pos_emb

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        turned = whole(q[..., :rotated], k[..., :rotated], cos, sin)
        return [torch.cat([x, y[..., rotated:]], dim=-1) for x, y in zip(turned, (q, k), strict=True)]

    monkeypatch.setattr(reference, "apply_rotary_pos_emb", rotate)
    theta = sample.config.rope_parameters["rope_theta"]
    model.model.rotary_emb.inv_freq = theta ** (-torch.arange(0, rotated, 2) / rotated)
    with torch.inference_mode():
        expected_TV = model(torch.tensor([tokens]), use_cache=False).logits[0]
    found_TV = Runner(tmp_path, torch.float32, kernels="cpu").read(tokens, 7)
    assert relative(found_TV, expected_TV) < LOGITS_RELATIVE < relative(whole_TV, expected_TV)


def test_rotary_dim_overrides_partial_rotary_factor() -> None:
    """As in vLLM, which overwrites the factor; transformers ignores both."""
    rope = SAVED["rope_parameters"] | {"partial_rotary_factor": 0.25}
    assert families.network(SAVED | {"rope_parameters": rope}) == families.network(SAVED)
