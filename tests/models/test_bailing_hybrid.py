"""Differences of Ling-3.0's published files from transformers', and the limits of activated gates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7MLP

from specdec.models import families
from specdec.models.checkpoint import Checkpoint
from specdec.models.mixers import KimiDeltaAttention, LatentAttention
from specdec.models.shapes import SHAPES
from tests.models.drawn import DRAWN
from tests.models.random_checkpoints import Sample, draw, edit_config, read_tensors, save
from tests.models.runner import Runner
from tests.models.test_network import relative
from tests.tolerances import LOGITS_RELATIVE

SPELLED = {
    "linear_head_dim": "head_dim",
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
    "rope_scaling": None,
    "no_kda_lora": True,
    "use_mla_nope": False,
    "use_qk_norm": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "score_function": "sigmoid",
    "topk_method": "noaux_tc",
    "router_dtype": "fp32",
    "group_norm_size": 1,
}
COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "num_attention_heads": 4,
    "initializer_range": 0.15,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "eos_token_id": 7,
    "tie_word_embeddings": False,
}
TOKENS = list(range(3, 50))


def sample() -> Sample:
    """Describe three layers: the second attends, the first is dense."""
    config = DRAWN["bailing_hybrid"].agreeing(COMMON)
    return replace(draw("bailing_hybrid", 0), config=config, fused=False, sharded=False)


def publish(folder: Path) -> None:
    """Rewrite a folder of transformers' in the published layout, and add a layer after the last."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    fields = {
        SPELLED.get(name, name): value for name, value in config.items() if name not in SPELLED.values()
    }
    fields |= {**PUBLISHED, "rope_theta": rope["rope_theta"], "rotary_dim": config["qk_rope_head_dim"]}
    fields |= {
        "first_k_dense_replace": 1,
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
    }
    del fields["mlp_layer_types"]
    (folder / "config.json").write_text(json.dumps(fields))
    tensors: dict[str, Tensor] = {}
    for name, value in read_tensors(folder).items():
        delta = value.ndim == 2 and f"{name.rpartition('.dense')[0]}.A_log" in read_tensors(folder)
        tensors[name.replace("dense", "o_proj") if delta else name] = value
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 8)
    save_file(tensors, folder / "model.safetensors")


@torch.inference_mode()
def test_published_files_say_the_same(tmp_path: Path) -> None:
    model = save(sample(), tmp_path)
    saved = families.network(Checkpoint(tmp_path).config)
    publish(tmp_path)
    assert families.network(Checkpoint(tmp_path).config) == saved
    assert {name for name in Checkpoint(tmp_path).names() if "attention.o_proj" in name} == {
        f"model.layers.{i}.attention.o_proj.weight" for i in (0, 2)
    }
    expected_TV = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert relative(Runner(tmp_path, torch.float32).read(TOKENS, 7), expected_TV) < LOGITS_RELATIVE
    found_TV = Runner(tmp_path, torch.float32, kernels="triton").read(TOKENS[:10], 5)
    assert relative(found_TV, expected_TV[:10]) < LOGITS_RELATIVE


@pytest.mark.parametrize("experts", ["expert", "share_expert"])
@torch.inference_mode()
def test_limits_are_those_that_step_has(experts: str, tmp_path: Path) -> None:
    """Limits apply to routed or to shared experts, in one layer; Step's modules serve as oracle."""
    model = save(sample(), tmp_path)
    read = Runner(tmp_path, torch.float32).read(TOKENS, 7)
    edit_config(tmp_path, **{f"{experts}_swiglu_limit_list": [0, None, 0.25, 7]})
    moe: Any = model.model.layers[2].mlp
    part, theirs = (moe.experts, Step3p7Experts) if experts == "expert" else (moe.shared_experts, Step3p7MLP)
    part.__class__, part.limit = theirs, 0.25
    expected_TV = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    for kernels in ("cpu", "native", "reference"):
        found_TV = Runner(tmp_path, torch.float32, kernels=kernels).read(TOKENS[:20], 7)
        assert relative(found_TV, expected_TV[:20]) < LOGITS_RELATIVE < relative(read, expected_TV)


def test_layers_are_where_they_are_published() -> None:
    """Of 42 layers every sixth attends; all but the first two have experts, the last few with limits."""
    network = families.network(SHAPES["ling-3-flash"])
    mixers = [layer.mixers[0] for layer in network.layers]
    assert [i for i, own in enumerate(mixers) if isinstance(own, LatentAttention)] == list(range(5, 42, 6))
    assert all(mixer.bound == -5 for mixer in mixers if isinstance(mixer, KimiDeltaAttention))
    limits = [
        (getattr(own.ffn, "limit", None), getattr(own.ffn, "shared_limit", None)) for own in network.layers
    ]
    assert limits[34] == (torch.inf, 5) and limits[35:] == [(4, 5)] * 5 + [(4, 7)] * 2
    assert set(limits[:2]) == {(torch.inf, None)} and set(limits[2:34]) == {(torch.inf, torch.inf)}
