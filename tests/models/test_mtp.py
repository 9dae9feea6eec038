"""Multi-token heads against transformers modules that hold the same tensors."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tests.models.random_checkpoints import Sample, draw, read_tensors, save
from tests.models.runner import CPU, Runner
from tests.tolerances import LOGITS_RELATIVE

LENGTH = 33
DECODERS = {
    "qwen3_5": (Qwen3_5DecoderLayer, Qwen3_5RMSNorm),
    "qwen3_5_moe": (Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm),
    "qwen3_next": (Qwen3NextDecoderLayer, Qwen3NextRMSNorm),
}
OUTER = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "post_norm",
}


def samples(family: str, count: int) -> list[Sample]:
    drawn = (replace(draw(family, seed), fused=True) for seed in range(60))
    return [sample for sample in drawn if sample.mtp][:count]


def causal_mask(length: int) -> Tensor:
    return torch.full((length, length), float("-inf")).triu(1)[None, None]


def qwen_oracle(
    sample: Sample, reference: PreTrainedModel, tensors: dict[str, Tensor], ids: Tensor, hidden: Tensor
) -> Tensor:
    config = copy.deepcopy(sample.config)
    config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    config._attn_implementation = "eager"
    if sample.family == "qwen3_next":
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
    layer = MtpLayer(config, *DECODERS[sample.family], 0)
    renamed = {}
    for name, value in tensors.items():
        module, _, leaf = name.removeprefix("mtp.").rpartition(".")
        if module in OUTER:
            renamed[f"{OUTER[module]}.{leaf}"] = value
        else:
            renamed[name.replace("mtp.layers.0.", "mtp_block.")] = value
    layer.load_state_dict(renamed)
    position = torch.arange(ids.shape[1])[None]
    rope = reference.model.rotary_emb(hidden, position)
    embed = reference.get_input_embeddings()(ids)
    mask = causal_mask(ids.shape[1])
    return layer.eval()(embed, hidden, rope, mask, position, None)[0]


def nemotron_oracle(
    sample: Sample, reference: PreTrainedModel, tensors: dict[str, Tensor], ids: Tensor, hidden: Tensor
) -> Tensor:
    config, kinds = sample.config, sample.config.mtp_layers_block_type
    inner = type(config)(**{**config.to_dict(), "layers_block_type": kinds})
    inner._attn_implementation = "eager"
    inner._experts_implementation = "eager"
    last = len(kinds) - 1

    def norm(name: str) -> nn.Module:
        module = NemotronHRMSNorm(config.hidden_size, config.layer_norm_epsilon)
        module.load_state_dict({"weight": tensors[name]})
        return module

    embed = norm("mtp.layers.0.enorm.weight")(reference.get_input_embeddings()(ids))
    x = (
        torch.cat([embed, norm("mtp.layers.0.hnorm.weight")(hidden)], -1)
        @ tensors["mtp.layers.0.eh_proj.weight"].T
    )
    for i in range(len(kinds)):
        block = NemotronHBlock(inner, i).eval()
        own = {
            n.removeprefix(f"mtp.layers.{i}."): v
            for n, v in tensors.items()
            if n.startswith(f"mtp.layers.{i}.")
        }
        block.load_state_dict({name: own[name] for name in block.state_dict()})
        x = block(x, attention_mask=causal_mask(ids.shape[1]))
    return norm(f"mtp.layers.{last}.final_layernorm.weight")(x)[0]


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("family", [*DECODERS, "nemotron_h"])
@torch.inference_mode()
def test_the_head_equals_its_oracle(tmp_path: Path, family: str, index: int) -> None:
    sample = samples(family, 3)[index]
    reference = save(sample, tmp_path)
    tensors = {name: t for name, t in read_tensors(tmp_path).items() if name.startswith("mtp.")}
    ids_T = torch.randint(
        sample.config.vocab_size, (LENGTH + 1,), generator=torch.Generator().manual_seed(index)
    )
    runner = Runner(tmp_path, torch.float32, mtp=True)
    assert runner.head is not None
    own = runner.sequence()
    runner.step([(own, ids_T[:-1].tolist())])
    hidden_TD = own.hidden[0]
    oracle = nemotron_oracle if family == "nemotron_h" else qwen_oracle
    expected = oracle(sample, reference, tensors, ids_T[None, 1:], hidden_TD[None])
    pieces = []
    for start, stop in ((0, 20), (20, 21), (21, LENGTH)):
        tree = TokenTree.chain(ids_T[1 + start : 1 + stop].tolist())
        window = build_window([Row(tree, start, own.table_N, own.state)], runner.conv_width, CPU)
        pieces.append(runner.head.forward(window, hidden_TD[start:stop], runner.arena))
    found = torch.cat(pieces)
    assert float((found - expected).norm() / expected.norm()) < LOGITS_RELATIVE
    # The mutant: hidden states shifted by one position.
    window = build_window(
        [Row(TokenTree.chain(ids_T[1:].tolist()), 0, own.table_N, own.state)], runner.conv_width, CPU
    )
    wrong = runner.head.forward(window, hidden_TD.roll(1, dims=0), runner.arena)
    assert float((wrong - expected).norm() / expected.norm()) > LOGITS_RELATIVE
