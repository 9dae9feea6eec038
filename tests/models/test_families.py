"""From configs and disk names to networks and canonical tensors, for checkpoints written by transformers."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models import families
from specdec.models.checkpoint import Checkpoint
from specdec.models.feed_forward import MoE
from specdec.models.mixers import Attention, GatedDeltaNet, Mamba2
from specdec.models.norm import Norm
from specdec.models.rope import Rope
from specdec.models.shapes import SHAPES
from tests.models.canonical import canonical
from tests.models.random_checkpoints import (
    FAMILIES,
    HEADS,
    Sample,
    add_tensors,
    draw,
    edit_config,
    read_tensors,
    save,
)

SEEDS = range(12)


def take_all(folder: Path, *, mtp: bool = False) -> dict[str, Tensor]:
    """Load a whole folder, with every check."""
    checkpoint = Checkpoint(folder)
    network = families.read_network(checkpoint)
    weights = families.open_weights(checkpoint, network, dtype=torch.float32, mtp=mtp, progress=False)
    taken = {name: weights.take(name, shape) for name, shape in canonical(network, mtp=mtp)}
    weights.finish()
    assert all(taken[name].shape == shape for name, shape in canonical(network, mtp=mtp))
    return taken


def numbers(tensors: dict[str, Tensor]) -> Tensor:
    """Sort all numbers: equal for two sets of tensors that differ only in names and layout."""
    return torch.cat([value.flatten() for value in tensors.values()]).sort().values


def drawn(family: str, **wanted: object) -> Sample:
    """Find the first sample of a family with the given properties."""
    samples = (draw(family, seed) for seed in range(200))
    return next(s for s in samples if all(getattr(s, name) == value for name, value in wanted.items()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_accounted_for(family: str, seed: int, tmp_path: Path) -> None:
    sample = draw(family, seed)
    save(sample, tmp_path)
    taken = take_all(tmp_path, mtp=sample.mtp)
    stored = {name: value for name, value in read_tensors(tmp_path).items() if "visual" not in name}
    assert torch.equal(numbers(taken), numbers(stored))
    taken["embed.weight"] = taken["embed.weight"] + 1
    assert not torch.equal(numbers(taken), numbers(stored))


# Names of our tensors in transformers' modules, by the prefix that shows that a layer has them.
NAMED = {
    "self_attn.": {
        "mixer.q": "self_attn.q_proj",
        "mixer.k_norm": "self_attn.k_norm",
        "mixer.o": "self_attn.o_proj",
    },
    "linear_attn.": {"mixer.norm": "linear_attn.norm", "mixer.out": "linear_attn.out_proj"},
    "mlp.gate_proj": {
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn_norm": "post_attention_layernorm",
    },
    "mlp.experts": {"ffn.router": "mlp.gate", "ffn.shared.up": "mlp.shared_expert.up_proj"},
    "input_layernorm": {"mixer_norm": "input_layernorm"},
    "mixer.in_proj": {"mixer_norm": "norm", "mixer.in": "mixer.in_proj", "mixer.norm": "mixer.norm"},
    "mixer.q_proj": {"mixer_norm": "norm", "mixer.v": "mixer.v_proj"},
    "mixer.gate.": {"ffn_norm": "norm", "ffn.shared.down": "mixer.shared_experts.down_proj"},
    "mixer.fc1_latent_proj": {"ffn.latent_in": "mixer.fc1_latent_proj"},
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_one_shape_are_not_confused(family: str, seed: int, tmp_path: Path) -> None:
    state, taken = save(draw(family, seed), tmp_path).state_dict(), take_all(tmp_path)
    compared = 0
    for i, marker in itertools.product(range(10), NAMED):
        if any(name.startswith(f"model.layers.{i}.{marker}") for name in state):
            for ours, theirs in NAMED[marker].items():
                if (value := state.get(f"model.layers.{i}.{theirs}.weight")) is None:
                    continue  # such as norms of queries and keys, which not all attention has
                compared += 1
                assert torch.equal(taken[f"layers.{i}.{ours}.weight"], value)
    assert compared


@pytest.mark.parametrize("family", HEADS)
def test_head_is_loaded_only_on_request(family: str, tmp_path: Path) -> None:
    save(drawn(family, mtp=True), tmp_path)
    without, with_head = take_all(tmp_path, mtp=False), take_all(tmp_path, mtp=True)
    assert (
        {name for name in with_head if name not in without}
        == {name for name in with_head if name.startswith("mtp.")}
        != set()
    )


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "nemotron_h"])
def test_head_is_absent_where_its_tensors_are(family: str, tmp_path: Path) -> None:
    save(drawn(family, mtp=False), tmp_path)
    edit_config(tmp_path, mtp_num_hidden_layers=1, num_nextn_predict_layers=1)
    assert families.network(Checkpoint(tmp_path).config).mtp != ()
    assert families.read_network(Checkpoint(tmp_path)).mtp == ()


@pytest.mark.parametrize("family", ["qwen3_5_moe", "nemotron_h"])
def test_later_modules_of_a_head_are_ignored(family: str, tmp_path: Path) -> None:
    save(drawn(family, mtp=True), tmp_path)
    once = take_all(tmp_path, mtp=True)
    add_tensors(tmp_path, {"mtp.layers.2.norm.weight": torch.zeros(3)})
    assert once.keys() == take_all(tmp_path, mtp=True).keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_interleaved_projections_become_flat(seed: int, tmp_path: Path) -> None:
    model, taken = save(draw("qwen3_next", seed), tmp_path), take_all(tmp_path)
    for i, layer in enumerate(model.model.layers):
        if not hasattr(layer, "linear_attn"):
            continue
        net, x = layer.linear_attn, torch.randn(1, 3, model.config.hidden_size)
        fused, gates = net.in_proj_qkvz(x), net.in_proj_ba(x)
        q, k, v, *rest = (part.flatten(2) for part in net.fix_query_key_value_ordering(fused, gates))
        wanted = dict(zip(("qkv", "z", "b", "a"), (torch.cat([q, k, v], -1), *rest), strict=True))
        for name, value in wanted.items():
            weight = taken[f"layers.{i}.mixer.in_{name}.weight"]
            torch.testing.assert_close(F.linear(x, weight), value)
        plain = net.in_proj_qkvz.weight[: len(taken[f"layers.{i}.mixer.in_qkv.weight"])]
        same = torch.equal(plain, taken[f"layers.{i}.mixer.in_qkv.weight"])
        assert same == (net.num_k_heads == 1), "rows as they lie on disk would pass"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "nemotron_h"])
def test_experts_may_be_fused_or_apart(family: str, tmp_path: Path) -> None:
    seed = next(s for s in range(100) if _has_experts(draw(family, s)))
    sample = draw(family, seed)
    forms = []
    for fused in (False, True):
        folder = tmp_path / str(fused)
        save(Sample(family, seed, sample.config, sample.mtp, fused, False, False), folder)
        assert any("experts.0." in name for name in read_tensors(folder)) != fused
        forms.append(take_all(folder, mtp=sample.mtp))
    assert all(torch.equal(forms[0][name], forms[1][name]) for name in forms[0])
    up = next(value for name, value in forms[0].items() if name.endswith("experts.up"))
    assert not torch.equal(up, up.flip(1)), "swapped gate and up would pass"


def _has_experts(sample: Sample) -> bool:
    return any(isinstance(x.ffn, MoE) for x in families.network(sample.config.to_dict()).layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_hold_what_one_file_holds(family: str, tmp_path: Path) -> None:
    drawn_ = draw(family, 3)
    for sharded in (False, True):
        folder = tmp_path / str(sharded)
        save(Sample(family, 3, drawn_.config, drawn_.mtp, drawn_.fused, sharded, False), folder)
        assert (folder / "model.safetensors").exists() != sharded
    one, many = take_all(tmp_path / "False"), take_all(tmp_path / "True")
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize("tied", [False, True])
def test_output_head_follows_the_config(tied: bool, tmp_path: Path) -> None:
    sample = next(s for s in map(_dense_sample, range(50)) if s.config.tie_word_embeddings == tied)
    save(sample, tmp_path)
    assert families.read_network(Checkpoint(tmp_path)).tied == tied
    assert ("head.weight" in take_all(tmp_path)) != tied


def _dense_sample(seed: int) -> Sample:
    return draw("qwen3_5", seed)


@pytest.mark.parametrize("same", [False, True])
def test_stored_head_wins_over_tying_where_it_differs(same: bool, tmp_path: Path) -> None:
    sample = next(s for s in map(_dense_sample, range(50)) if s.config.tie_word_embeddings)
    model = save(sample, tmp_path)
    embed = model.get_input_embeddings().weight.detach()
    add_tensors(tmp_path, {"lm_head.weight": embed.clone() if same else embed + 1})
    taken = take_all(tmp_path)
    assert same or torch.equal(taken["head.weight"], embed + 1)
    assert ("head.weight" in taken) != same


@pytest.mark.parametrize("moe", [False, True])
def test_multimodal_checkpoint_of_transformers_loads(moe: bool, tmp_path: Path) -> None:
    text = draw("qwen3_5_moe" if moe else "qwen3_5", 2).config
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
    outer = transformers.Qwen3_5MoeConfig if moe else transformers.Qwen3_5Config
    config = outer(
        text_config=text.to_dict(),
        vision_config={**vision, "out_hidden_size": text.hidden_size, "num_position_embeddings": 16},
        tie_word_embeddings=text.tie_word_embeddings,
    )
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    taken = take_all(tmp_path)
    stored = {name: value for name, value in read_tensors(tmp_path).items() if ".visual." not in name}
    assert torch.equal(numbers(taken), numbers(stored))
    assert len(stored) < len(read_tensors(tmp_path))


@pytest.mark.parametrize("body", ["", "language_model.model.", "model.language_model."])
def test_body_may_have_any_known_prefix(body: str, tmp_path: Path) -> None:
    sample = drawn("qwen3_5", mtp=False, multimodal=False, sharded=False)
    save(sample, tmp_path)
    before, tensors = take_all(tmp_path), read_tensors(tmp_path)
    head = "language_model.lm_head." if body.startswith("language") else "lm_head."
    renamed = {name.replace("model.", body, 1).replace("lm_head.", head): v for name, v in tensors.items()}
    renamed["model.rotary_emb.inv_freq"] = torch.zeros(4)
    (tmp_path / "model.safetensors").unlink()
    save_file(renamed, tmp_path / "model.safetensors")
    after = take_all(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_older_layout_of_a_config_means_the_same(family: str, seed: int) -> None:
    config = draw(family, seed).config.to_dict()
    old = dict(config)
    if family == "nemotron_h":
        symbols = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        for new, name in (
            ("layers_block_type", "hybrid_override_pattern"),
            ("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        ):
            old[name] = "".join(symbols[kind] for kind in old.pop(new))
        renamed = {
            "conv_kernel": "mamba_d_conv",
            "n_groups": "mamba_n_groups",
            "use_conv_bias": "mamba_conv_bias",
        }
        old |= {name: old.pop(new) for new, name in renamed.items()}
        old["time_step_limit"] = [0.0, math.inf]
    else:
        rope = old.pop("rope_parameters")
        old |= {name: value for name, value in rope.items() if name != "rope_type"} | {"rope_scaling": None}
    if family.startswith("qwen3_5"):
        del config["layer_types"], old["layer_types"]
        config["layer_types"] = [
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(config["num_hidden_layers"])
        ]
        old["full_attention_interval"] = 4
    assert families.network(old) == families.network(config)


def test_each_level_of_a_network_is_read(tmp_path: Path) -> None:
    network = families.network(SHAPES["qwen3.5-35b-a3b"])
    linear, full = network.layers[0], network.layers[3]
    assert linear.mixers[0] == GatedDeltaNet(16, 32, 128, 128, 4, 1e-6)
    norm = Norm(1e-6, offset=1.0)
    rope = Rope(64, 1e7)
    assert full.mixers[0] == Attention(16, 2, 256, 256**-0.5, rope, norm, gated=True, bias=False)
    assert full.ffn == MoE(256, 8, 512, "swiglu", "softmax", True, 512, True)
    assert network.mtp == (full,)
    assert network.norm == norm
    mamba = families.network(SHAPES["nemotron-h-8b"]).layers[0].mixers[0]
    assert mamba == Mamba2(128, 64, 8, 128, 4, True, False, 1e-5, (1e-3, math.inf))


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [(None, None, ()), (7, None, (7,)), ([7, 8], None, (7, 8)), (7, [9, 7], (9, 7)), ([7], 9, (9,))],
)
def test_end_tokens_come_from_either_config(config: Any, generation: Any, eos: Any, tmp_path: Path) -> None:
    save(drawn("qwen3_5", multimodal=True), tmp_path)
    text = {**json.loads((tmp_path / "config.json").read_text())["text_config"], "eos_token_id": config}
    edit_config(tmp_path, text_config=text)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert families.read_network(Checkpoint(tmp_path)).eos == eos


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("tiny", {"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ("tiny", {"compression_config": {"format": "dense"}}, "compression_config", "original checkpoint"),
    (
        "tiny",
        {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}},
        "rope_parameters.rope_type",
        "default",
    ),
    ("tiny", {"rope_scaling": {"type": "dynamic"}}, "rope_scaling.type", "default"),
    (
        "tiny",
        {"rope_parameters": None, "partial_rotary_factor": 0.05},
        "partial_rotary_factor",
        "even number",
    ),
    ("tiny", {"use_sliding_window": True}, "use_sliding_window", "full attention"),
    ("tiny", {"attn_output_gate": False}, "attn_output_gate", "True"),
    ("tiny", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings", "False"),
    ("tiny", {"num_key_value_heads": 3}, "num_attention_heads", "multiple of num_key_value_heads"),
    ("tiny", {"linear_num_key_heads": 3}, "linear_num_value_heads", "multiple"),
    ("tiny", {"layer_types": ["sliding_attention"] * 12}, "layer_types", "not sliding_attention"),
    ("tiny", {"layer_types": ["full_attention"]}, "layer_types", "num_hidden_layers (12)"),
    ("tiny", {"hidden_size": None}, "hidden_size", "integer"),
    ("tiny", {"hidden_size": "256"}, "hidden_size", "'256'"),
    ("tiny", {"num_hidden_layers": 0}, "num_hidden_layers", "at least 1"),
    ("tiny", {"rms_norm_eps": float("nan")}, "rms_norm_eps", "finite number"),
    ("tiny", {"eos_token_id": "</s>"}, "eos_token_id", "integer"),
    ("tiny", {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
    ("tiny", {"model_type": None}, "model_type", "config.json"),
    ("qwen3.5-35b-a3b", {"num_experts_per_tok": 300}, "num_experts_per_tok", "at most num_experts (256)"),
    ("qwen3.5-35b-a3b", {"mlp_only_layers": [0]}, "mlp_only_layers", "[]"),
    ("qwen3-next-80b-a3b", {"num_experts": None}, "num_experts", "integer"),
    ("nemotron-h-8b", {"mlp_hidden_act": "silu"}, "mlp_hidden_act", "'relu2'"),
    ("nemotron-h-8b", {"attention_bias": True}, "attention_bias", "false"),
    ("nemotron-h-8b", {"tie_word_embeddings": True}, "tie_word_embeddings", "false"),
    ("nemotron-h-8b", {"residual_in_fp32": True}, "residual_in_fp32", "false"),
    ("nemotron-h-8b", {"time_step_limit": [0.0, 0.1]}, "time_step_limit", "inf"),
    ("nemotron-h-8b", {"sliding_window": 4096}, "sliding_window", "full attention"),
    ("nemotron-h-8b", {"hybrid_override_pattern": "M?"}, "hybrid_override_pattern", "pattern of M * - E"),
    ("nemotron-h-8b", {"hybrid_override_pattern": None}, "layers_block_type", "hybrid_override_pattern"),
    ("nemotron-h-8b", {"n_groups": 7}, "mamba_num_heads", "multiple of n_groups (7)"),
]


@pytest.mark.parametrize(("shape", "fields", "culprit", "remedy"), REFUSED)
def test_unsupported_option_is_refused_by_name(
    shape: str, fields: dict[str, Any], culprit: str, remedy: str
) -> None:
    families.network(SHAPES[shape])
    with pytest.raises(CheckpointError) as refused:
        families.network(SHAPES[shape] | fields)
    assert refused.value.field == culprit
    assert culprit in str(refused.value)
    assert remedy in str(refused.value)


def test_option_of_the_inner_config_is_refused_by_its_path() -> None:
    text = SHAPES["tiny"] | {"hidden_act": "gelu"}
    with pytest.raises(CheckpointError, match=r"text_config\.hidden_act is 'gelu'"):
        families.network({"model_type": "qwen3_5", "text_config": text})
